"""One simulated run: all processes of a training job in one thread, on virtual time, under faults out of a seed.

    Scenario ──► World ──► broker, coordinator, learner, producers, engines, scorers   (each may die and start again)
                   │           │ every message            │ every event
                   │        Network (delays, losses …)   Disk (torn writes, power loss)
                   └─ chaos    └────────► Checker ◄───────┘        Trace: a digest of everything

The queue's core, broker, client and RPC are those of `streamrl_queue`; the producer and the scorers are the real
ones too. Engines and the learner only take time. Whatever is random comes from the seed, and so does the order in
which trio runs its tasks: one seed is one run.
"""

from __future__ import annotations

import gc
import logging
import random
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import trio
import trio.testing

from streamrl_queue import TransferQueue, open_broker
from streamrl_queue.errors import (
    DeadlineExceeded,
    EngineError,
    LeaseExpired,
    QueueFull,
    SessionLost,
    StepConflict,
    StreamRLError,
    WeightError,
)
from streamrl_queue.nursery import first_error, open_nursery

from . import roles
from .checker import Checker
from .disk import Disk, Killed
from .learner import Checkpoints
from .model import Broken
from .network import CALM, Network, Node
from .roles import ADDRESS
from .scenario import Fault, Scenario
from .trace import Trace
from .workload import make_template

Main = Callable[["World", Node], Awaitable[None]]

