"""A learner that only takes time: the queue calls of `streamrl_learners`, in their order, without torch.

    lease(step) … ──► time ──► commit ──► checkpoint ──► marker ──► retire ──► publish (overlaps the next step)

What a checkpoint keeps (`Checkpoints`) outlives the process; a learner that starts again reconciles with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import trio

from streamrl_queue import Lease, Member, TransferQueue
from streamrl_queue.errors import DeadlineExceeded, EngineError, WeightError
from streamrl_queue.nursery import open_nursery
from streamrl_queue.rpc import RpcClient
from streamrl_queue.schema import arrays

from .model import Broken
from .network import SimTransport
from .scenario import Scenario
from .workload import SAMPLED, STOP, Abort, Apply, EngineReply, Resume

# An engine that takes longer for one of the three requests of a publish has failed.
PUBLISH_SECONDS: Final = 3.0
MEMBERS_SECONDS: Final = 5.0
COLUMNS: Final = ("tokens", "mask", "advantage")


class Checkpoints:
    """The learner's disk: the step of the newest checkpoint whose marker is durable."""

    def __init__(self) -> None:
        self.durable = 0
        self.finished = False
        # Set when no more tasks come: then the last step may be a small one.
        self.last_tasks = False


class SimLearner:
    """One life of the learner."""

    def __init__(
        self,
        queue: TransferQueue,
        transport: SimTransport,
        scenario: Scenario,
        checkpoints: Checkpoints,
        rng: random.Random,
        *,
        again: bool,
    ) -> None:
        self._queue = queue
        self._scenario = scenario
        self._disk = checkpoints
        self._rng = rng
        self._again = again
        self._publisher = SimPublisher(queue, transport)

    async def run(self) -> None:
        """Consumes rows that are ready to learn; produces steps, checkpoints and versions; waits for rows and for
        the publish before; unblocked by either. Ends when all tasks have ended.
        """
        step = self._disk.durable
        if self._again:
            await self._queue.reconcile(step)
        async with open_nursery() as nursery:
            nursery.start_soon(self._publisher.run)
            await self._publisher.publish(step)
            await self._publisher.settled()
            while rows := await self._rows(step + 1):
                step += 1
                await trio.sleep(self._rng.expovariate(1 / self._scenario.step_seconds))
                await self._queue.commit(step, rows)
                if step % self._scenario.checkpoint_every == 0:
                    await self._checkpoint(step)
                await self._publisher.publish(step)
            await self._checkpoint(step)
            await self._publisher.settled()
            nursery.cancel_scope.cancel()
        self._disk.finished = True

    async def _rows(self, step: int) -> list[int]:
        """The rows of a step; fewer than a step needs only when there are no others, none when there are none."""
        rows: list[int] = []
        while len(rows) < self._scenario.rows_per_step:
            left = self._scenario.rows_per_step - len(rows)
            alone = self._rng.random() < 0.5
            lease = await self._queue.lease(
                "learn",
                rows=self._rng.randint(1, left),
                at_least=self._rng.randint(1, left),
                wait=self._scenario.linger_seconds,
                step=step,
                payload=alone,
                columns=COLUMNS,
            )
            if lease is not None:
                await self._check(lease)
                rows += lease.ids
            elif self._disk.last_tasks and await self._is_last(len(rows)):
                break
        return rows

    async def _is_last(self, taken: int) -> bool:
        counts = (await self._queue.statistics()).by_split.get("train", {})
        return sum(counts.get(state, 0) for state in ("waiting", "ready", "leased")) <= taken

    async def _check(self, lease: Lease) -> None:
        """Every row's columns are its own."""
        batch = lease.batch if lease.batch is not None else await self._queue.fetch(lease.ids, COLUMNS)
        for row, tokens, mask in zip(
            batch.column("row").to_pylist(), arrays(batch.column("tokens")), arrays(batch.column("mask")), strict=True
        ):
            if not set(tokens[mask == 1].tolist()) <= {SAMPLED + row, STOP}:
                raise Broken(f"row {row} has tokens of another row", [row])

    async def _checkpoint(self, step: int) -> None:
        if step > self._disk.durable:
            await trio.sleep(self._rng.expovariate(4.0))
            self._disk.durable = step
            await trio.sleep(self._rng.expovariate(4.0))
        await self._queue.retire(step)


