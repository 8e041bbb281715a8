"""What the queue knows about rows, groups, leases and versions, and the counts it shows."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from .events import Granted

# The pseudo-stage that "writes" the columns a row is born with.
TASK: Final = ""
# Born under no step yet: nothing was sampled.
UNBORN: Final = -1


# Order in a ready heap: birth (for the learner), priority, row id; the smallest goes first.
Rank = tuple[int, int, int]
# Which of a stage's ready heaps: environment, and how admission treats its rows (`free`, `bound`, `admitted`).
Line = tuple[str, str]


class Place(NamedTuple):
    """Where a row's columns of one stage lie: a record of the journal, and the line in its payload."""

    record: int
    line: int


class Row:
    """One attempt at a task."""

    __slots__ = (
        "attempts",
        "born",
        "env",
        "group",
        "id",
        "leases",
        "member",
        "on_way",
        "places",
        "priority",
        "ready",
        "split",
        "state",
        "step",
        "tokens",
        "unstarted",
        "writers",
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
        # Stage → the lease that wrote it, so that a repeated write gets its first receipt.
        self.writers: dict[str, int] = {}
        self.leases: dict[str, int] = {}
        self.attempts: dict[str, int] = {}
        self.ready: set[str] = set()
        self.state = "waiting"
        # Counted among the rows that have not been rolled out.
        self.unstarted = False
        # Counted among the rows that are on their way to the learner.
        self.on_way = False


class Group:
    """Attempts at one task, compared with each other."""

    __slots__ = ("admitted", "id", "key", "members", "ready")

    def __init__(self, id: int, key: str) -> None:
        self.id = id
        self.key = key
        self.admitted = False
        # Group stage that it is ready for → the members that this concerns, first of all the one it queues by.
        self.ready: dict[str, list[Row]] = {}
        # The members that have not been dropped, died or been done.
        self.members: list[Row] = []


class Lease:
    """Rows of one stage that one session holds."""

    __slots__ = ("deadline", "id", "request", "rows", "session", "stage", "step")

    def __init__(self, granted: Granted, deadline: float) -> None:
        self.id = granted.lease
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
    """Rows of one stage: ready for it, leased by it, and written by it so far."""

    ready: int
    leased: int
    written: int


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of rows by state; `check` is the conservation law."""

    tasks: int
    waiting: int
    leased: int
    ready: int
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
        return self.waiting + self.leased + self.ready

    def check(self) -> None:
        """Raise AssertionError unless every task is in exactly one state."""
        ended = self.trained + self.done + sum(self.dropped.values()) + sum(self.dead.values())
        assert self.tasks == self.unfinished + ended, f"conservation broken: {self}"
