"""Bringing one version to some engines: prepare, transfer, apply and verify, then resume or abort. trio.

Each phase asks all engines at once. An engine fails its phase by an error of its own, by the phase's deadline,
or by leaving the queue's membership; what failed is returned, by engine, and never raised: the publisher decides.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec
import trio

from streamrl_queue.errors import DeadlineExceeded, StreamRLError, WeightError
from streamrl_queue.rpc import RpcClient
from streamrl_queue.weights import (
    Abort,
    Applied,
    Apply,
    Backend,
    Circle,
    Manifest,
    Prepare,
    Resume,
    WeightReply,
)

from .roster import Engine, Roster

if TYPE_CHECKING:
    from .snapshot import Snapshot

log = logging.getLogger(__name__)

Phase = Literal["prepare", "transfer", "apply", "resume", "abort"]


LEFT: Final = "it left the run"


class Failure(NamedTuple):
    """What an engine did not do. `engine` is None when a broadcast failed and nobody can be blamed."""

    engine: Engine | None
    phase: Phase
    reason: str

    def __str__(self) -> str:
        return f"{self.engine.name if self.engine else 'transfer group'}: {self.phase}: {self.reason}"


class Delivery:
    """Talks to engines about versions. One at a time: the publisher sees to it."""

    def __init__(
        self,
        roster: Roster,
        store: str,
        *,
        backend: Backend,
        seconds: float,
        tolerance: float,
        key: bytes | None = None,
    ) -> None:
        """`store`: `host:port` of the rendezvous. `seconds`: deadline of each phase. `tolerance`: the probe's, nats."""
        self._roster = roster
        self._store = store
        self._backend = backend
        self._seconds = seconds
        self._tolerance = tolerance
        self._key = key
        self._circle = Circle()
        # Who is in the circle, and its name: another set of engines, or the same after a failure, needs another one.
        self._members: tuple[Engine, ...] = ()
        self._group = ""
        self._groups = itertools.count(1)
        # An engine that outlives its learner must not take the next one's first group for the one it is in.
        self._nonce = os.urandom(4).hex()

    async def verify(self, snapshot: Snapshot, manifest: Manifest, engines: Sequence[Engine]) -> list[Failure]:
        """Take `engines` through prepare, transfer and apply; nothing failed means that each has proved the version."""
        group = self._group_of(tuple(engines))
        world = len(engines) + 1

        async def prepare(engine: Engine) -> None:
            rank = engines.index(engine) + 1
            request = Prepare(manifest, group, self._store, rank, world, self._backend, self._seconds)
            await self._call(engine, request)

        async def apply(engine: Engine) -> None:
            applied = await self._call(engine, Apply(manifest.version, snapshot.probe))
            self._verify(snapshot, manifest.version, applied)

        failures = (
            await self._each("prepare", engines, prepare)
            or await self._transfer(snapshot, group, world, engines)
            or await self._each("apply", engines, apply)
        )
        # Only a delivery that went well leaves a group that can be trusted.
        if not failures:
            self._members = tuple(engines)
        return failures

    def _group_of(self, engines: tuple[Engine, ...]) -> str:
        """The name of the group for a delivery to `engines`."""
        if engines != self._members:
            self._circle.leave(self._group)
            self._group = f"{self._nonce}/epoch-{next(self._groups)}"
        self._members = ()
        return self._group

    async def resume(self, version: int, engines: Sequence[Engine]) -> tuple[list[Failure], float]:
        """Let engines sample the committed version; what failed, and the longest pause in seconds."""
        pauses = [0.0]

        async def resume(engine: Engine) -> None:
            pauses.append((await self._call(engine, Resume(version))).pause_seconds)

        return await self._each("resume", engines, resume), max(pauses)

    async def abort(self, version: int, engines: Sequence[Engine], reason: str) -> list[Failure]:
        """Send engines back to the version before; an engine that does not answer has failed."""

        async def abort(engine: Engine) -> None:
            await self._call(engine, Abort(version, reason))

        return await self._each("abort", engines, abort)

    async def _each(
        self, phase: Phase, engines: Sequence[Engine], ask: Callable[[Engine], Awaitable[None]]
    ) -> list[Failure]:
        """`ask` all engines at once, each until it answers, fails, or is gone."""
        failures: list[Failure] = []
        scopes = {engine: trio.CancelScope() for engine in engines}

        async def one(engine: Engine) -> None:
            with scopes[engine]:
                try:
                    await ask(engine)
                except StreamRLError as error:
                    failures.append(Failure(engine, phase, str(error)))
            if scopes[engine].cancelled_caught:
                failures.append(Failure(engine, phase, LEFT))

        async def watch(engine: Engine) -> None:
            await self._roster.until_gone(engine)
            scopes[engine].cancel()

        async with trio.open_nursery() as watching:
            for engine in engines:
                watching.start_soon(watch, engine)
            async with trio.open_nursery() as asking:
                for engine in engines:
                    asking.start_soon(one, engine)
            watching.cancel_scope.cancel()
        return failures

    async def _transfer(self, snapshot: Snapshot, group: str, world: int, engines: Sequence[Engine]) -> list[Failure]:
        """Broadcast all buckets from a thread; it is abandoned when an engine leaves, and then ends by its deadline."""
        failures: list[Failure] = []

        def send() -> str | None:
            try:
                members = self._circle.join(self._store, group, 0, world, self._backend, self._seconds)
                for buffer in snapshot.buffers:
                    members.broadcast(buffer.cuda() if self._backend == "nccl" else buffer)
            except (RuntimeError, DeadlineExceeded) as error:  # all that torch.distributed raises
                return str(error).splitlines()[0]
            return None

        async def broadcast() -> None:
            if reason := await trio.to_thread.run_sync(send, abandon_on_cancel=True):
                failures.append(Failure(None, "transfer", reason))
            nursery.cancel_scope.cancel()

        async def watch(engine: Engine) -> None:
            await self._roster.until_gone(engine)
            failures.append(Failure(engine, "transfer", LEFT))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(broadcast)
            for engine in engines:
                nursery.start_soon(watch, engine)
        return failures

    async def _call(self, engine: Engine, request: msgspec.Struct) -> Any:
        async with RpcClient.connect(engine.endpoint, WeightReply, key=self._key) as client:
            return await client.call(request, deadline=self._seconds, source=engine.name)

    def _verify(self, snapshot: Snapshot, version: int, applied: Applied) -> None:
        if applied.version != version:
            raise WeightError(f"expected version {version}, got {applied.version}")
        if applied.digests != snapshot.digests:
            raise WeightError(f"digests: expected {snapshot.digests}, got {applied.digests}")
        # Written so that a NaN fails.
        if not applied.probe_error <= self._tolerance:
            raise WeightError(
                f"probe: log-probs differ by {applied.probe_error:.3g} nats, allowed are {self._tolerance:.3g} "
                "(learner.probe_tolerance): the right bytes are in the wrong place, or the precision is lower"
            )
