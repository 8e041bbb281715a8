"""The broker's disk: the real journal, on a directory that outlives the broker, with deaths in the middle of a write.

A killed broker leaves all that it wrote; of a record that it was writing, a part. A power loss (only simulated with
durability `fsync`, whose promise covers it) also takes what was not synced. No thread is used: a sync takes virtual
time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import trio

from streamrl_queue.events import Event
from streamrl_queue.journal import Buffer, Damaged, Journal, Segment, _parse

# An fsync takes this long, and sometimes ten times as long.
SYNC_SECONDS: Final = 0.004
SLOW_SYNC: Final = 0.05

Death = Literal["before", "torn", "after"]


class Killed(BaseException):
    """The broker's process ends here, whatever it was doing."""


class Witness(Protocol):
    """Hears of every event as soon as it is on the disk."""

    def journaled(self, event: Event, payload: Buffer) -> None: ...


class Disk:
    """What survives the broker: the directory, and what is known about it."""

    def __init__(self, directory: Path, rng: random.Random, witness: Witness) -> None:
        self.directory = directory
        self.rng = rng
        self.witness = witness
        # How the broker dies at its next write, when it shall.
        self.death: Death | None = None
        self.power_loss = False
        # Numbers of the records, in order, and of how many the next sync of each segment would make durable.
        self.records: list[int] = []
        self.unsynced: Counter[int] = Counter()
        self.journal: SimJournal | None = None

    @property
    def durable(self) -> int:
        """How many records survive power loss."""
        return len(self.records) - self.unsynced.total()

    def open(self, directory: Path, **options: Any) -> SimJournal:
        """What `open_broker` opens."""
        self.journal = SimJournal(directory, disk=self, **options)
        return self.journal


class SimJournal(Journal):
    """The journal on a simulated disk."""

    def __init__(self, directory: Path, *, disk: Disk, **options: Any) -> None:
        super().__init__(directory, **options)
        self._disk = disk
        self.dead = False

    def append(self, event: Event, payload: Buffer = b"", digest: bytes = b"") -> int:
        """Write one event, unless the broker is to die before, during or after it."""
        death, self._disk.death = self._disk.death, None
        if self.dead or death == "before":
            self._die()
        known = set(self._segments)
        record = super().append(event, payload, digest)
        for number in self._segments.keys() - known:
            self._watch(self._segments[number])
        if death == "torn" and self._tear(record):
            self._die()
        self._disk.records.append(record)
        self._disk.unsynced[record >> 32] += 1
        self._disk.witness.journaled(event, payload)
        if death is not None:
            self._die()
        return record

    def recover(self) -> Iterator[tuple[Event, int] | Damaged]:
        """As the journal does; afterwards syncs are watched."""
        yield from super().recover()
        for segment in self._segments.values():
            self._watch(segment)

    async def settle(self) -> None:
        """A sync takes time, in which the broker may die."""
        slow = self._disk.rng.random() < SLOW_SYNC
        await trio.sleep(self._disk.rng.expovariate(1 / SYNC_SECONDS) * (10 if slow else 1))
        self.sync()

    def delete_unneeded(self) -> list[int]:
        """What a snapshot covers need not be synced any more."""
        gone = super().delete_unneeded()
        for number in gone:
            self._disk.unsynced.pop(number, None)
        return gone

    def close(self) -> None:
        """The process is gone; with it, after a power loss, what was not synced."""
        super().close()
        if self._disk.power_loss:
            self._disk.power_loss = False
            self._lose_power()

    def _die(self) -> None:
        self.dead = True
        raise Killed

    def _tear(self, record: int) -> bool:
        """Write only a part of the record; False when the lost part was empty anyhow."""
        segment, start = self._segments[record >> 32], record & 0xFFFFFFFF
        kept = self._disk.rng.randrange(start + 1, segment.end)
        segment.view[kept : segment.end] = bytes(segment.end - kept)
        parsed = _parse(segment.view, start)
        return parsed is None or not parsed.whole

    def _watch(self, segment: Segment) -> None:
        sync = segment.sync
        number = segment.number

        def synced() -> None:
            sync()
            self._disk.unsynced.pop(number, None)

        segment.sync = synced  # type: ignore[method-assign]

    def _lose_power(self) -> None:
        """Keep what was synced and, of the rest, a random beginning."""
        disk = self._disk
        kept = disk.rng.randint(disk.durable, len(disk.records))
        # What is there after a power loss stays there.
        disk.unsynced.clear()
        if kept == len(disk.records):
            return
        number, start = disk.records[kept] >> 32, disk.records[kept] & 0xFFFFFFFF
        for path in sorted(self.directory.glob("*.segment")):
            if int(path.stem) > number:
                path.unlink()
            elif int(path.stem) == number:
                size = path.stat().st_size
                with path.open("r+b") as file:
                    file.truncate(start + disk.rng.randrange(min(64, size - start)))
        del disk.records[kept:]
