"""The journal: everything that happened to rows, and their columns, in append-only segments.

    record     magic (4) · header bytes (4) · payload bytes (8) · header digest (16) · payload digest (32)
               · header · padding to 64 · payload · padding to 64
    snapshot   digest (32) · the state before the segment of the same number

The header is one event as msgpack; the payload is the Arrow stream that came with it, or nothing. A record is
written whole before it is acknowledged. A record's number is where it lies: segment · 2^32 + byte.

When a segment is full the state may be written beside the next one, so that recovery reads one snapshot and what
came after it. A segment before the snapshot whose payloads nobody needs any more is deleted; of a nearly empty one the
payloads that are left are moved to the end of the journal first. The events of deleted segments stay, without their
payloads, in `*.ledger` files.

On opening, every record is checked. A torn tail is cut off and reported; damage before the tail stops the recovery
with the place.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import trio
from blake3 import blake3

from . import wire
from .config import Durability, Recovery
from .errors import JournalError, SchemaError
from .events import Event

log = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview

MAGIC: Final = 0x53524C33
_HEAD: Final = struct.Struct("<IIQ16s32s")
# Arrow wants its buffers aligned, so that readers of a mapped segment need not copy.
ALIGNMENT: Final = 64
# A segment ends after so many events even when it is not full, so that recovery folds at most twice as many.
EVENTS_PER_SEGMENT: Final = 200_000
# A sealed segment with a smaller share of needed bytes is emptied by moving them.
SPARSE: Final = 0.25
SNAPSHOTS_KEPT: Final = 2

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


class Damaged(msgspec.Struct, frozen=True):
    """A record whose event is whole and whose payload is not."""

    event: Event
    record: int


class _Record(NamedTuple):
    event: Event
    start: int
    payload: int
    payload_bytes: int
    end: int
    whole: bool


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _digest(data: Buffer) -> bytes:
    """Of an event, whose damage is all that it must tell."""
    return blake3(data).digest(length=16)


def _parse(view: memoryview, start: int) -> _Record | None:
    """The record at `start`, when its head and its event are whole."""
    if start + _HEAD.size > len(view):
        return None
    magic, header_bytes, payload_bytes, header_digest, payload_digest = _HEAD.unpack_from(view, start)
    header = start + _HEAD.size
    payload = start + _padded(_HEAD.size + header_bytes)
    end = payload + payload_bytes
    if magic != MAGIC or end > len(view) or _digest(view[header : header + header_bytes]) != header_digest:
        return None
    whole = not payload_bytes or wire.payload_digest(view[payload:end]) == payload_digest
    event = _decode(view[header : header + header_bytes])
    return _Record(event, start, payload, payload_bytes, start + _padded(end - start), whole)


def _next_whole(view: memoryview, start: int) -> int | None:
    """Where the first whole record at or behind `start` lies."""
    mark = MAGIC.to_bytes(4, "little")
    for place in range(_padded(start), len(view) - _HEAD.size, ALIGNMENT):
        if view[place : place + 4] == mark and (record := _parse(view, place)) and record.whole:
            return place
    return None


class Segment:
    """One file of records, mapped whole. Behind what has been written it is a hole."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path = path
        self.number = int(path.stem)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        found = os.fstat(self._fd).st_size
        self.size = max(size, found)
        os.ftruncate(self._fd, self.size)
        self._map = mmap.mmap(self._fd, self.size)
        self.view = memoryview(self._map)
        self.end = 0
        self.events = 0
        # Whether `end` is known to be the end of what was written: only then may the hole be cut off.
        self.read = found == 0
        # Bytes of payloads that rows still need.
        self.needed = 0

    def __repr__(self) -> str:
        return f"<Segment {self.path.name} {self.end} bytes, {self.needed} needed>"

    def append(self, head: bytes, header: bytes, payload: Buffer) -> int:
        """Write one record; returns where it starts."""
        start = self.end
        lead = head + header
        lead += bytes(_padded(len(lead)) - len(lead))
        length = len(lead) + memoryview(payload).nbytes
        if (done := os.pwritev(self._fd, [lead, payload], start)) != length:
            raise JournalError(f"{self.path}: the disk took {done} of {length} bytes")
        self.end = start + _padded(length)
        self.events += 1
        return start

    def payload(self, start: int) -> memoryview:
        """The payload of the record at `start`."""
        payload, length, _ = self.place(start)
        return self.view[payload : payload + length]

    def place(self, start: int) -> tuple[int, int, bytes]:
        """Where the payload of the record at `start` lies, its length, and its digest."""
        _, header_bytes, payload_bytes, _, digest = _HEAD.unpack_from(self.view, start)
        return start + _padded(_HEAD.size + header_bytes), payload_bytes, digest

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def records(self, *, last: bool) -> Iterator[_Record]:
        """Check and yield every record, to the end of what was written whole.

        Only the `last` segment may end in a record that was being written; the others were cut when they were full.

        Raises:
            JournalError: an event is damaged, and whole records or segments follow.
        """
        while (record := _parse(self.view, self.end)) is not None:
            if last and not record.whole and _next_whole(self.view, record.end) is None:
                break
            self.end = record.end
            self.events += 1
            yield record
        self._discard_tail(self.end, last=last)
        self.read = True

    def seal(self) -> None:
        """Nothing more comes: what is behind the last record, a hole or a write that failed, is cut off."""
        os.ftruncate(self._fd, self.end)

    def _discard_tail(self, start: int, *, last: bool) -> None:
        trailing = bytes(self.view[start:]).rstrip(b"\0")
        if not trailing:
            return
        if not last or _next_whole(self.view, start + ALIGNMENT) is not None:
            raise JournalError(
                f"{self.path}: the event at byte {start} is damaged, and others follow; "
                "restore the file from a copy, or move the journal away and start the run anew"
            )
        log.warning("%s: discarded %d trailing bytes of an incomplete record", self.path, len(trailing))
        self.view[start : start + len(trailing)] = bytes(len(trailing))

    def close(self) -> None:
        """Unmap, and give back the hole behind the last record."""
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            # A reply on its way holds a slice; the map goes with it.
            log.debug("%s: closed while a slice is in use", self.path)
        if self.read and self.path.exists():
            os.ftruncate(self._fd, self.end)
        os.close(self._fd)


