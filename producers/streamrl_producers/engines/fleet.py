"""The engines as one: routing in the client, so that no router process becomes the bottleneck.

A request goes to the engine that holds its session's prefix, else to the ready one with the fewest outstanding tokens.
When an engine is lost (its session ended, it was fenced, or it failed the request) the request goes on elsewhere with
the tokens it had: long answers are sampled in slices, so a lost engine costs at most one slice.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt
import trio

from streamrl_queue.errors import DeadlineExceeded, EngineError, TransportError
from streamrl_queue.nursery import open_nursery
from streamrl_queue.rpc import RpcClient
from streamrl_queue.transport import ZEROMQ, Transport

from .protocol import EngineReply, Generate, Generated, GenerateReply, Health, Sampling

if TYPE_CHECKING:
    from streamrl_queue import Member, TransferQueue

log = logging.getLogger(__name__)

MEMBERS_SECONDS: Final = 30.0  # one long-poll of the members; a change ends it at once
PROBE_SECONDS: Final = 5.0  # between two probes of an engine, and the deadline of each
PROBES: Final = 3  # probes in a row that an engine may miss before it is fenced
GRACE_SECONDS: Final = 1.0  # an engine answers at the deadline with what it has; that answer may take so long
ATTEMPTS: Final = 3  # engines that one request may lose before it counts as the culprit
SESSIONS: Final = 8192  # sessions whose engine is remembered; far more than episodes run in one process


class _Engine:
    """One member of the fleet, while its session lives."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.client: RpcClient | None = None
        self.outstanding = 0  # tokens asked for and not yet answered
        self.calls: set[trio.CancelScope] = set()
        self.closed = trio.Event()

    def __repr__(self) -> str:
        return f"_Engine({self.member.name}, ready={self.member.ready}, outstanding={self.outstanding})"

    @property
    def usable(self) -> bool:
        return self.client is not None and self.member.ready and not self.closed.is_set()

    def drop_calls(self) -> None:
        """End every call in flight; their requests go on elsewhere."""
        for scope in self.calls:
            scope.cancel()


class FleetStatistics(msgspec.Struct, frozen=True):
    """A snapshot: engines known and usable, requests finished and moved to another engine, tokens sampled."""

    engines: int
    usable: int
    finished: int
    moved: int
    tokens: int


