"""The engine process: answers requests, decodes, receives weights, and tells the queue how it does.

    clients ── Generate, Health ──►┌───────────┐
                                   │ RpcServer ├─► Runner ──► Batch ──► Decoder    (worker thread)
    learner ── Prepare, Apply, … ─►└─────┬─────┘     ▲ boundary
                                         └─► WeightReceiver ◄── broadcasts          (worker thread)

Its endpoint is bound before its session with the queue begins, so that members always have an address that answers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
import trio

from streamrl_queue import TransferQueue
from streamrl_queue.errors import EngineError
from streamrl_queue.nursery import open_nursery
from streamrl_queue.rpc import RpcServer
from streamrl_queue.weights import Abort, Apply, Prepare, Resume

from ...config import EmbeddedEngine
from ..protocol import EngineRequest, Generate, GenerateReply, Health
from .architecture import Architecture
from .batch import Batch, Request
from .decoder import Decoder
from .receiver import EmbeddedReceiver
from .runner import Runner

REPORT_SECONDS: Final = 1.0  # gauges leave with the heartbeat, once a second


async def run_engine(
    connect: Callable[[str], AbstractAsyncContextManager[TransferQueue]],
    *,
    model_dir: Path,
    config: EmbeddedEngine,
    bind: str,
    key: bytes | None = None,
) -> None:
    """Serve the model of `model_dir` at `bind` until cancelled. It is ready once it has got weights.

    `connect(endpoint)` opens the engine's session with the queue, after the endpoint is bound.

    Raises:
        ConfigError: a model that this engine cannot run. AddressError: `bind` is taken.
    """
    torch.set_num_threads(config.threads)
    runner = Runner(make_batch(Architecture.read(model_dir), config))
    engine = _Engine(runner)
    async with (
        RpcServer.bind(bind, EngineRequest, engine.handle, key=key) as server,
        connect(server.address) as queue,
        open_nursery() as nursery,
    ):
        await queue.announce(ready=False)
        engine.open(
            EmbeddedReceiver(
                runner,
                nursery,
                recompute=config.kv_on_update == "recompute",
                committed=lambda version: _committed(queue, version),
                announce=lambda version: queue.announce(ready=True, version=version),
            )
        )
        nursery.start_soon(runner.run)
        nursery.start_soon(_report, queue, engine)


def make_batch(architecture: Architecture, config: EmbeddedEngine) -> Batch:
    """An empty batch of the configured size, without weights."""
    decoder = Decoder(
        architecture,
        slots=config.slots,
        context=config.max_tokens,
        dtype=getattr(torch, config.dtype),
        device=config.device,
    )
    return Batch(decoder, step_tokens=config.step_tokens)


async def _committed(queue: TransferQueue, version: int) -> bool:
    return any(known.id == version and known.committed for known in await queue.versions())


class _Engine:
    """Hands each request to whom it concerns."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._opened = trio.Event()
        self._receiver: EmbeddedReceiver | None = None

    def open(self, receiver: EmbeddedReceiver) -> None:
        self._receiver = receiver
        self._opened.set()

    async def handle(self, peer: str, request: EngineRequest) -> msgspec.Struct:
        match request:
            case Generate():
                return await self._generate(request)
            case Health():
                return await self.runner.health()
        await self._opened.wait()
        assert self._receiver is not None
        match request:
            case Prepare():
                return await self._receiver.prepare(request)
            case Apply():
                return await self._receiver.apply(request)
            case Resume():
                return await self._receiver.resume(request)
            case Abort():
                return await self._receiver.abort(request)

    async def _generate(self, request: Generate) -> GenerateReply:
        version = self.runner.version
        if version is None or version < request.version_at_least:
            raise EngineError(f"this engine has version {version}, asked for {request.version_at_least} or later")
        tokens = np.frombuffer(request.tokens, "<i4").astype(np.int32, copy=False)
        ours = Request(tokens, request.sampling, request.session)
        return GenerateReply.of(await self.runner.generate(ours, request.seconds))

    @property
    def pause_seconds(self) -> float:
        return self._receiver.pause_seconds if self._receiver else 0.0


def _activity(runner: Runner) -> str:
    if runner.state == "sampling":
        return "samples" if runner.batch.running else "waits for requests"
    return "waits for weights" if runner.state == "empty" else "waits for a version's commit"


async def _report(queue: TransferQueue, engine: _Engine) -> None:
    """consumes: counters. produces: gauges. waits for: the clock. unblocked by: it."""
    runner, busy = engine.runner, 0.0
    while True:
        counters = runner.batch.counters
        queue.report(
            _activity(runner),
            tokens_sampled=counters.sampled,
            tokens_forced=counters.forced,
            running=runner.batch.running,
            waiting=runner.batch.waiting,
            busy_share=min(1.0, (runner.busy_seconds - busy) / REPORT_SECONDS),
            version=-1 if runner.version is None else runner.version,
            pause_ms=engine.pause_seconds * 1e3,
        )
        busy = runner.busy_seconds
        await trio.sleep(REPORT_SECONDS)
