"""Publishing weights: every version reaches every engine, proven, before it exists.

    learner thread                     trio thread (queue.portal)
    take snapshot ──── hand over ────► Courier: publish ── prepare, transfer, apply, verify ── engines
    train the next step                         commit_version ── resume
                                                joiners and repaired engines get the committed snapshot

A version exists when every engine that is not fenced has proved it. An engine that fails is fenced and the publish
starts again with the rest, under a fresh version id. The queue routes no request to a fenced engine; it announces
itself ready when a later delivery to it succeeds.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from streamrl_queue.errors import WeightError
from streamrl_queue.nursery import open_nursery
from streamrl_queue.weights import Backend, Manifest, host_store

from .config import LearnerConfig
from .delivery import Delivery, Failure
from .model import Policy
from .ranks import Ranks
from .roster import Engine, Roster
from .snapshot import Snapshot, take

if TYPE_CHECKING:
    from streamrl_queue import BlockingTransferQueue, TransferQueue

log = logging.getLogger(__name__)

# Broadcasts that fail although every engine still answers: the third in a row is a broken network, not bad luck.
MAX_BLAMELESS: Final = 3
# A failed engine is tried again after this many seconds, then after twice as many, up to the limit.
REPAIR_SECONDS: Final = 1.0
MAX_REPAIR_SECONDS: Final = 60.0
# How often a learner that waits for a publish looks whether it shall stop.
LOOK_SECONDS: Final = 0.5
# After a stop request, the time for a publish under way to reach its end: engines that live need less.
STOP_SECONDS: Final = 2.0


class Published(NamedTuple):
    """The version that was committed last. `pause_seconds` is the longest time that an engine stood still for it."""

    version: int
    step: int
    engines: int
    seconds: float
    pause_seconds: float


class Trouble(NamedTuple):
    """An engine that failed `times` deliveries in a row, and when to try it again (trio time)."""

    times: int
    again: float


class Publisher:
    """The learner's side: hand a snapshot over and go on training."""

    def __init__(
        self,
        queue: BlockingTransferQueue,
        config: LearnerConfig,
        ranks: Ranks,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        host: str = "127.0.0.1",
        key: bytes | None = None,
    ) -> None:
        """`host` is the address under which engines reach this process for a transfer."""
        self._queue = queue
        self._ranks = ranks
        self._should_stop = should_stop
        self._courier: Courier | None = None
        # How long the last `publish` waited for the one before.
        self.waited_seconds = 0.0
        if ranks.leads:
            self._store = host_store(host)
            address = f"{host}:{self._store.port}"
            self._courier = Courier(queue.aio, config, address, backend=backend_of(config), key=key)
            queue.portal.start_soon(self._courier.run)

    def publish(self, policy: Policy, step: int) -> None:
        """Copy the weights now; deliver them while the next step is trained. Collective.

        Waits until the publish before is done: there are never two at once. Gives up on a stop request.

        Raises:
            WeightError: when the publish before could not be verified on `min_engines` engines.
        """
        snapshot = take(policy, step, self._ranks)
        started = time.monotonic()
        if self._courier and snapshot and self._settled():
            self._queue.portal.call(self._courier.accept, snapshot)
        self.waited_seconds = time.monotonic() - started

    def finish(self) -> None:
        """Return when all that was handed over is committed; after a stop request, wait only a little for it.

        A publish that is cut off between apply and resume would leave engines standing.
        """
        if self._courier and not self._settled():
            self._queue.portal.call(self._courier.settled, STOP_SECONDS)

    def _settled(self) -> bool:
        """Wait until nothing is left to publish; False when a stop request came first."""
        while self._courier and not self._queue.portal.call(self._courier.settled, LOOK_SECONDS):
            self._queue.report("waits for a publish to be verified")
            if self._should_stop():
                return False
        return True

    @property
    def last(self) -> Published | None:
        """What was committed last, as far as this rank knows."""
        return self._courier.last if self._courier else None


def backend_of(config: LearnerConfig) -> Backend:
    """What carries the weights: as configured, or what the learner's device suggests."""
    if config.transfer == "auto":
        return "nccl" if config.device == "cuda" else "gloo"
    return config.transfer


def _names(engines: Iterable[Engine]) -> str:
    return ", ".join(engine.name for engine in engines)


