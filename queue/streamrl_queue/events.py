"""What happens to rows, as data. The journal is the list of these; the state of the queue is their fold.

`at` is wall-clock time in seconds since the epoch, for people and traces. No decision depends on it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .config import Flow

EndCause = Literal["released", "expired", "session", "fenced"]


class Configured(msgspec.Struct, frozen=True, tag=True):
    """From here on rows pass the stages of this flow. The first event of a journal; again when a run is resumed under
    another flow.
    """

    at: float
    flow: Flow


class Put(msgspec.Struct, frozen=True, tag=True):
    """Rows are born: payload line `lines[i]` becomes `members` rows of group `first_group + i`, in order.

    With `filled`, the stages of that name are done: the line and those behind it are one row each, and `oldest` and
    `tokens` say of every row what `Written` would.
    """

    at: float
    first_row: int
    first_group: int
    lines: tuple[int, ...]
    members: int
    keys: tuple[str, ...]
    envs: tuple[str, ...]
    split: str
    priority: int
    sources: dict[str, int]
    filled: tuple[str, ...] = ()
    oldest: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()

    @property
    def rows(self) -> range:
        """The ids of the rows that are born."""
        return range(self.first_row, self.first_row + len(self.lines) * self.members)

    def line(self, number: int) -> int:
        """The payload line that row `number` of `rows`, from 0, is born from."""
        group, member = divmod(number, self.members)
        return self.lines[group] + (member if self.filled else 0)


class Granted(msgspec.Struct, frozen=True, tag=True):
    """A session holds these rows of one stage. Groups in `admitted` count against the staleness bound from now."""

    at: float
    lease: int
    stage: str
    session: str
    rows: tuple[int, ...]
    admitted: tuple[int, ...]
    step: int | None
    version: int
    # The session's request, so that asking again after a lost reply gives the same lease.
    request: int = 0


class Written(msgspec.Struct, frozen=True, tag=True):
    """The stage's columns are filled; payload line i belongs to `rows[i]`.

    `oldest[i]` is the oldest policy version in the row's spans (-1: none), `tokens[i]` its length.
    """

    at: float
    lease: int
    stage: str
    rows: tuple[int, ...]
    oldest: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


class Moved(msgspec.Struct, frozen=True, tag=True):
    """The stage's columns of these rows lie in this record from now on, line for line as they lay in the other."""

    at: float
    stage: str
    rows: tuple[int, ...]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The lease on these rows is over without a write."""

    at: float
    lease: int
    rows: tuple[int, ...]
    cause: EndCause
    reason: str


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """These rows end untrained, for a reason that is counted."""

    at: float
    rows: tuple[int, ...]
    reason: str


class VersionBegun(msgspec.Struct, frozen=True, tag=True):
    """A version id is taken, whether or not the version will ever exist."""

    at: float
    version: int
    step: int
    parent: int | None
    # Session and number of the request, so that asking again after a lost reply gives the same id.
    request: str = ""


class VersionCommitted(msgspec.Struct, frozen=True, tag=True):
    """The version exists: every engine that is not fenced has proved it."""

    at: float
    version: int
    digest: str


class Committed(msgspec.Struct, frozen=True, tag=True):
    """These rows were trained in this optimizer step."""

    at: float
    step: int
    rows: tuple[int, ...]


class Retired(msgspec.Struct, frozen=True, tag=True):
    """A durable checkpoint covers all steps up to `through`; their rows leave."""

    at: float
    through: int


class Reconciled(msgspec.Struct, frozen=True, tag=True):
    """The learner goes on from `step`: rows trained after it are ready again, older learners hold nothing."""

    at: float
    step: int


class Fenced(msgspec.Struct, frozen=True, tag=True):
    """The engine of this session must not be used until it says so in a later announcement than `announced`."""

    at: float
    session: str
    announced: int
    reason: str


Event = (
    Configured
    | Put
    | Granted
    | Written
    | Moved
    | Ended
    | Dropped
    | VersionBegun
    | VersionCommitted
    | Committed
    | Retired
    | Reconciled
    | Fenced
)
