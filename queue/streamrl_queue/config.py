"""Settings of the queue, and stages: the data that says which columns a worker reads and which it fills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, get_args

import msgspec

from .bounds import COUNT, SECONDS, Range, check_bounds
from .errors import ConfigError
from .schema import ADVANTAGE_COLUMNS, REWARD_COLUMNS, TRAJECTORY_COLUMNS

Durability = Literal["fsync", "flush", "memory"]
OnStale = Literal["wait", "drop", "keep"]
Recovery = Literal["stop", "skip"]
# Which of the rows that are ready is handed out first; see `ready.py`.
Order = Literal["admission", "freshest", "ready_first", "balanced"]

# Rows of one group.
MOST_MEMBERS: Final = 65535
# As a column: all of them.
ANY: Final = "*"


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is done to a row: who holds its lease reads some columns and writes others.

    A column that no stage writes is a task column. Reading `*` means all task columns and all that the stages in
    `after` wrote. A row is ready for a stage when the stages that it builds on are done. A row whose split has no
    stage left is done.
    """

    name: str
    reads: tuple[str, ...] = ()
    # `*`: whatever columns its writer brings.
    writes: tuple[str, ...] = ()
    # Stages that must be done first, beside those that write its `reads`.
    after: tuple[str, ...] = ()
    unit: Literal["row", "group"] = "row"
    splits: tuple[str, ...] = ("train",)
    # Seconds a lease lives without `extend`. None: as long as its holder's session (for learners).
    seconds: float | None = 60.0
    # After this many lost deliveries the row is dead.
    max_deliveries: int = 3
    # A group with fewer members left alive is dropped.
    min_members: int = 1
    # Once this many members of a group want the stage or have passed it, the others have `straggler_seconds` left; then
    # they are dropped as `straggler` and the group goes on. None: a group waits for all its members.
    partial: int | None = None
    straggler_seconds: float | None = None
    # Which row goes first, among those of the same priority.
    order: Order = "admission"
    # Rows that want this stage are parked: nobody gets them but who names their group's key.
    parks: bool = False
    # Rows are admitted here, by the staleness bound.
    admits: bool = False
    # Rows end here by `commit(step, rows)`, not by a write; leases name their step.
    trains: bool = False

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ConfigError(f"stage {self.name}: {problem}")

    def _problems(self) -> Iterator[str]:
        yield from self._mistyped()
        if (self.partial is None) != (self.straggler_seconds is None):
            yield (
                f"partial is {self.partial} and straggler_seconds is {self.straggler_seconds}: how many members are "
                "enough and how long the others may still take go together; set both or neither"
            )
        if self.partial is not None and self.unit != "group":
            yield f"partial: expected a stage of unit group, got unit {self.unit}; only groups have stragglers"
        if self.partial is not None and self.partial < max(1, self.min_members):
            yield (
                f"partial: expected at least min_members={self.min_members}, got {self.partial}: the group would be "
                "dropped as too small; raise partial or lower min_members"
            )
        if self.straggler_seconds is not None and not 0 < self.straggler_seconds < float("inf"):
            yield f"straggler_seconds: expected more than 0 and finite, got {self.straggler_seconds}"
        if self.order == "balanced" and self.admits:
            yield (
                "order: expected another than balanced where rows are admitted: before its rollout a row has no "
                "tokens to balance; use admission, freshest or ready_first"
            )
        if self.parks and (self.admits or self.trains):
            role = "admits" if self.admits else "trains"
            yield f"parks and {role}: parked rows are taken by key, the others in order; park them in a stage before"

    def _mistyped(self) -> Iterator[str]:
        """What the types above forbid: stages are also written by hand, and the journal could not be read again."""
        if not isinstance(self.name, str) or not self.name:
            yield f"name: expected a word, got {self.name!r}"
        for field in ("reads", "writes", "after", "splits"):
            value = getattr(self, field)
            if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
                yield f"{field}: expected a tuple of names, got {value!r}"
        for field, known in (("unit", ("row", "group")), ("order", get_args(Order))):
            if getattr(self, field) not in known:
                yield f"{field}: expected one of {', '.join(known)}, got {getattr(self, field)!r}"
        for field in ("max_deliveries", "min_members", "partial"):
            value = getattr(self, field)
            if value is not None and (type(value) is not int or not 1 <= value < 1 << 31):
                yield f"{field}: expected a whole number from 1 on, got {value!r}"
        seconds = self.seconds
        if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds < float("inf")):
            yield f"seconds: expected more than 0 and finite, or None, got {seconds!r}"
        for field in ("parks", "admits", "trains"):
            if type(getattr(self, field)) is not bool:
                yield f"{field}: expected True or False, got {getattr(self, field)!r}"


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """The staleness bound: see `admission.py`."""

    max_staleness: int
    rows_per_step: int
    on_stale: OnStale = "wait"


