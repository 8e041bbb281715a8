"""What a client may ask the broker, and what the broker answers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .batches import Mapped, Part, RowKeys
from .config import MOST_MEMBERS, Durability
from .state import Statistics, Version
from .waits import Waiting

# Counts and ids, within what the journal and Arrow's columns can hold.
Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# How many rows: more than are ever alive.
RowCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Open the envelope's session, or open it again after the broker restarted.

    `ready` and `version` are those of the session's last announcement, whose number is `announced`.
    """

    name: str
    role: str
    endpoint: str | None = None
    ready: bool = False
    version: int | None = None
    announced: int = 0


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The session lives as long as a heartbeat arrives every `session_seconds`. Clients on the same `host` may read
    the segments in the directory `journal` themselves.
    """

    session_seconds: float
    host: str = ""
    journal: str = ""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The session is alive. `activity` says what it does or waits for, in words; `waits` are the single things that it
    is at, those that last longest; `given_up` are requests whose replies nobody awaits any more, in case their `Forget`
    was lost.
    """

    activity: str
    since: float
    gauges: dict[str, float]
    given_up: tuple[int, ...] = ()
    waits: tuple[Waiting, ...] = ()


class Bye(msgspec.Struct, frozen=True, tag=True):
    """End the envelope's session now."""


class EndSession(msgspec.Struct, frozen=True, tag=True):
    """The process of that name is gone; end its sessions now. Sent by its supervisor."""

    name: str


class ReleaseAbsent(msgspec.Struct, frozen=True, tag=True):
    """All processes of before the broker's start are gone for good: their rows go back, with no delivery counted."""


class Announce(msgspec.Struct, frozen=True, tag=True):
    """An engine says whether it may be used, and with which version. Its announcements are numbered from 1."""

    ready: bool
    version: int | None
    announced: int


class Fence(msgspec.Struct, frozen=True, tag=True):
    """That session's engine must not be used until it announces itself again. After a restart of the broker, waits for
    the session to come back.
    """

    session: str
    reason: str
    wait: float


class Member(msgspec.Struct, frozen=True):
    """One process at the queue. `since` is when its activity began, in seconds since the epoch; `waits` are the single
    things that it is at, those that last longest.
    """

    session: str
    name: str
    role: str
    endpoint: str | None
    ready: bool
    version: int | None
    activity: str
    since: float
    gauges: dict[str, float]
    announced: int = 0
    waits: tuple[Waiting, ...] = ()


class Members(msgspec.Struct, frozen=True, tag=True):
    """Who is here: at once when the epoch is not `after`, else when it moves or `wait` seconds are over."""

    role: str | None
    after: int
    wait: float


class Membership(msgspec.Struct, frozen=True, tag=True):
    """Who is here. The epoch moves when somebody joins, leaves, announces or is fenced."""

    epoch: int
    members: tuple[Member, ...]


class PutTasks(msgspec.Struct, frozen=True, tag=True):
    """The payload's lines become groups of `members` rows; with `filled`, one row each, and these stages are done."""

    keys: tuple[str, ...]
    members: Annotated[int, msgspec.Meta(ge=1, le=MOST_MEMBERS)]
    split: str
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
    sources: dict[str, Natural]
    wait: float
    filled: tuple[str, ...] = ()


class LeaseRows(msgspec.Struct, frozen=True, tag=True):
    """Hand out up to `rows` rows that are ready for `stage`, or all that are parked there under `keys`.

    `mapped`: say where their columns lie, not what they are.
    """

    stage: str
    rows: RowCount
    at_least: Natural
    wait: float
    env: str | None
    step: Natural | None
    payload: bool
    columns: tuple[str, ...] | None
    mapped: bool = False
    keys: tuple[str, ...] | None = None


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Rows of one lease; the payload holds the columns in `parts`. No rows: nothing was ready in time."""

    lease: int
    stage: str
    rows: tuple[RowKeys, ...]
    seconds: float | None
    version: int
    version_step: int
    parts: tuple[Part, ...] = ()
    mapped: tuple[Mapped, ...] = ()


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Columns of rows that somebody leased without their columns. No names: those that `stage` reads."""

    rows: tuple[int, ...]
    columns: tuple[str, ...]
    stage: str = ""
    mapped: bool = False


class Columns(msgspec.Struct, frozen=True, tag=True):
    """The columns of `rows`: those in `parts` in the payload, the others in place."""

    rows: tuple[RowKeys, ...]
    parts: tuple[Part, ...] = ()
    mapped: tuple[Mapped, ...] = ()


