"""What the queue holds: the rows, and the journal they stand on. Whatever changes, changes here.

decide (rows) ──► record: journal ──► apply ──► rows
                             │                   ▲
                             └──── recover ──────┘
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa
import trio

from . import snapshot
from .batches import Mapped, Part, gather, read, records_of
from .config import ANY, Flow, Stage
from .errors import JournalError, SchemaError
from .events import Configured, Dropped, Event, Moved
from .journal import Damaged, Journal
from .recent import remember
from .rows import Rows
from .schema import KEY_COLUMNS
from .state import TASK, Row
from .transport import Buffer

log = logging.getLogger(__name__)

# Moved out of a sparse segment between two rounds of messages: a few milliseconds' worth.
MOVED_BYTES: Final = 4 << 20
# A record is read in parts, by several readers: it is checked and opened once for those that come soon.
RECORDS_OPEN: Final = 256
# Columns that are part of every reply.
KEYS: Final = frozenset(KEY_COLUMNS.names)


class BrokenState(RuntimeError):
    """An event was recorded and could not be folded into the state: the broker must not go on."""


class Store:
    """Rows whose every change is journaled. `rows` decides; `record` makes it so; `settle` makes it last."""

    def __init__(
        self,
        flow: Flow,
        journal: Journal,
        *,
        clock: Callable[[], float] = trio.current_time,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.rows = Rows(flow)
        self.journal = journal
        self._flow = flow
        self._clock = clock
        self._wall = wall
        # Whether something was recorded that must be on the disk before anybody hears of it.
        self._unsynced = False
        # Rows that events have changed since the last snapshot.
        self._changes = 0
        # Records that were found whole lately.
        self._opened: OrderedDict[int, pa.RecordBatch] = OrderedDict()
        # The segment that is being emptied, and what is still to move: (record, stage) → rows.
        self._moving = 0
        self._moves: dict[tuple[int, str], list[int]] = {}
        # Told of every event before it is folded; the metrics set it.
        self.watch: Callable[[Event], None] | None = None

    def recover(self) -> int:
        """Fold the journal; returns how many events there were. Leases get their full time anew.

        Rows pass the stages of their day until here, and those of this flow from here on.

        Raises:
            JournalError: the journal is damaged.
            ConfigError: the rows that there are cannot pass the stages of this flow.
        """
        events = 0
        now = self._clock()
        if (state := self.journal.snapshot()) is not None:
            self.rows = snapshot.load(state, now=now)
        damaged: list[Damaged] = []
        for found in self.journal.recover():
            if isinstance(found, Damaged):
                damaged.append(found)
            event, record = (found.event, found.record) if isinstance(found, Damaged) else found
            self.rows.apply(event, now=now, record=record)
            events += 1
        self.rows.freed.clear()
        for record in self.rows.references:
            self.journal.need(record)
        self.journal.dump = self._dump
        try:
            self.rows.statistics().check()
        except AssertionError as error:
            raise JournalError(f"{self.journal.directory}: events are missing: {error}") from error
        for found in damaged:
            self._give_up(found.record)
        configured = self.rows.configure(self._wall(), self._flow)
        if state is None and not events:
            configured = Configured(self._wall(), self._flow)
        self.record(configured)
        # What the process before this one wrote last may not be synced; it may be acknowledged again any moment.
        self._unsynced = True
        return events

    def _dump(self) -> bytes | None:
        """The state, once as much has happened since the last time as there is to write: so its cost per event is
        bounded, and so is what a recovery folds.
        """
        if self._changes < len(self.rows.rows):
            return None
        self._changes = 0
        return snapshot.dump(self.rows)

    def _give_up(self, record: int) -> None:
        """Rows whose columns are lost to damage before they were trained are dropped."""
        rest = ((id, row) for id, row in self.rows.rows.items() if row.step is None)
        places = ((id, place) for id, row in rest for place in row.places.values())
        rows = tuple(sorted({id for id, place in places if place.record == record}))
        log.error("%s is damaged: %d rows given up: %s", self.journal.name(record), len(rows), rows[:20])
        if rows:
            self.record(Dropped(self._wall(), rows, "journal_damage"))

    def record(self, event: Event | None, payload: Buffer = b"", digest: bytes = b"", *, sync: bool = False) -> None:
        """Journal an event, with its payload and the payload's digest (made here by default), and fold it.

        Raises:
            JournalError: the disk refused it; nothing has changed.
        """
        if event is None:
            return
        self._unsynced |= sync or self.journal.durability == "fsync"
        record = self.journal.append(event, payload, digest)
        if self.watch is not None:
            self.watch(event)
        try:
            self.rows.apply(event, now=self._clock(), record=record)
        except Exception as error:
            raise BrokenState(f"{event} was recorded but does not fit the state") from error
        self._changes += len(getattr(event, "rows", ()))
        if self.rows.references.get(record):
            self.journal.need(record)
        for freed in self.rows.freed:
            # A record whose rows ended with it was never needed.
            if freed != record:
                self._opened.pop(freed, None)
                self.journal.free(freed)
        self.rows.freed.clear()

    async def settle(self) -> None:
        """What was recorded survives what the durability promises."""
        if self._unsynced:
            self._unsynced = False
            await self.journal.settle()

    def tidy(self) -> None:
        """Move what is left of a sparse segment to the journal's end, a little at a time; delete what is empty.

        Raises:
            JournalError: the disk is full; what was not moved still lies where it lay.
        """
        if not self.journal.untidy:
            return
        if (sparse := self.journal.sparse()) is not None:
            if self._moving != sparse:
                self._moving = sparse
                self._moves = self.rows.in_segment(sparse)
            moved = 0
            while self._moves and moved < MOVED_BYTES:
                (record, stage), rows = self._moves.popitem()
                if record in self.rows.references:
                    payload = bytes(self.journal.payload(record))
                    self.record(Moved(self._wall(), stage, tuple(rows)), payload)
                    moved += len(payload)
            if not self._moves:
                self._moving = 0
        for number in self.journal.delete_unneeded():
            log.info("journal segment %d is no longer needed and was deleted", number)
        self.journal.untidy = self.journal.sparse() is not None

    # -- columns

    def columns(
        self, rows: Sequence[Row], names: Sequence[str], stage: Stage | None, *, anew: bool = False
    ) -> tuple[tuple[Part, ...], Buffer]:
        """The named columns of rows, as parts and their bytes; `*` is all that `stage` may see.

        They are compared with their digest; `anew` does not trust that they were whole a moment ago.

        Raises:
            SchemaError: a row has no such column (yet).
            JournalError: what lies in the journal is not what was written; the rows that it belongs to are dropped.
        """

        def batch(record: int) -> pa.RecordBatch:
            return self._open(record, anew=anew)

        return gather(rows, self._wanted(names, stage), self.journal.payload, batch)

    def _open(self, record: int, *, anew: bool) -> pa.RecordBatch:
        """What a record holds, checked."""
        batch = None if anew else self._opened.get(record)
        if batch is None:
            if not self.journal.is_whole(record):
                self._give_up(record)
                raise JournalError(f"columns in {self.journal.name(record)} are damaged; their rows were dropped")
            batch = read(self.journal.payload(record))
        remember(self._opened, record, batch, RECORDS_OPEN)
        return batch

    def places(self, rows: Sequence[Row], names: Sequence[str], stage: Stage | None) -> tuple[Mapped, ...]:
        """Where the named columns of rows lie, for a reader on this host.

        Raises:
            SchemaError: a row has no such column (yet).
        """
        return tuple(
            Mapped(of, tuple(positions), tuple(lines), tuple(wanted), record, *self.journal.place(record))
            for of, wanted in self._wanted(names, stage).items()
            for record, (positions, lines) in records_of(rows, of, wanted[0]).items()
        )

    def _wanted(self, names: Sequence[str], stage: Stage | None) -> dict[str, list[str]]:
        """Stage → which of its columns are asked for; the key columns come with every row."""
        wanted: dict[str, list[str]] = {}
        for column in names:
            if column == ANY:
                for name in (TASK, *(stage.after if stage else ())):
                    wanted[name] = [ANY]
            elif column not in KEYS:
                wanted.setdefault(self.rows.writer.get(column, TASK), []).append(column)
        return wanted

    def rows_of(self, ids: Sequence[int]) -> list[Row]:
        """The rows with these ids.

        Raises:
            SchemaError: naming those that have ended or never were.
        """
        if gone := [id for id in ids if id not in self.rows.rows]:
            raise SchemaError(f"fetch: rows {gone[:8]} have ended or never were")
        return [self.rows.rows[id] for id in ids]