_QUEUE_BOUNDS: Final[dict[str, Range]] = {
    "max_staleness": (0, 1_000_000),
    "waiting_rows": COUNT,
    # 1 PiB.
    "budget_mebibytes": (1, 1 << 30),
    "rollout_seconds": SECONDS,
    "scoring_seconds": SECONDS,
    "max_deliveries": (1, 1_000_000),
    "session_seconds": SECONDS,
    "segment_mebibytes": (1, 4096),
    "partial_members": (1, MOST_MEMBERS),
    "straggler_seconds": (0.001, SECONDS[1]),
}


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The TransferQueue of a run."""

    durability: Durability = "flush"
    """What an acknowledgement promises: `fsync` survives power loss, `flush` a killed process; with `memory` the
    journal lies in shared memory and goes with the machine."""
    max_staleness: int = 2
    """The most optimizer steps that the learner may be ahead of the oldest token it trains on. 0 is synchronous."""
    on_stale: OnStale = "wait"
    """What happens to a row that would pass max_staleness: `wait` holds younger rows back until it is trained,
    `drop` drops it, `keep` trains it anyway."""
    waiting_rows: int = 4096
    """The most rows that wait to be rolled out; above it `put` waits, then raises QueueFull."""
    budget_mebibytes: int = 16384
    """The most MiB that the columns of rows may take in the journal; above it `put` waits, then raises QueueFull.
    Trained rows count until a checkpoint covers them. When they keep all others out, the learner takes one early."""
    rollout_seconds: float = 120.0
    """Seconds a producer may hold a row without a sign of life for it."""
    scoring_seconds: float = 60.0
    """Seconds a reward or advantage worker may hold a row."""
    max_deliveries: int = 3
    """After this many lost deliveries to one stage a row is dead."""
    session_seconds: float = 6.0
    """Seconds without a heartbeat after which a process counts as gone and its leases end."""
    segment_mebibytes: int = 64
    """Size of one journal file in MiB."""
    partial_members: int | None = None
    """Members of a group that are enough to compare: once so many are scored, the others have straggler_seconds left,
    then they are dropped as `straggler`. None: a group waits for all its members."""
    straggler_seconds: float | None = None
    """Seconds that a group waits for the rest of its members once partial_members are scored. Short ones train on
    fast episodes only: watch how long the dropped ones are."""
    recovery: Recovery = "stop"
    """What damaged columns in the journal do when a run is resumed: `stop` refuses and names file, byte and rows,
    `skip` drops those rows as `journal_damage` and goes on."""

    key_file: str | None = None
    """File with the queue's key, as `streamrl keygen FILE` makes it, readable by its owner alone: only processes that
    have it can talk to the queue and the engines. None: the file that STREAMRL_QUEUE_KEY_FILE names, or no key."""
    metrics: str | None = None
    """HOST:PORT of this machine where the broker answers Prometheus, at http://HOST:PORT/metrics. None: nowhere."""

    def __post_init__(self) -> None:
        check_bounds(self, "queue", _QUEUE_BOUNDS)
        if (self.partial_members is None) != (self.straggler_seconds is None):
            raise ConfigError(
                f"queue.partial_members is {self.partial_members} and queue.straggler_seconds is "
                f"{self.straggler_seconds}: set both, or neither to wait for all members"
            )


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """All that the broker must know about the rows it serves."""

    stages: tuple[Stage, ...]
    admission: Admission | None = None
    waiting_rows: int = 1 << 20
    budget_bytes: int = 1 << 40
    session_seconds: float = 6.0

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ConfigError(f"stages: expected distinct names, got {', '.join(names)}")
        written: dict[str, str] = {}
        for stage in self.stages:
            for column in stage.writes:
                if column == ANY:
                    continue
                if column in written:
                    raise ConfigError(f"stages {written[column]} and {stage.name} both write column {column}")
                written[column] = stage.name
            if unknown := set(stage.after) - set(names):
                raise ConfigError(f"stage {stage.name}: after: no stage {', '.join(sorted(unknown))}")
        self._check_order()
        if len(training := [stage.name for stage in self.stages if stage.trains]) > 1:
            raise ConfigError(f"stages {', '.join(training)} all train rows; a row is trained once")
        if self.admission is None and any(stage.admits for stage in self.stages):
            raise ConfigError("a stage admits rows but the flow has no admission bound")
        for stage in self.stages:
            if stage.trains and stage.order == "freshest" and self.admission and self.admission.on_stale == "wait":
                raise ConfigError(
                    f"stage {stage.name}: order=freshest with on_stale=wait: the oldest rows must be trained first, or "
                    "they pass max_staleness while fresher ones overtake them; use order=admission, or on_stale=drop"
                )

    def writers(self) -> dict[str, str]:
        """Column → the stage that writes it; the others are the task's."""
        return {column: stage.name for stage in self.stages for column in stage.writes if column != ANY}

    def needs(self) -> dict[str, frozenset[str]]:
        """Stage → the stages that must be done first."""
        writers = self.writers()
        return {
            stage.name: frozenset(writers[column] for column in stage.reads if column in writers) | {*stage.after}
            for stage in self.stages
        }

    def _check_order(self) -> None:
        """Stages must be able to follow one another: none may wait for itself."""
        waits = self.needs()
        done: set[str] = set()
        while free := {name for name, needs in waits.items() if name not in done and needs <= done}:
            done |= free
        if stuck := [name for name in waits if name not in done]:
            raise ConfigError(
                f"stages {', '.join(stuck)}: expected an order in which each follows those that it reads from or is "
                "`after`; each of these waits for another one of them, or for itself"
            )

    def succeed(self, before: Flow) -> Flow:
        """The flow itself, if it can go on with the rows that passed some stages of `before`.

        Stages may be added anywhere, and a stage may read other columns. What rows have must stay what it was.

        Raises:
            ConfigError: naming the stage, and what it was.
        """
        stages = {stage.name: stage for stage in self.stages}
        if lost := [stage.name for stage in before.stages if stage.name not in stages]:
            raise ConfigError(
                f"stages: the journal has rows of stage {', '.join(lost)}, which this flow lacks; keep the stage, or "
                "begin with an empty directory"
            )
        if (before.admission is None) != (self.admission is None):
            raise ConfigError("admission: rows of the journal were started with a bound or without; keep it that way")
        for old in before.stages:
            for field in ("writes", "unit", "admits", "trains"):
                was, now = getattr(old, field), getattr(stages[old.name], field)
                if (sorted(was) if field == "writes" else was) != (sorted(now) if field == "writes" else now):
                    raise ConfigError(
                        f"stage {old.name}: {field}: the journal's rows passed it with {_shown(was)}, got "
                        f"{_shown(now)}; keep it and add a stage of another name instead"
                    )
        return self