class SimPublisher:
    """Brings versions to the engines, one publish at a time, as `streamrl_learners.publisher` does."""

    def __init__(self, queue: TransferQueue, transport: SimTransport) -> None:
        self._queue = queue
        self._transport = transport
        self._pending: int | None = None
        self._changed = trio.Event()
        self._parent: int | None = None
        self._step = 0
        self._served: dict[str, int] = {}
        # Engines that failed a publish; the next attempt does without them.
        self._trouble: set[str] = set()

    async def publish(self, step: int) -> None:
        """Hand the weights of `step` over, once the publish before is done."""
        await self.settled()
        self._pending = step
        self._notify()

    async def settled(self) -> None:
        """Nothing is left to publish."""
        while self._pending is not None:
            await self._changed.wait()

    async def run(self) -> None:
        """Consumes steps and memberships; produces committed versions; waits for either; unblocked by both."""
        async with open_nursery() as nursery:
            nursery.start_soon(self._look)
            self._engines: tuple[Member, ...] = ()
            while True:
                if self._pending is not None and self._engines:
                    await self._publish(self._pending)
                    self._pending = None
                    self._notify()
                elif self._parent is not None and (behind := self._behind()):
                    await self._catch_up(behind)
                else:
                    await self._changed.wait()

    async def _look(self) -> None:
        """Consumes memberships; produces engines; waits for a change; unblocked by one, or by the wait running out."""
        epoch = -1
        while True:
            members = await self._queue.members("engine", after=epoch, wait=MEMBERS_SECONDS)
            epoch, self._engines = members.epoch, tuple(x for x in members.members if x.endpoint)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _behind(self) -> list[Member]:
        return [engine for engine in self._engines if self._served.get(engine.session) != self._parent]

    async def _publish(self, step: int) -> None:
        while True:
            engines = [engine for engine in self._engines if engine.session not in self._trouble]
            version = await self._queue.begin_version(step, self._parent)
            failed = await self._ask(engines, Apply(version, step))
            if engines and not failed:
                break
            await self._ask(engines, Abort(version))
            for engine in failed:
                await self._fence(engine)
            if len(failed) == len(engines):
                await trio.sleep(PUBLISH_SECONDS)
                self._trouble.clear()
        await self._queue.commit_version(version, f"digest-{version}")
        self._parent, self._step = version, step
        self._trouble.clear()
        await self._resume(engines, version)

    async def _catch_up(self, engines: list[Member]) -> None:
        assert self._parent is not None
        failed = await self._ask(engines, Apply(self._parent, self._step))
        for engine in failed:
            await self._fence(engine)
        await self._resume([engine for engine in engines if engine not in failed], self._parent)
        if failed:
            await trio.sleep(PUBLISH_SECONDS)

    async def _resume(self, engines: list[Member], version: int) -> None:
        for engine in await self._ask(engines, Resume(version)):
            await self._fence(engine)
            engines.remove(engine)
        for engine in engines:
            self._served[engine.session] = version

    async def _fence(self, engine: Member) -> None:
        self._served.pop(engine.session, None)
        self._trouble.add(engine.session)
        await self._queue.fence(engine.session, "failed a publish")

    async def _ask(self, engines: Sequence[Member], request: Apply | Resume | Abort) -> list[Member]:
        """Ask all of them at once; returns those that failed."""
        failed: list[Member] = []

        async def one(engine: Member) -> None:
            assert engine.endpoint is not None
            try:
                async with RpcClient.connect(engine.endpoint, EngineReply, transport=self._transport) as client:
                    await client.call(request, deadline=PUBLISH_SECONDS, source=engine.name)
            except (DeadlineExceeded, EngineError, WeightError):
                failed.append(engine)

        async with open_nursery() as nursery:
            for engine in engines:
                nursery.start_soon(one, engine)
        return sorted(failed, key=lambda engine: engine.name)
