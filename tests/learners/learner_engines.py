"""Engines as the publisher sees them: the weights half of an embedded engine, with faults on demand."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager

import torch
import trio
from learner_fakes import make_policy

from streamrl_learners.model import copy_weights, sequence_logprobs
from streamrl_queue import Member, Membership, Version
from streamrl_queue.errors import DeadlineExceeded, EngineError, WeightError
from streamrl_queue.rpc import RpcServer
from streamrl_queue.waits import Wait, Waits
from streamrl_queue.weights import (
    Abort,
    Aborted,
    Applied,
    Apply,
    Circle,
    Prepare,
    Prepared,
    Resume,
    Resumed,
    WeightRequest,
    buffer_digest,
    unpack,
)


class FakeEngine:
    """Receives weights into a real model. `fault` names what goes wrong, `times` how often."""

    def __init__(self, name: str, fault: str = "", times: int = 10**9) -> None:
        self.name = name
        self.session = f"session of {name}"
        self.fault = fault
        self.times = times
        self.endpoint: str | None = None
        self.policy = make_policy(seed=99)
        self.version = 0
        self.log: list[str] = []
        self.received = trio.Event()
        self.staging: list[torch.Tensor] = []
        self.circle = Circle()
        self.vanish = lambda: None
        self.asked = trio.Event()
        self.resumed = trio.Event()

    @property
    def member(self) -> Member:
        return Member(self.session, self.name, "engine", self.endpoint, False, None, "", 0.0, {})

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeEngine]:
        async with trio.open_nursery() as self.nursery:
            async with RpcServer.bind("tcp://127.0.0.1:0", WeightRequest, self.answer) as server:
                self.endpoint = server.address
                yield self
            self.nursery.cancel_scope.cancel()

    async def at_least(self, version: int) -> int:
        """The version that answers a request which must not be sampled from one before `version`."""
        while self.version < max(version, 1):
            await self.resumed.wait()
        return self.version

    def fails(self, fault: str) -> bool:
        if self.fault != fault or self.times <= 0:
            return False
        self.times -= 1
        return True

    async def answer(self, peer: str, request):
        self.log.append(type(request).__name__)
        self.asked.set()
        return await getattr(self, type(request).__name__.lower())(request)

    async def prepare(self, request: Prepare) -> Prepared:
        if self.fails("prepare"):
            raise WeightError("missing tensors: model.norm.weight")
        if self.fails("hang"):
            await trio.sleep_forever()
        if self.fails("vanish"):
            self.vanish()
            await trio.sleep_forever()
        self.manifest, self.received, self.staging = request.manifest, trio.Event(), []
        if not self.fails("never joins"):
            self.nursery.start_soon(self.receive, request)
        return Prepared()

    async def receive(self, request: Prepare) -> None:
        def work() -> list[torch.Tensor]:
            group = self.circle.join(
                request.store, request.group, request.rank, request.world, request.backend, request.seconds
            )
            buffers = [torch.empty(bucket.bytes, dtype=torch.uint8) for bucket in request.manifest.buckets]
            for buffer in buffers:
                group.broadcast(buffer)
            return buffers

        try:
            self.staging = await trio.to_thread.run_sync(work, abandon_on_cancel=True)
        except (RuntimeError, DeadlineExceeded):
            self.circle.leave(request.group)
            self.log.append("transfer failed")
        self.received.set()

    async def apply(self, request: Apply) -> Applied:
        await self.received.wait()
        if self.fails("apply"):
            raise EngineError("out of memory")
        if self.fails("digest"):
            self.staging[0][:8] += 1
        digests = tuple(buffer_digest(buffer) for buffer in self.staging)
        tensors = {}
        for bucket, buffer in zip(self.manifest.buckets, self.staging, strict=True):
            tensors |= unpack(bucket.tensors, buffer)
        copy_weights(self.policy.lm, tensors, self.name)
        if self.fails("probe"):
            with torch.no_grad():
                self.policy.lm.model.norm.weight.mul_(1.5)
        with torch.no_grad():
            mine = sequence_logprobs(self.policy, torch.tensor(request.probe.tokens))
        error = float((mine - torch.tensor(request.probe.logprobs)).abs().max())
        return Applied(request.version, digests, error)

    async def resume(self, request: Resume) -> Resumed:
        if self.fails("resume"):
            raise EngineError("scheduler died")
        self.version = request.version
        self.resumed.set()
        self.resumed = trio.Event()
        return Resumed(0.5)

    async def abort(self, request: Abort) -> Aborted:
        return Aborted()


class FakeVersions:
    """The versions and members of a `TransferQueue`."""

    def __init__(self, *engines: FakeEngine) -> None:
        self.engines = list(engines)
        self.epoch = 0
        self.moved = trio.Event()
        self.all: dict[int, Version] = {}
        self.fenced: list[tuple[str, str]] = []
        for engine in engines:
            engine.vanish = lambda engine=engine: self.leave(engine)

    def move(self) -> None:
        self.epoch += 1
        self.moved.set()
        self.moved = trio.Event()

    def join(self, engine: FakeEngine) -> None:
        self.engines.append(engine)
        self.move()

    def leave(self, engine: FakeEngine) -> None:
        self.engines.remove(engine)
        self.move()

    def waiting(self, what: str, *, on: str) -> AbstractContextManager[Wait]:
        return Waits(time.time).waiting(what, on=on)

    async def members(self, role: str, *, after: int, wait: float) -> Membership:
        while self.epoch <= after:
            await self.moved.wait()
        return Membership(self.epoch, tuple(engine.member for engine in self.engines))

    async def fence(self, session: str, reason: str) -> None:
        self.fenced.append((session, reason))
        self.move()

    async def versions(self) -> tuple[Version, ...]:
        return tuple(self.all.values())

    async def begin_version(self, step: int, parent: int | None) -> int:
        id = len(self.all) + 1
        self.all[id] = Version(id=id, step=step, parent=parent)
        return id

    async def commit_version(self, version: int, digest: str) -> None:
        begun = self.all[version]
        self.all[version] = Version(id=version, step=begun.step, parent=begun.parent, digest=digest)

    @property
    def committed(self) -> list[int]:
        return [version.id for version in self.all.values() if version.committed]
