"""What the queue knows about rows, groups, leases and versions, and the counts it shows."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from .events import Granted

# The pseudo-stage that "writes" the columns a row is born with.
TASK: Final = ""
# Born under no step yet: nothing was sampled.
UNBORN: Final = -1


# Order in a ready heap, see `ready.py`; the smallest goes first, and the last number is the row's id.
Rank = tuple[int, int, int, int]
# Which of a stage's ready heaps: environment, and how the staleness bound treats its rows (`free`, `bound`,
# `admitted`, `outside`).
Line = tuple[str, str]


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a row's columns of one stage lie: a record of the journal, and the line in its payload; and the lease that
    wrote them (0: the row was born with them), so that a repeated write gets its first receipt.
    """

    record: int
    line: int
    lease: int = 0


class Row:
    """One attempt at a task."""

    __slots__ = (
        "attempts",
        "born",
        "bound",
        "env",
        "group",
        "id",
        "leases",
        "member",
        "on_way",
        "outside",
        "places",
        "priority",
        "ready",
        "split",
        "state",
        "step",
        "tokens",
        "unstarted",
    )

    def __init__(self, id: int, group: Group, member: int, env: str, split: str, priority: int, place: Place) -> None:
        self.id = id
        self.group = group
        self.member = member
        self.env = env
        self.split = split
        self.priority = priority
        # Step of the oldest version that this row's tokens may come from.
        self.born = UNBORN
        # Step that trained it.
        self.step: int | None = None
        self.tokens = 0
        # Stage → where its columns lie; also the set of stages that are done.
        self.places: dict[str, Place] = {TASK: place}
        self.leases: dict[str, int] = {}
        self.attempts: dict[str, int] = {}
        # Stage that it can be handed out for → its entry in that stage's queue; of a group stage, its group's.
        self.ready: dict[str, Rank] = {}
        self.state = "waiting"
        # Counted among the rows that have not been rolled out.
        self.unstarted = False
        # Counted among the rows that are on their way to the learner.
        self.on_way = False
        # Whether the staleness bound counts it from its admission on: rows that are never trained are free of it.
        self.bound = False
        # Born behind the stage that admits. `seen`: it is ready to be trained, so from now on the bound counts it too.
        self.outside: Literal["", "unseen", "seen"] = ""


class Group:
    """Attempts at one task, compared with each other."""

    __slots__ = ("admitted", "first", "id", "key", "members", "ready", "waits")

    def __init__(self, id: int, key: str, first: int) -> None:
        self.id = id
        self.key = key
        # Its first row, which may have ended.
        self.first = first
        self.admitted = False
        # Group stage that it is ready for → the members that this concerns, first of all the one it queues by.
        self.ready: dict[str, list[Row]] = {}
        # Group stage that enough members want → monotonic seconds at which the others are dropped.
        self.waits: dict[str, float] = {}
        # The members that have not been dropped, died or been done.
        self.members: list[Row] = []


class Lease:
    """Rows of one stage that one session holds."""

    __slots__ = ("at", "deadline", "id", "request", "rows", "session", "stage", "step")

    def __init__(self, granted: Granted, deadline: float) -> None:
        self.id = granted.lease
        self.at = granted.at
        self.stage = granted.stage
        self.session = granted.session
        self.rows = set(granted.rows)
        self.step = granted.step
        self.request = granted.request
        self.deadline = deadline


class Version(msgspec.Struct, frozen=True):
    """A policy version: the weights after `step` optimizer steps."""

    id: int
    step: int
    parent: int | None
    digest: str | None = None
    request: str = ""

    @property
    def committed(self) -> bool:
        return self.digest is not None


class StageCount(msgspec.Struct, frozen=True):
    """Rows of one stage: ready for it (or, at a stage that parks, parked for it), leased by it, and written by it so
    far.
    """

    ready: int
    leased: int
    written: int
    parked: int = 0


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of rows by state; `check` is the conservation law."""

    tasks: int
    waiting: int
    leased: int
    ready: int
    parked: int
    trained: int
    done: int
    dropped: dict[str, int]
    dead: dict[str, int]
    by_split: dict[str, dict[str, int]]
    stages: dict[str, StageCount]
    admitted: int
    step: int
    version: int
    version_step: int
    sources: dict[str, int]

    @property
    def unfinished(self) -> int:
        return self.waiting + self.leased + self.ready + self.parked

    def check(self) -> None:
        """Raise AssertionError unless every task is in exactly one state."""
        ended = self.trained + self.done + sum(self.dropped.values()) + sum(self.dead.values())
        assert self.tasks == self.unfinished + ended, f"conservation broken: {self}"