class EngineFleet:
    """Generates on whichever engines are members of the queue. Open it with `watch`."""

    def __init__(
        self,
        queue: TransferQueue,
        nursery: trio.Nursery,
        key: bytes | None,
        slice_tokens: int,
        transport: Transport = ZEROMQ,
    ) -> None:
        self._queue, self._nursery, self._key, self._slice = queue, nursery, key, slice_tokens
        self._transport = transport
        self._engines: dict[str, _Engine] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._changed = trio.Event()
        self._finished = self._moved = self._tokens = 0

    @classmethod
    @asynccontextmanager
    async def watch(
        cls,
        queue: TransferQueue,
        *,
        key: bytes | None = None,
        slice_tokens: int = 512,
        transport: Transport = ZEROMQ,
    ) -> AsyncIterator[EngineFleet]:
        """A fleet that follows the queue's members of role `engine` and reaches them by `transport`."""
        async with open_nursery() as nursery:
            fleet = cls(queue, nursery, key, slice_tokens, transport)
            nursery.start_soon(fleet._follow)
            yield fleet
            nursery.cancel_scope.cancel()

    def __repr__(self) -> str:
        return f"EngineFleet({self.statistics()})"

    def statistics(self) -> FleetStatistics:
        usable = sum(engine.usable for engine in self._engines.values())
        return FleetStatistics(len(self._engines), usable, self._finished, self._moved, self._tokens)

    async def ready(self) -> None:
        """Return when an engine is ready. The caller bounds the wait, or shows that it waits."""
        while not any(engine.usable for engine in self._engines.values()):
            await self._changed.wait()

    async def generate(
        self, tokens: npt.NDArray[np.int32], sampling: Sampling, *, session: str, deadline: float
    ) -> Generated:
        """Sample an answer to `tokens` `[n]`, within `deadline` seconds (waiting for an engine counts).

        Raises:
            DeadlineExceeded: naming what was awaited and from whom.
            EngineError: the request failed on several engines.
            LimitReached: the prompt does not fit the engines' context.
        """
        until, attempts, got = trio.current_time() + deadline, 0, Generated.nothing()
        awaited, source = "a ready engine", "the fleet"
        while (left := until - trio.current_time()) > 0:
            engine = self._pick(session)
            if engine is None:
                with trio.move_on_after(left):
                    await self._changed.wait()
                continue
            awaited, source = f"an answer for session {session}", engine.member.name
            prompt = np.concatenate([tokens, got.tokens]) if len(got.tokens) else tokens
            ask = self._ask(sampling, len(got.tokens))
            try:
                part = await self._call(engine, prompt, ask, session, left)
            except (EngineError, TransportError) as error:
                attempts += 1
                self._leave(session, engine, error)
                if attempts == ATTEMPTS:
                    raise EngineError(f"session {session} failed on {attempts} engines; last: {error}") from error
                continue
            got = got.then(part)
            if self._is_whole(part, ask, len(got.tokens), sampling):
                self._finished += 1
                self._tokens += len(got.tokens)
                return got
        raise DeadlineExceeded.waiting(awaited, source, deadline)

    def _ask(self, sampling: Sampling, had: int) -> Sampling:
        """The next slice of a request that has `had` tokens."""
        most = min(sampling.max_tokens - had, self._slice)
        if most == sampling.max_tokens:
            return sampling
        return msgspec.structs.replace(sampling, max_tokens=most, seed_position=sampling.seed_position + had)

    def _is_whole(self, part: Generated, ask: Sampling, had: int, sampling: Sampling) -> bool:
        if part.finish_reason == "length":  # fewer than asked for: the engine's context is full
            return had >= sampling.max_tokens or len(part.tokens) < ask.max_tokens
        return part.finish_reason == "stop"

    async def _call(
        self, engine: _Engine, prompt: npt.NDArray[np.int32], ask: Sampling, session: str, seconds: float
    ) -> Generated:
        """One slice from `engine`. Raises EngineError when the engine is lost meanwhile."""
        assert engine.client is not None
        request = Generate(prompt.astype("<i4", copy=False).tobytes(), ask, session, seconds)
        cost = len(prompt) + ask.max_tokens
        engine.outstanding += cost
        scope = trio.CancelScope()
        engine.calls.add(scope)
        try:
            with scope:
                reply = await engine.client.call(request, deadline=seconds + GRACE_SECONDS, source=engine.member.name)
                assert isinstance(reply, GenerateReply)
                return reply.generated()
        finally:
            engine.calls.discard(scope)
            engine.outstanding -= cost
        raise EngineError(f"{engine.member.name} was lost with session {session} in flight")

    def _pick(self, session: str) -> _Engine | None:
        """The session's engine, else the usable one with the least outstanding; None when there is none."""
        engine = self._engines.get(self._sessions.get(session, ""))
        if engine is None or not engine.usable:
            usable = [e for e in self._engines.values() if e.usable]
            engine = min(usable, key=lambda e: e.outstanding, default=None)
        if engine is not None:
            self._sessions[session] = engine.member.session
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return engine

    def _leave(self, session: str, engine: _Engine, error: Exception) -> None:
        self._moved += 1
        self._sessions.pop(session, None)
        log.warning("session %s leaves %s: %s", session, engine.member.name, error)

    async def _follow(self) -> None:
        """consumes: the queue's membership. produces: connections to engines. waits for: a change of it.
        unblocked by: engines that join, leave, announce or are fenced.
        """
        epoch = -1
        while True:
            membership = await self._queue.members("engine", after=epoch, wait=MEMBERS_SECONDS)
            if membership.epoch != epoch:
                epoch = membership.epoch
                self._update(membership.members)

    def _update(self, members: Iterable[Member]) -> None:
        alive = {member.session: member for member in members if member.endpoint}
        for session in self._engines.keys() - alive.keys():
            engine = self._engines.pop(session)
            engine.closed.set()
            engine.drop_calls()
        for session, member in alive.items():
            known = self._engines.get(session)
            if known is None:
                self._engines[session] = engine = _Engine(member)
                self._nursery.start_soon(self._connect, engine)
            else:
                if known.member.ready and not member.ready:
                    known.drop_calls()
                known.member = member
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _connect(self, engine: _Engine) -> None:
        endpoint = engine.member.endpoint
        assert endpoint is not None
        connection = RpcClient.connect(endpoint, EngineReply, key=self._key, transport=self._transport)
        async with connection as client, open_nursery() as nursery:
            engine.client = client
            self._notify()
            nursery.start_soon(self._probe, engine, client)
            await engine.closed.wait()
            nursery.cancel_scope.cancel()

    async def _probe(self, engine: _Engine, client: RpcClient) -> None:
        """An engine that answers messages may still be unable to sample: only a sampled token proves it.

        consumes: health answers. produces: a fence, when several are missing. waits for: the clock, the engine.
        unblocked by: either.
        """
        missed = 0
        while True:
            await trio.sleep(PROBE_SECONDS)
            if not engine.usable:
                continue
            try:
                await client.call(Health(), deadline=PROBE_SECONDS, source=engine.member.name)
                missed = 0
            except (DeadlineExceeded, EngineError) as error:
                missed += 1
                log.warning("%s missed probe %d of %d: %s", engine.member.name, missed, PROBES, error)
                if missed == PROBES:
                    await self._queue.fence(engine.member.session, f"sampled nothing for {PROBES} probes: {error}")
                    missed = 0