class Courier:
    """The trio side. One task delivers, so that no two deliveries are ever under way."""

    def __init__(
        self,
        queue: TransferQueue,
        config: LearnerConfig,
        store: str,
        *,
        backend: Backend = "gloo",
        key: bytes | None = None,
    ) -> None:
        self._queue = queue
        self._config = config
        self._roster = Roster(queue)
        self._delivery = Delivery(
            self._roster,
            store,
            backend=backend,
            seconds=config.publish_seconds,
            tolerance=config.probe_tolerance,
            key=key,
        )
        self._pending: Snapshot | None = None
        self._committed: tuple[Snapshot, Manifest] | None = None
        self._served: dict[str, int] = {}
        self._trouble: dict[str, Trouble] = {}
        self._repair = trio.CancelScope()
        self._parent: int | None = None
        self.last: Published | None = None

    async def run(self) -> None:
        """Deliver until cancelled.

        Consumes snapshots and membership epochs. Produces committed versions. Waits for a snapshot, for an engine
        without the committed version, or for the time to try a failed one again. Unblocked by any of these.
        """
        committed = [version.id for version in await self._queue.versions() if version.committed]
        self._parent = max(committed, default=None)
        async with open_nursery() as nursery:
            nursery.start_soon(self._roster.follow)
            while True:
                if self._pending:
                    await self._publish(self._pending)
                    self._pending = None
                    self._roster.wake()
                elif joiners := self._behind():
                    await self._catch_up(joiners)
                else:
                    await self._rest()

    async def accept(self, snapshot: Snapshot) -> None:
        """Take a snapshot over; the one before is settled. A repair under way gives way to it."""
        assert self._pending is None
        self._pending = snapshot
        self._repair.cancel()
        self._roster.wake()

    async def settled(self, seconds: float) -> bool:
        """Whether nothing is left to publish, now or within `seconds`."""
        with trio.move_on_after(seconds):
            while self._pending:
                await self._roster.changed()
        return self._pending is None

    async def _publish(self, snapshot: Snapshot) -> None:
        """Make `snapshot` a committed version.

        Raises:
            WeightError: fewer than `min_engines` engines are left, or broadcasts fail and nobody is to blame.
        """
        started, blameless, history = trio.current_time(), 0, list[Failure]()
        while True:
            engines = await self._candidates(snapshot.step, history)
            version = await self._queue.begin_version(snapshot.step, self._parent)
            manifest = snapshot.manifest(version, self._parent)
            with self._queue.waiting(f"waits for version {version} on {_names(engines)}", on="engine"):
                failures = await self._delivery.verify(snapshot, manifest, engines)
            if not failures:
                break
            history += failures
            blamed = await self._withdraw(version, engines, failures)
            blameless = 0 if blamed else blameless + 1
            if blameless == MAX_BLAMELESS:
                raise WeightError(self._story(snapshot.step, "no broadcast succeeds", history))
        await self._queue.commit_version(version, manifest.digest)
        self._parent, self._committed = version, (snapshot, manifest)
        pause = await self._resume(version, engines)
        self.last = Published(version, snapshot.step, len(engines), trio.current_time() - started, pause)

    async def _candidates(self, step: int, history: list[Failure]) -> tuple[Engine, ...]:
        """The engines to deliver to, once there are enough: those without trouble, else also those due for a retry.

        Raises:
            WeightError: when there are fewer than `min_engines` for `wait_seconds`.
        """
        few = f"waits for at least {self._config.min_engines} sound engines for the weights of step {step}"
        with trio.move_on_after(self._config.wait_seconds), self._queue.waiting(few, on="engine"):
            while True:
                sound = tuple(e for e in self._roster.engines if e.session not in self._trouble)
                engines = sound if len(sound) >= self._config.min_engines else self._due(self._roster.engines)
                if len(engines) >= self._config.min_engines:
                    return engines
                await self._rest()
        what = (
            f"{len(self._roster.engines)} engines in the run, {len(self._trouble)} of them fenced, for "
            f"{self._config.wait_seconds:.0f} s; learner.min_engines is {self._config.min_engines}"
        )
        raise WeightError(self._story(step, what, history))

    async def _withdraw(self, version: int, engines: tuple[Engine, ...], failures: list[Failure]) -> set[Engine]:
        """Undo a delivery; fence and return those engines that failed, in it or in undoing it."""
        reason = "; ".join(map(str, failures))
        log.warning("version %d will not exist: %s", version, reason)
        failures = failures + await self._delivery.abort(version, engines, reason)
        return await self._fence(failures)

    async def _resume(self, version: int, engines: tuple[Engine, ...]) -> float:
        failures, pause = await self._delivery.resume(version, engines)
        for engine in engines:
            self._served[engine.session] = version
            self._trouble.pop(engine.session, None)
        await self._fence(failures)
        return pause

    async def _fence(self, failures: Iterable[Failure]) -> set[Engine]:
        blamed = {failure.engine: str(failure) for failure in failures if failure.engine}
        for engine, reason in blamed.items():
            times = self._trouble.get(engine.session, Trouble(0, 0.0)).times
            delay = min(MAX_REPAIR_SECONDS, REPAIR_SECONDS * 2**times)
            self._trouble[engine.session] = Trouble(times + 1, trio.current_time() + delay)
            self._served.pop(engine.session, None)
            if engine in self._roster.engines:
                log.warning("fenced %s", reason)
                await self._queue.fence(engine.session, reason)
        return set(blamed)

    def _behind(self) -> tuple[Engine, ...]:
        """Engines without the committed version that may be tried now."""
        if self._committed is None:
            return ()
        return self._due(e for e in self._roster.engines if self._served.get(e.session) != self._parent)

    def _due(self, engines: Iterable[Engine]) -> tuple[Engine, ...]:
        now = trio.current_time()
        return tuple(e for e in engines if e.session not in self._trouble or self._trouble[e.session].again <= now)

    async def _catch_up(self, engines: tuple[Engine, ...]) -> None:
        """Bring the committed version to engines that joined, or that failed before."""
        assert self._committed
        snapshot, manifest = self._committed
        failures = list[Failure]()
        late = self._queue.waiting(f"waits for version {manifest.version} on {_names(engines)}", on="engine")
        with trio.CancelScope() as self._repair, late:
            failures = await self._delivery.verify(snapshot, manifest, engines)
        if self._repair.cancelled_caught:
            await self._delivery.abort(manifest.version, engines, "a newer version is on its way")
        elif failures:
            await self._withdraw(manifest.version, engines, failures)
        else:
            await self._resume(manifest.version, engines)

    async def _rest(self) -> None:
        """Wait for a change, or until the next failed engine may be tried again."""
        present = {engine.session for engine in self._roster.engines}
        now = trio.current_time()
        due = [t.again - now for s, t in self._trouble.items() if s in present and t.again > now]
        with trio.move_on_after(min(due, default=math.inf)):
            await self._roster.changed()

    @staticmethod
    def _story(step: int, what: str, history: list[Failure]) -> str:
        tried = "; ".join(map(str, history)) or "nothing was tried"
        return f"publish of step {step}: {what} ({tried})"