class Peek(msgspec.Struct, frozen=True, tag=True):
    """Who would be handed out next at a stage; nothing is handed out."""

    stage: str
    rows: RowCount


class WriteColumns(msgspec.Struct, frozen=True, tag=True):
    """The payload fills the stage's columns of the rows it names."""

    lease: int


class Extend(msgspec.Struct, frozen=True, tag=True):
    """The lease's holder is alive and needs longer."""

    lease: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Give rows of a lease back (all of them when `rows` is None)."""

    lease: int
    rows: tuple[int, ...] | None
    reason: str


class Drop(msgspec.Struct, frozen=True, tag=True):
    """End rows of a lease untrained."""

    lease: int
    rows: tuple[int, ...] | None
    reason: str


class DropUnfinished(msgspec.Struct, frozen=True, tag=True):
    """End every row of a split that has not ended."""

    split: str
    reason: str


class BeginVersion(msgspec.Struct, frozen=True, tag=True):
    """Take a fresh version id."""

    step: Natural
    parent: Natural | None


class CommitVersion(msgspec.Struct, frozen=True, tag=True):
    """The version is proven on every engine that is not fenced."""

    version: int
    digest: str


class ListVersions(msgspec.Struct, frozen=True, tag=True):
    """All versions that were ever begun."""


class Versions(msgspec.Struct, frozen=True, tag=True):
    """Versions in the order they were begun; `committed` is the one in force (0: none)."""

    versions: tuple[Version, ...]
    committed: int


class CommitStep(msgspec.Struct, frozen=True, tag=True):
    """These rows were trained in this step."""

    step: Natural
    rows: tuple[Natural, ...]


class Retire(msgspec.Struct, frozen=True, tag=True):
    """A durable checkpoint covers all steps up to `through`."""

    through: Natural


class Reconcile(msgspec.Struct, frozen=True, tag=True):
    """The learner goes on from this step."""

    step: Natural


class GetStatistics(msgspec.Struct, frozen=True, tag=True):
    """Counts of rows by state."""


class GetLeased(msgspec.Struct, frozen=True, tag=True):
    """Of each stage but the one that trains, the `most` rows that are held longest; of `rows`, those that are held."""

    rows: tuple[Natural, ...]
    most: RowCount


class LeasedRow(msgspec.Struct, frozen=True):
    """A row that somebody holds. `since` is when it was handed out, in seconds since the epoch (None: before the broker
    started). Of the `members` of its group that are left, `behind` have not passed the stage (of more than a thousand,
    as many of the first thousand).
    """

    row: int
    group: int
    member: int
    stage: str
    holder: str
    since: float | None
    members: int
    behind: int


class Leased(msgspec.Struct, frozen=True, tag=True):
    """Rows that are held, those handed out first in front; and why the put that waits first must wait (empty: none
    waits).
    """

    rows: tuple[LeasedRow, ...]
    full: str


class Counts(msgspec.Struct, frozen=True, tag=True):
    """Counts of rows by state, the size of the journal in bytes, and messages that were dropped: all, and by peer."""

    statistics: Statistics
    journal_bytes: int
    protocol_errors: int = 0
    strangers: dict[str, int] = {}


class Receipt(msgspec.Struct, frozen=True, tag=True):
    """The request took effect, and survives what `durability` promises.

    `rows` are the rows it named or made; `duplicates` of them were there before. Of a put, these are counted in keys,
    and `known` says which of its keys they are.
    """

    rows: tuple[int, ...]
    duplicates: int
    durability: Durability
    known: tuple[int, ...] = ()


class Held(msgspec.Struct, frozen=True, tag=True):
    """The rows that a lease still holds."""

    rows: tuple[int, ...]


class Number(msgspec.Struct, frozen=True, tag=True):
    """One number: a version id, or how many rows were concerned."""

    value: int


Request = (
    Hello
    | Heartbeat
    | Bye
    | EndSession
    | ReleaseAbsent
    | Announce
    | Fence
    | Members
    | PutTasks
    | LeaseRows
    | Fetch
    | Peek
    | WriteColumns
    | Extend
    | Release
    | Drop
    | DropUnfinished
    | BeginVersion
    | CommitVersion
    | ListVersions
    | CommitStep
    | Retire
    | Reconcile
    | GetStatistics
    | GetLeased
)
Reply = Welcome | Membership | Grant | Columns | Versions | Counts | Leased | Receipt | Held | Number
