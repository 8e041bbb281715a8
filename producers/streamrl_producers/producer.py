"""The rollout worker: leases tasks, plays up to N episodes at once in one nursery, writes trajectories.

    TransferQueue ── lease rollout ──► Producer ── one task per episode ──► run_episode ──► EngineFleet ──► engines
                  ◄─ write, release ──┘

An episode that fails is data; one that could not be played (no engine, no answer) goes back to the queue, and is
dropped with the reason when that happens again and again. No row is leased while no engine is ready.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import trio

from streamrl_agents.agent import Agent
from streamrl_agents.config import Limits
from streamrl_agents.episode import run_episode
from streamrl_agents.template import ChatTemplate
from streamrl_queue import Lease, TransferQueue
from streamrl_queue.batches import RowKeys
from streamrl_queue.errors import LeaseExpired, LimitReached, SchemaError, StreamRLError
from streamrl_queue.nursery import open_nursery
from streamrl_queue.schema import Trajectory, trajectory_batch
from streamrl_queue.transport import ZEROMQ, Transport
from streamrl_queue.waits import Wait

from .config import RolloutConfig
from .engines.fleet import EngineFleet
from .engines.protocol import Generated, Sampling

log = logging.getLogger(__name__)

LEASE_SECONDS: Final = 30.0  # one long-poll for rows; rows that become ready end it at once
REPORT_SECONDS: Final = 1.0  # gauges leave with the heartbeat, once a second
RELEASE_SECONDS: Final = 2.0  # a stopping producer gives its rows back, but does not hold up the end of a run
# A row that this producer could not play so often is dropped: released rows count no delivery, so without this a
# poison row would come again for ever.
MAX_FAILURES: Final = 3
# The fleet gives up on a turn before the episode's own deadline does, so that a missing engine is not taken for a
# slow episode.
FLEET_SHARE: Final = 0.95
# What can be wrong with a call: the tool raised, or it was no call that a tool takes.
CALL_ERRORS: Final = ("tool", "parse")
# A lease is extended three times in its life, so that one lost message does not end it.
EXTENSIONS: Final = 3


async def run_producer(
    queue: TransferQueue,
    *,
    agent: Agent,
    template: ChatTemplate,
    config: RolloutConfig,
    key: bytes | None = None,
    transport: Transport = ZEROMQ,
) -> None:
    """Play rows of the stage `rollout` until cancelled; then give unfinished rows back, within 2 seconds.

    Cancel it inside of the queue's own context: giving back needs the connection.

    consumes: leases of `rollout`. produces: trajectories. waits for: rows, room for an episode, engines.
    unblocked by: tasks that are fed or admitted, episodes that end, engines that become ready.
    """
    async with EngineFleet.watch(queue, key=key, slice_tokens=config.slice_tokens, transport=transport) as fleet:
        producer = Producer(queue, fleet, agent, template, config)
        try:
            await producer.run()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + RELEASE_SECONDS):
                await producer.release("producer stops")


class Producer:
    """Episodes in flight, and the leases that they belong to."""

    def __init__(
        self,
        queue: TransferQueue,
        fleet: EngineFleet,
        agent: Agent,
        template: ChatTemplate,
        config: RolloutConfig,
    ) -> None:
        self._queue, self._fleet, self._agent, self._template, self._config = queue, fleet, agent, template, config
        self._limits = Limits(
            max_turns=config.max_turns,
            max_turn_tokens=config.max_turn_tokens,
            max_tokens=config.max_tokens,
            max_tool_characters=config.max_tool_characters,
            turn_seconds=config.turn_seconds,
            tool_seconds=config.tool_seconds,
            episode_seconds=config.episode_seconds,
        )
        self._open: dict[int, _Held] = {}  # by lease
        self._failures: Counter[int] = Counter()  # by row, of rows that may come again
        self._active = self._episodes = self._tokens = 0
        self._call_errors: Counter[str] = Counter()
        self._room = trio.Event()

    def __repr__(self) -> str:
        return f"Producer({self._active} of {self._config.concurrency} episodes, {self._episodes} written)"

    async def run(self) -> None:
        """The loop of `run_producer`."""
        async with open_nursery() as nursery:
            nursery.start_soon(self._report)
            while True:
                room = self._config.concurrency - self._active
                if room == 0:
                    self._room = trio.Event()
                    await self._room.wait()
                    continue
                with self._queue.waiting("waits for a ready engine", on="engine"):
                    await self._fleet.ready()
                lease = await self._queue.lease("rollout", rows=room, wait=LEASE_SECONDS)
                if lease is not None:
                    self._start(lease, nursery)

    def _start(self, lease: Lease, nursery: trio.Nursery) -> None:
        assert lease.batch is not None
        held = self._open[lease.id] = _Held(lease)
        self._active += len(lease.rows)
        tasks = lease.batch.column("task").to_pylist()
        for row, task in zip(lease.rows, tasks, strict=True):
            nursery.start_soon(self._episode, held, row, msgspec.json.decode(task))
        if lease.seconds is not None:
            nursery.start_soon(self._extend, held, lease.seconds / EXTENSIONS)

    async def _episode(self, held: _Held, row: RowKeys, task: dict[str, Any]) -> None:
        """Play one row and write it. An episode that could not be played goes back, with the reason."""
        with held.scope_of(row.row), self._queue.waiting("begins", row=row.row) as wait:
            try:
                trajectory = await self._play(held.lease.id, row, task, wait)
                held.playing.discard(row.row)
                wait.at("waits for its row to be written", on="queue")
                await self._queue.write(held.lease, trajectory_batch([row.row], [trajectory]))
                self._failures.pop(row.row, None)
                self._count(trajectory)
            except LeaseExpired as error:
                log.warning("row %d attempt %d is no longer ours: %s", row.row, row.attempt, error)
            except StreamRLError as error:
                await self._failed(held.lease, row, error)
        self._active -= 1
        self._room.set()
        if held.ended(row.row):
            del self._open[held.lease.id]

    def _count(self, trajectory: Trajectory) -> None:
        """A written episode, and the calls in it that failed: the model saw them, nobody else did."""
        self._episodes += 1
        self._tokens += len(trajectory.tokens)
        for kind in CALL_ERRORS:
            errors = int(trajectory.metrics.get(f"{kind}_errors", 0))
            self._call_errors[f"{kind}_errors"] += errors
            self._call_errors[f"{kind}_error_episodes"] += errors > 0
        # At once: a heartbeat tells numbers that belong together.
        self._queue.report(None, episodes=self._episodes, tokens=self._tokens, **self._call_errors)

    async def _play(self, lease: int, row: RowKeys, task: dict[str, Any], wait: Wait) -> Trajectory:
        recorded = self._config.sampling(row.split)
        session = f"{self._queue.session}/{lease}/{row.row}"
        base = Sampling(
            temperature=recorded["temperature"],
            top_p=recorded["top_p"],
            top_k=int(recorded["top_k"]),
            stop_ids=self._template.stop_ids,
        )

        turns = itertools.count(1)

        async def generate(tokens: npt.NDArray[np.int32], max_tokens: int) -> Generated:
            sampling = msgspec.structs.replace(base, max_tokens=max_tokens)
            deadline = self._limits.turn_seconds * FLEET_SHARE
            turn = next(turns)
            wait.at(f"waits for turn {turn}", on="engine")
            try:
                return await self._fleet.generate(tokens, sampling, session=session, deadline=deadline)
            finally:
                wait.at(f"code of {self._agent.name} after turn {turn}")

        return await run_episode(
            self._agent,
            task,
            generate=generate,
            template=self._template,
            limits=self._limits,
            sampling=recorded,
            doing=wait.at,
        )

    async def _extend(self, held: _Held, every: float) -> None:
        """consumes: nothing. produces: longer leases. waits for: the clock. unblocked by: it, or the last episode."""
        while not held.over.is_set():
            with trio.move_on_after(every):
                await held.over.wait()
                return
            try:
                held.keep(await self._queue.extend(held.lease))
            except LeaseExpired as error:
                log.warning("lease %d was lost with %d episodes: %s", held.lease.id, len(held.scopes), error)
                held.cancel()
                return

    async def _failed(self, lease: Lease, row: RowKeys, error: StreamRLError) -> None:
        """The row could not be played, or not be written."""
        reason = f"{type(error).__name__}: {error}"
        self._failures[row.row] += 1
        # A prompt that does not fit the engines, or a row that breaks them, is no better on the next attempt.
        if isinstance(error, LimitReached | SchemaError) or self._failures[row.row] == MAX_FAILURES:
            log.warning("row %d is dropped: %s", row.row, reason)
            del self._failures[row.row]
            with suppress(LeaseExpired):
                await self._queue.drop(lease, [row.row], reason=type(error).__name__)
        else:
            log.warning("row %d goes back: %s", row.row, reason)
            await self._give_back(lease, [row.row], reason)

    async def _give_back(self, lease: Lease, rows: list[int], reason: str) -> None:
        with suppress(LeaseExpired):  # then they have gone back by themselves
            await self._queue.release(lease, rows, reason=reason)

    async def release(self, reason: str) -> None:
        """Give back every row that is still open."""
        for held in list(self._open.values()):
            await self._give_back(held.lease, list(held.scopes), reason)

    async def _report(self) -> None:
        """consumes: counters. produces: gauges. waits for: the clock. unblocked by: it."""
        while True:
            usable = self._fleet.statistics().usable
            activity = "waits for an engine" if not usable else "plays" if self._active else "waits for rows"
            self._queue.report(activity, active=self._active, engines=usable)
            await trio.sleep(REPORT_SECONDS)


class _Held:
    """One lease, and a cancel scope for each of its rows that is still being played."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.scopes = {row.row: trio.CancelScope() for row in lease.rows}
        self.over = trio.Event()
        # Rows whose episode goes on.
        self.playing = set(self.scopes)

    def scope_of(self, row: int) -> trio.CancelScope:
        return self.scopes[row]

    def ended(self, row: int) -> bool:
        """The row needs nothing more; tells whether it was the lease's last."""
        del self.scopes[row]
        self.playing.discard(row)
        if not self.scopes:
            self.over.set()
        return not self.scopes

    def keep(self, rows: Collection[int]) -> None:
        """Only these rows are still ours; the queue has dropped the others, e.g. because their groups went on."""
        for row in self.playing - set(rows):
            log.warning("row %d is no longer ours; its episode is given up", row)
            self.playing.discard(row)
            self.scopes[row].cancel()

    def cancel(self) -> None:
        for scope in self.scopes.values():
            scope.cancel()