# A process may end with these when others fail; it is started again. Anything else is a bug.
FORGIVEN: Final = (DeadlineExceeded, EngineError, LeaseExpired, QueueFull, SessionLost, StepConflict, WeightError)
RESTART_SECONDS: Final = (0.1, 3.0)
# The longest that a process stands still, in sessions: often longer than its session lives.
PAUSE_SESSIONS: Final = 3.0
CUT_SECONDS: Final = (0.1, 10.0)
SLOWEST: Final = 300.0
# Wall-clock time of second 0: any will do.
EPOCH: Final = 1.7e9
# After the faults, virtual time in which all that is left must end: far more than the longest chain of deadlines.
PATIENCE_SECONDS: Final = 900.0
# Of a crash, where it happened and how it came there.
CRASH_FRAMES: Final = 5
# A supervisor that cannot tell the broker of a death goes on without.
TELL_SECONDS: Final = 2.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run. `failure` is the broken invariant, or (`is_crash`) the error that ended a process."""

    seed: int
    digest: str
    failure: str | None
    is_crash: bool
    trace: tuple[str, ...]
    virtual_seconds: float
    seconds: float
    events: int
    entries: int
    counts: dict[str, int]
    faults: dict[str, int]
    refused: dict[str, int]
    late_writes: int
    steps: int
    versions: int


class World:
    """Everything of one run. `simulate` runs it."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self.scenario = scenario
        self.trace = Trace()
        self.network = Network(random.Random(f"network/{scenario.seed}"), self.trace)
        self.template = make_template()
        self.checkpoints = Checkpoints()
        self.checker = Checker(scenario.flow, self.trace, lambda: self.checkpoints.durable, lambda: self.disk.durable)
        self.disk = Disk(directory, random.Random(f"disk/{scenario.seed}"), self.checker)
        self.coordinator: TransferQueue | None = None
        self.nodes: dict[str, Node] = {}
        self.faults: dict[str, int] = {}
        # Whether code ended with an error of its own, and not with a broken invariant.
        self.is_crash = False
        self.calm = trio.Event()
        self.done = trio.Event()
        self._rng = random.Random(f"world/{scenario.seed}")

    def wall(self) -> float:
        """The clock for people."""
        return EPOCH + trio.current_time()

    def rng(self, node: Node) -> random.Random:
        """The node's own random numbers."""
        return random.Random(f"{node.name}/{node.incarnation}/{self.scenario.seed}")

    async def run(self) -> None:
        """Until all rows have ended.

        Raises:
            Broken: an invariant does not hold.
        """
        s = self.scenario
        async with open_nursery() as nursery:
            nursery.start_soon(self.network.run)
            nursery.start_soon(self._watch)
            nursery.start_soon(self._supervise, "broker-0", broker)
            nursery.start_soon(self._supervise, "coordinator-0", roles.coordinator)
            nursery.start_soon(self._supervise, "learner-0", roles.learner)
            for role, main, count in (
                ("engine", roles.engine, s.engines),
                ("producer", roles.producer, s.producers),
                ("scorer", roles.scorer, s.scorers),
            ):
                for number in range(count):
                    nursery.start_soon(self._supervise, f"{role}-{number}", main)
            nursery.start_soon(self._chaos)
            for fault in s.script:
                nursery.start_soon(self._scripted, fault)
            await self._end()
            nursery.cancel_scope.cancel()

    async def _end(self) -> None:
        await trio.sleep(self.scenario.seconds)
        self.network.rates = CALM
        for node in self.nodes.values():
            self.network.heal(node)
        self.trace.note(trio.current_time(), "the faults are over")
        self.calm.set()
        with trio.move_on_after(PATIENCE_SECONDS):
            await self.done.wait()
            return
        left = [row for group in self.checker.model.alive.values() for row in group.here if row.step is None]
        story = "; ".join(map(str, left[:4])) or "no row is left, but the learner has not finished"
        self._fail(
            Broken(
                f"{PATIENCE_SECONDS:.0f} s after the last fault {len(left)} rows have not ended: {story}",
                [row.id for row in left[:4]],
            )
        )

    def crashed(self, error: Exception) -> None:
        """Remember what ended the run, unless an invariant was broken before."""
        first = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        if self.checker.failure is None:
            self.checker.failure = first if isinstance(first, Broken) else Broken(f"{type(first).__name__}: {first}")
            if not isinstance(first, Broken):
                self.is_crash = True
                for frame in traceback.extract_tb(first.__traceback__)[-CRASH_FRAMES:]:
                    self.trace.note(
                        trio.current_time(), f"at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
                    )

    def _fail(self, error: Broken) -> None:
        if self.checker.failure is None:
            self.checker.failure = error
        raise self.checker.failure

    async def _watch(self) -> None:
        """Consumes nothing; produces a failure when something is overdue, or was found; waits for the clock."""
        while True:
            with trio.move_on_after(1.0):
                await self.checker.failed.wait()
            if self.checker.failure is not None:
                raise self.checker.failure
            self.checker.judged_check()

    # -- processes

    async def _supervise(self, name: str, main: Main) -> None:
        """Consumes the deaths of one process; produces its next life; waits for both; unblocked by a clean end."""
        incarnation = 0
        while True:
            incarnation += 1
            node = self.nodes[name] = Node(name, incarnation)
            self.trace.note(trio.current_time(), f"{name} starts for the {incarnation}. time")
            if await self._live(node, main):
                return
            self.network.kill(node)
            if main is not broker and self._rng.random() < 0.5:
                await self._tell(name)
            await trio.sleep(self._rng.uniform(*RESTART_SECONDS))

    async def _live(self, node: Node, main: Main) -> bool:
        """One life; whether the process ended because it was done."""
        how = "was killed"
        try:
            with node.scope:
                await main(self, node)
                return True
        except Killed:
            how = "was killed in the middle of a write"
        except BaseExceptionGroup as group:
            how = self._forgive(first_error(group))
        except StreamRLError as error:
            how = self._forgive(error)
        self.trace.note(trio.current_time(), f"{node.name} {how}")
        return False

    def _forgive(self, error: BaseException) -> str:
        if not isinstance(error, FORGIVEN):
            raise error
        self.faults[type(error).__name__] = self.faults.get(type(error).__name__, 0) + 1
        return f"ends with {type(error).__name__}: {error}"

    async def _tell(self, name: str) -> None:
        """The supervisor tells the broker of a death, if it can."""
        if self.coordinator is not None and name != "coordinator-0":
            with trio.move_on_after(TELL_SECONDS):
                await self.coordinator.end_session(name)

    # -- faults

    async def _chaos(self) -> None:
        """Consumes random numbers; produces faults; waits for the clock; unblocked by it, until the faults end."""
        s = self.scenario
        self.network.rates = s.rates
        acts = sorted(s.processes)
        weights = [s.processes[act] for act in acts]
        while acts and sum(weights):
            await trio.sleep(self._rng.expovariate(1 / s.fault_seconds))
            if trio.current_time() >= s.seconds:
                return
            act = self._rng.choices(acts, weights)[0]
            names = [name for name in sorted(self.nodes) if name != "coordinator-0" or act not in ("crash",)]
            # The broker and the learner are one of many; they deserve as much as all the others together.
            name = self._rng.choice([self._rng.choice(names), "broker-0", "learner-0"])
            self.inflict(act, name, self._duration(act))

    def _duration(self, act: str) -> float:
        if act == "pause":
            return self._rng.uniform(0.1, PAUSE_SESSIONS * self.scenario.session_seconds)
        return self._rng.uniform(*CUT_SECONDS)

    async def _scripted(self, fault: Fault) -> None:
        """One fault of the script: waits for its time."""
        await trio.sleep_until(fault.at)
        self.inflict(fault.act, fault.target, fault.seconds)

    def inflict(self, act: str, name: str, seconds: float) -> None:
        """Let a fault happen to a process."""
        node = self.nodes.get(name)
        if node is None or not node.alive or trio.current_time() >= self.scenario.seconds:
            return
        if act in ("torn", "power"):
            node = self.nodes["broker-0"]
        if act == "power" and self.scenario.durability != "fsync":
            act = "crash"
        self.faults[act] = self.faults.get(act, 0) + 1
        self.trace.note(trio.current_time(), f"fault: {act} of {node.name} for {seconds:.2f} s")
        match act:
            case "crash" | "power":
                self.disk.power_loss |= act == "power"
                self.network.kill(node)
                node.scope.cancel()
            case "torn":
                self.disk.death = self._rng.choice(("before", "torn", "after"))
            case "pause":
                self.network.hold(node, min(seconds, self.scenario.seconds - trio.current_time()))
            case "cut":
                self.network.cut(node, min(seconds, self.scenario.seconds - trio.current_time()))
            case "slow":
                node.slowness = self._rng.uniform(1.0, SLOWEST)