class Journal:
    """All segments of one directory. `append` is the only way in.

    Args:
        directory: where the files lie; made when it does not exist.
        durability: what `append` promises; `sync` is up to the caller.
        segment_bytes: size of a segment; a larger record gets one of its own.
        recovery: what a damaged payload before the tail does: `stop` raises, `skip` yields it as `Damaged`.
    """

    def __init__(
        self, directory: Path, *, durability: Durability, segment_bytes: int, recovery: Recovery = "stop"
    ) -> None:
        self.directory = directory
        self.durability = durability
        self._segment_bytes = segment_bytes
        self._recovery = recovery
        self._segments: dict[int, Segment] = {}
        self._snapshots: list[int] = []
        # Segments that hold something that is not synced.
        self._unsynced: set[int] = set()
        # What rows that have not left still need of the segments.
        self.needed_bytes = 0
        # What was appended since this journal was opened.
        self.appended_bytes = 0
        # Whether `sparse` and `delete_unneeded` may find something that they did not find before.
        self.untidy = True
        # Dumps the state when a segment is full and it is worth it; the store sets it.
        self.dump: Callable[[], bytes | None] | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise JournalError(f"cannot make the journal directory {directory}: {error.strerror}") from error
        # Held as long as the journal is open; it goes with the process, however that ends.
        self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise JournalError(f"{directory} belongs to another broker; it must end first") from None

    @property
    def size(self) -> int:
        """Bytes that the segments hold."""
        return sum(segment.end for segment in self._segments.values())

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return len(self._segments)

    def snapshot_time(self) -> float | None:
        """When the newest snapshot was written, in seconds since the epoch; None when there is none."""
        try:
            return self._snapshot_path(self._snapshots[-1]).stat().st_mtime if self._snapshots else None
        except FileNotFoundError:
            return None

    def snapshot(self) -> bytes | None:
        """The newest whole snapshot; `recover` goes on behind it. None when there is none."""
        for path in sorted(self.directory.glob("*.snapshot"), reverse=True):
            data = path.read_bytes()
            if blake3(data[32:]).digest() == data[:32]:
                self._snapshots = sorted(int(p.stem) for p in self.directory.glob("*.snapshot") if p <= path)
                return data[32:]
            log.warning("%s is damaged; going back to the one before it", path)
        return None

    def recover(self) -> Iterator[tuple[Event, int] | Damaged]:
        """Every event behind the snapshot, in order, with its record number. Call `snapshot` first.

        Raises:
            JournalError: a record before the tail is damaged; names the file and the byte.
        """
        first = self._snapshots[-1] if self._snapshots else 1
        paths = self._paths(first)
        for path in paths:
            segment = self._segments[int(path.stem)] = Segment(path)
            # Whether the process before this one has synced it is not known.
            self._unsynced.add(segment.number)
            for record in segment.records(last=path == paths[-1]):
                if segment.number < first:
                    continue
                number = segment.number << 32 | record.start
                if record.whole:
                    yield record.event, number
                    continue
                if self._recovery == "stop":
                    raise JournalError(
                        f"the columns in {self.name(number)} are damaged ({type(record.event).__name__} of rows "
                        f"{tuple(getattr(record.event, 'rows', ()))}); queue.recovery=skip gives those rows up"
                    )
                yield Damaged(record.event, number)
        if self._segments:
            self._reopen_last()

    def _paths(self, first: int) -> list[Path]:
        """The segments, of which none from `first` on may be missing.

        Raises:
            JournalError: naming the segments that are missing, or empty although others follow.
        """
        paths = sorted(self.directory.glob("*.segment"))
        if paths and paths[-1].stat().st_size == 0:
            # Its broker died as it made it.
            paths.pop().unlink()
        numbers = {int(path.stem) for path in paths if path.stat().st_size}
        newest = max((int(path.stem) for path in paths), default=0)
        if missing := [f"{number:08d}.segment" for number in range(first, newest + 1) if number not in numbers]:
            known = "the snapshot before it" if self._snapshots else "the beginning, for no snapshot is whole"
            raise JournalError(
                f"{self.directory}: {', '.join(missing[:8])} is missing or empty, and what happened since {known} "
                "cannot be known without; restore the file from a copy, or move the journal away and start the run anew"
            )
        return [path for path in paths if int(path.stem) in numbers]

    def _reopen_last(self) -> None:
        """Grow the last segment back to its full size, so that it can be appended to."""
        last = self._segments[max(self._segments)]
        end, events = last.end, last.events
        last.close()
        grown = self._segments[last.number] = Segment(last.path, self._segment_bytes)
        grown.end, grown.events, grown.read = end, events, True

    def append(self, event: Event, payload: Buffer = b"", digest: bytes = b"") -> int:
        """Write one event and its payload; returns the record's number. `sync` makes it survive power loss.

        The payload's digest is made here when it does not come along.

        Raises:
            JournalError: the disk is full or broken; nothing was recorded.
        """
        header = _encode(event)
        try:
            # What cannot be read again would end every later start.
            _decode(header)
        except msgspec.MsgspecError as error:
            raise SchemaError(f"{type(event).__name__}: {error}; nothing was recorded") from error
        payload_bytes = memoryview(payload).nbytes
        head = _HEAD.pack(MAGIC, len(header), payload_bytes, _digest(header), digest or wire.payload_digest(payload))
        try:
            segment = self._room(_padded(_HEAD.size + len(header)) + _padded(payload_bytes))
            start = segment.append(head, header, payload)
        except OSError as error:
            raise JournalError(f"cannot write to {self.directory}: {error.strerror}") from error
        self.appended_bytes += segment.end - start
        self._unsynced.add(segment.number)
        return segment.number << 32 | start

    def _room(self, length: int) -> Segment:
        last = self._segments[max(self._segments)] if self._segments else None
        if last is not None and last.end + length <= last.size and last.events < EVENTS_PER_SEGMENT:
            return last
        if last is not None and self.durability == "fsync":
            self.sync()
        if last is not None:
            last.seal()
        number = last.number + 1 if last is not None else 1
        if last is not None and self.dump is not None and (state := self.dump()) is not None:
            self._write_snapshot(number, state)
        path = self.directory / f"{number:08d}.segment"
        segment = self._segments[number] = Segment(path, max(self._segment_bytes, length))
        self.untidy = True
        return segment

    def _write_snapshot(self, number: int, state: bytes) -> None:
        path = self._snapshot_path(number)
        draft = path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(blake3(state).digest() + state)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
        self._snapshots.append(number)
        for old in self._snapshots[:-SNAPSHOTS_KEPT]:
            self._snapshot_path(old).unlink(missing_ok=True)
        self._snapshots = self._snapshots[-SNAPSHOTS_KEPT:]

    def _snapshot_path(self, number: int) -> Path:
        return self.directory / f"{number:08d}.snapshot"

    def sync(self) -> None:
        """Make everything appended so far survive power loss. Blocks for milliseconds."""
        for number in sorted(self._unsynced):
            self._segments[number].sync()
            self._unsynced.discard(number)

    async def settle(self) -> None:
        """`sync`, while the event loop goes on."""
        await trio.to_thread.run_sync(self.sync)

    def payload(self, record: int) -> memoryview:
        """The payload of a record, as a slice of the mapped segment."""
        return self._segments[record >> 32].payload(record & 0xFFFFFFFF)

    def is_whole(self, record: int) -> bool:
        """Whether the record's payload is what its writer wrote."""
        return wire.payload_digest(self.payload(record)) == self.place(record)[2]

    def name(self, record: int) -> str:
        """File and byte of a record, for people."""
        return f"{self._segments[record >> 32].path}, byte {record & 0xFFFFFFFF}"

    def place(self, record: int) -> tuple[int, int, bytes]:
        """Where a record's payload lies in its segment, its length in bytes, and its digest."""
        return self._segments[record >> 32].place(record & 0xFFFFFFFF)

    # -- what rows need

    def need(self, record: int) -> None:
        """Some row needs the record's payload.

        Raises:
            JournalError: the segment is gone.
        """
        segment = self._segments.get(record >> 32)
        if segment is None:
            raise JournalError(
                f"{self.directory}: {record >> 32:08d}.segment is missing or empty, and rows have columns in it; "
                "restore the file from a copy, or move the journal away and start the run anew"
            )
        _, size, _ = segment.place(record & 0xFFFFFFFF)
        segment.needed += size
        self.needed_bytes += size

    def free(self, record: int) -> None:
        """No row needs the record's payload any more."""
        segment = self._segments[record >> 32]
        _, size, _ = segment.place(record & 0xFFFFFFFF)
        segment.needed -= size
        self.needed_bytes -= size
        self.untidy |= segment.needed < SPARSE * segment.end

    def sparse(self) -> int | None:
        """A sealed segment that holds little that is needed; its payloads should be appended again."""
        for number in sorted(self._segments)[:-1]:
            segment = self._segments[number]
            if 0 < segment.needed < SPARSE * segment.end:
                return number
        return None

    def delete_unneeded(self) -> list[int]:
        """Delete sealed segments that no snapshot and no row needs; their events go to the ledger."""
        if len(self._snapshots) < SNAPSHOTS_KEPT:
            return []
        gone = [n for n, segment in self._segments.items() if n < self._snapshots[0] and segment.needed == 0]
        for number in gone:
            segment = self._segments.pop(number)
            self._unsynced.discard(number)
            self._to_ledger(segment)
            segment.path.unlink()
            segment.close()
        return gone

    def _to_ledger(self, segment: Segment) -> None:
        path = segment.path.with_suffix(".ledger")
        draft = path.with_suffix(".draft")
        with draft.open("wb") as file:
            start = 0
            while start < segment.end:
                _, header_bytes, payload_bytes, _, _ = _HEAD.unpack_from(segment.view, start)
                header = start + _HEAD.size
                file.write(header_bytes.to_bytes(4, "little"))
                file.write(segment.view[header : header + header_bytes])
                start += _padded(_HEAD.size + header_bytes) + _padded(payload_bytes)
        draft.rename(path)

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