def _shown(value: object) -> str:
    return ", ".join(value) or "nothing" if isinstance(value, tuple) else str(value)


def training_flow(config: QueueConfig, *, rows_per_step: int, min_group_members: int = 2) -> Flow:
    """The flow of a training run: rollout → reward → advantage → learn; eval rows end after their reward."""
    trajectory, reward, advantage = (
        tuple(schema.names) for schema in (TRAJECTORY_COLUMNS, REWARD_COLUMNS, ADVANTAGE_COLUMNS)
    )
    both = ("train", "eval")
    deliveries = config.max_deliveries
    if config.partial_members is not None and config.partial_members < min_group_members:
        raise ConfigError(
            f"queue.partial_members: expected at least {min_group_members}, the fewest that can be compared, got "
            f"{config.partial_members}"
        )
    return Flow(
        stages=(
            Stage(
                name="rollout",
                reads=("env", "task", "seed"),
                writes=trajectory,
                splits=both,
                seconds=config.rollout_seconds,
                max_deliveries=deliveries,
                admits=True,
            ),
            Stage(
                name="reward",
                reads=("env", "task", *trajectory),
                writes=reward,
                splits=both,
                seconds=config.scoring_seconds,
                max_deliveries=deliveries,
            ),
            Stage(
                name="advantage",
                reads=("reward", "status"),
                writes=advantage,
                unit="group",
                seconds=config.scoring_seconds,
                max_deliveries=deliveries,
                min_members=min_group_members,
                partial=config.partial_members,
                straggler_seconds=config.straggler_seconds,
            ),
            Stage(
                name="learn",
                reads=(
                    "tokens",
                    "mask",
                    "logprobs",
                    "versions",
                    "segments",
                    "sampling",
                    "reward",
                    "advantage",
                ),
                seconds=None,
                max_deliveries=1 << 30,
                trains=True,
            ),
            Stage(
                name="evaluate",
                reads=("reward", "status", "turns"),
                splits=("eval",),
                seconds=config.scoring_seconds,
                max_deliveries=deliveries,
            ),
        ),
        admission=Admission(max_staleness=config.max_staleness, rows_per_step=rows_per_step, on_stale=config.on_stale),
        waiting_rows=config.waiting_rows,
        budget_bytes=config.budget_mebibytes << 20,
        session_seconds=config.session_seconds,
    )


def work_flow(stages: Sequence[str] = ("work",), *, seconds: float = 60.0, max_deliveries: int = 3) -> Flow:
    """A flow for the queue alone: rows of any columns pass the named stages in order.

    Each stage reads all columns there are and may write any; a row is done when the last one is written.
    """
    chain = tuple(
        Stage(
            name=name,
            reads=(ANY,),
            writes=(ANY,),
            after=tuple(stages[:number]),
            splits=("train", "eval"),
            seconds=seconds,
            max_deliveries=max_deliveries,
        )
        for number, name in enumerate(stages)
    )
    return Flow(stages=chain)
