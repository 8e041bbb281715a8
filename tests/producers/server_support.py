"""Engines on real sockets, a real broker, and a learner's side of a publish in a thread."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
import trio
from engine_support import prompt, reference, tensors

from streamrl_producers.config import EmbeddedEngine
from streamrl_producers.engines.embedded.server import run_engine
from streamrl_producers.engines.protocol import EngineReply
from streamrl_queue import Broker, QueueConfig, TransferQueue, open_broker, training_flow
from streamrl_queue.rpc import RpcClient
from streamrl_queue.weights import (
    Abort,
    Applied,
    Apply,
    Bucket,
    Manifest,
    Prepare,
    Probe,
    Resume,
    TensorSpec,
    TransferGroup,
    buffer_digest,
    host_store,
    pack,
    plan,
    spec_bytes,
)

SECONDS = 10.0  # deadline of everything that should take milliseconds
groups = itertools.count()


@asynccontextmanager
async def broker(path: Path) -> AsyncIterator[Broker]:
    flow = training_flow(QueueConfig(max_staleness=4), rows_per_step=4)
    async with open_broker(flow, path / "journal", bind=f"ipc://{path}/queue", durability="memory") as opened:
        yield opened


@asynccontextmanager
async def engine(
    broker: Broker, path: Path, made: Any, name: str = "engine-0", **settings: Any
) -> AsyncIterator[trio.CancelScope]:
    """A running engine of `made`'s architecture, without weights. Cancel the scope to let it die."""
    (path / "base").mkdir(exist_ok=True)
    (path / "base" / "config.json").write_text(json.dumps(made.config.to_dict()))
    config = EmbeddedEngine(**{"slots": 8, "max_tokens": 128, "step_tokens": 64} | settings)

    def connect(endpoint: str) -> Any:
        return TransferQueue.connect(broker.address, role="engine", name=name, endpoint=endpoint)

    async def run() -> None:
        with scope:
            await run_engine(connect, model_dir=path / "base", config=config, bind=f"ipc://{path}/{name}")

    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield scope
        scope.cancel()


async def endpoint(queue: TransferQueue, name: str = "engine-0") -> str:
    epoch = -1
    while True:
        membership = await queue.members("engine", after=epoch, wait=SECONDS)
        epoch = membership.epoch
        for member in membership.members:
            if member.name == name and member.endpoint:
                return member.endpoint


def client(address: str) -> Any:
    return RpcClient.connect(address, EngineReply)


class Learner:
    """Rank 0 of a publish to engines at `clients`."""

    def __init__(self, *clients: RpcClient, bucket_bytes: int = 4096) -> None:
        self.clients = clients
        self.store = host_store()
        self.bucket_bytes = bucket_bytes

    def manifest(self, version: int, state: Mapping[str, torch.Tensor]) -> tuple[Manifest, list[torch.Tensor]]:
        specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in state.items()]
        parts = list(plan(specs, self.bucket_bytes))
        buffers = [pack(part, state) for part in parts]
        buckets = tuple(
            Bucket(part, sum(map(spec_bytes, part)), buffer_digest(buffer))
            for part, buffer in zip(parts, buffers, strict=True)
        )
        return Manifest(version, 0, None, buckets), buffers

    async def prepare(self, version: int, state: Mapping[str, torch.Tensor], seconds: float = SECONDS) -> Any:
        """Prepare on all engines; returns what sends the buckets."""
        manifest, buffers = self.manifest(version, state)
        group, world = f"test-{next(groups)}", len(self.clients) + 1
        address = f"127.0.0.1:{self.store.port}"
        for rank, one in enumerate(self.clients, 1):
            request = Prepare(manifest, group, address, rank, world, "gloo", seconds)
            await one.call(request, deadline=SECONDS)

        def send() -> None:
            members = TransferGroup(address, group, 0, world, "gloo", seconds)
            for buffer in buffers:
                members.broadcast(buffer)

        return send

    async def apply(self, version: int, made: Any) -> list[Applied]:
        tokens = prompt(16, 99)
        probe = Probe(tuple(tokens.tolist()), tuple(reference(made, tokens).tolist()))
        return [await one.call(Apply(version, probe), deadline=SECONDS) for one in self.clients]

    async def stage(self, version: int, made: Any, seconds: float = SECONDS) -> list[Applied]:
        """Everything up to the verdict."""
        await trio.to_thread.run_sync(await self.prepare(version, tensors(made), seconds))
        return await self.apply(version, made)

    async def resume(self, version: int) -> None:
        for one in self.clients:
            await one.call(Resume(version), deadline=SECONDS)

    async def abort(self, version: int) -> None:
        for one in self.clients:
            await one.call(Abort(version, "test"), deadline=SECONDS)

    async def publish(self, version: int, made: Any) -> None:
        for applied in await self.stage(version, made):
            assert applied.probe_error < 1e-3
        await self.resume(version)