async def broker(world: World, node: Node) -> None:
    """The broker, on the disk that outlives it."""
    s, disk = world.scenario, world.disk
    try:
        async with open_broker(
            s.flow,
            disk.directory,
            bind=ADDRESS,
            durability=s.durability,
            segment_bytes=s.segment_bytes,
            transport=world.network.transport(node, world.checker),
            wall=world.wall,
            open_journal=disk.open,
        ) as made:
            world.checker.recovered(made)
            await trio.sleep_forever()
    finally:
        world.checker.down()
        world.disk.death = None
        world.checker.lost(len(disk.records))


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Let trio run its tasks in an order that only the seed decides, as hypothesis' plugin for trio does."""
    run: Any = trio._core._run
    before = run._ALLOW_DETERMINISTIC_SCHEDULING, run._r.getstate()
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    run._r.seed(f"scheduler/{seed}")
    loggers = [
        logging.getLogger(name)
        for name in ("streamrl_queue", "streamrl_producers", "streamrl_agents", "streamrl_learners")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = before[0]
        run._r.setstate(before[1])
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def simulate(scenario: Scenario) -> Result:
    """Run one scenario to its end, or to the first broken invariant."""
    started = time.perf_counter()
    clock = trio.testing.MockClock(rate=0.0, autojump_threshold=0.0)
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-simulation-", dir=base) as directory,
        _deterministic(scenario.seed),
    ):
        worlds: list[World] = []

        async def main() -> float:
            worlds.append(World(scenario, Path(directory)))
            try:
                await worlds[0].run()
            # The edge of the simulation: whatever ended a process that must not end is what was found.
            except Exception as error:
                worlds[0].crashed(error)
            return trio.current_time()

        virtual = trio.run(main, clock=clock)
    gc.collect(0)
    return _result(worlds[0], virtual, time.perf_counter() - started)


def _result(world: World, virtual: float, seconds: float) -> Result:
    failure, model = world.checker.failure, world.checker.model
    return Result(
        seed=world.scenario.seed,
        digest=world.trace.digest,
        failure=str(failure) if failure else None,
        is_crash=world.is_crash,
        trace=tuple(world.trace.tail(failure.rows)) if failure else (),
        virtual_seconds=virtual,
        seconds=seconds,
        events=world.checker.events,
        entries=world.trace.count,
        counts=dict(sorted(model.counts().items())),
        faults=dict(sorted((world.faults | dict(world.network.counts)).items())),
        refused=dict(sorted(world.checker.refused.items())),
        late_writes=world.checker.late_writes,
        steps=model.step,
        versions=len(model.versions),
    )
