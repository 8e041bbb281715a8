"""The journal: everything that happened to rows, and their columns, in append-only segments.

    record   magic (4) · header bytes (4) · payload bytes (8) · digest (32) · header · payload · padding to 64

The header is one event as msgpack; the payload is the Arrow stream that came with it, or nothing. A record is
written whole before it is acknowledged. On opening, every record is checked; a torn tail is cut off and reported,
damage before the tail stops the recovery with the place. Reads are slices of the mapped segment.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from .config import Durability
from .errors import JournalError
from .events import Event

log = logging.getLogger(__name__)

MAGIC: Final = 0x53524C31
_HEAD: Final = struct.Struct("<IIQ32s")
# Arrow wants its buffers aligned, so that readers of a mapped segment need not copy.
ALIGNMENT: Final = 64
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


class Segment:
    """One file of records, mapped whole. Its size on disk is what has been written: the rest is a hole."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.size = max(size, os.fstat(self._fd).st_size)
        os.ftruncate(self._fd, self.size)
        self._map = mmap.mmap(self._fd, self.size)
        self.view = memoryview(self._map)
        self.end = 0

    def append(self, head: bytes, header: bytes, payload: bytes | bytearray | memoryview) -> int:
        """Write one record; returns where its payload starts."""
        start = self.end
        lead = head + header
        lead += bytes(_padded(len(lead)) - len(lead))
        done = os.pwritev(self._fd, [lead, payload], start)
        if done != len(lead) + memoryview(payload).nbytes:
            raise JournalError(f"{self.path}: wrote {done} of {len(lead) + memoryview(payload).nbytes} bytes")
        self.end = start + _padded(done)
        return start + len(lead)

    def fits(self, length: int) -> bool:
        return self.end + length <= self.size

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def records(self) -> Iterator[tuple[Event, int, int]]:
        """Check and yield every record: its event, and where its payload starts and how long it is.

        Raises:
            JournalError: a damaged record with intact ones behind it.
        """
        while (found := self._read(self.end)) is not None:
            event, payload, length, end = found
            self.end = end
            yield event, payload, length

    def _read(self, start: int) -> tuple[Event, int, int, int] | None:
        """The record at `start`; None at the end of what was written whole."""
        if start + _HEAD.size > self.size:
            return None
        magic, header_bytes, payload_bytes, digest = _HEAD.unpack_from(self.view, start)
        if magic == 0 and header_bytes == 0:
            return None
        header = start + _HEAD.size
        payload = start + _padded(_HEAD.size + header_bytes)
        end = payload + payload_bytes
        whole = magic == MAGIC and end <= self.size
        if (
            whole
            and blake3(self.view[header : header + header_bytes]).update(self.view[payload:end]).digest() == digest
        ):
            return (
                _decode(self.view[header : header + header_bytes]),
                payload,
                payload_bytes,
                start + _padded(end - start),
            )
        self._discard_tail(start)
        return None

    def _discard_tail(self, start: int) -> None:
        """The record at `start` is not whole. That is a torn tail unless an intact record follows."""
        for other in range(start + ALIGNMENT, self.size - _HEAD.size, ALIGNMENT):
            magic, header_bytes, payload_bytes, _ = _HEAD.unpack_from(self.view, other)
            if magic == MAGIC and other + _HEAD.size + header_bytes + payload_bytes <= self.size:
                raise JournalError(
                    f"{self.path} is damaged at byte {start}, and whole records follow; "
                    "restore the file from a copy, or move the journal away and start the run anew"
                )
        trailing = bytes(self.view[start:]).rstrip(b"\0")
        log.warning("%s: discarded %d trailing bytes of an incomplete record", self.path, len(trailing))
        self.view[start : start + len(trailing)] = bytes(len(trailing))

    def close(self) -> None:
        """Unmap, and give back the hole behind the last record."""
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            # A reply that is still on its way holds a slice; the map goes with it.
            log.debug("%s: closed while a slice is in use", self.path)
        os.ftruncate(self._fd, self.end)
        os.close(self._fd)


class Journal:
    """All segments of one directory. `append` is the only way in."""

    def __init__(self, directory: Path, *, durability: Durability, segment_bytes: int) -> None:
        """Open or create. Iterate `recover()` once before appending.

        Raises:
            JournalError: the directory cannot be written.
        """
        self.directory = directory
        self.durability = durability
        self._segment_bytes = segment_bytes
        self._segments: dict[int, Segment] = {}
        # Record number → segment, payload start, payload bytes.
        self._places: dict[int, tuple[int, int, int]] = {}
        self._next_record = 1
        self.bytes = 0
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise JournalError(f"cannot make the journal directory {directory}: {error.strerror}") from error

    def recover(self) -> Iterator[tuple[Event, int]]:
        """Every event in order, with its record number."""
        for path in sorted(self.directory.glob("*.segment")):
            segment = Segment(path, 0) if path.stat().st_size else None
            if segment is None:
                path.unlink()
                continue
            number = int(path.stem)
            self._segments[number] = segment
            for event, start, length in segment.records():
                yield event, self._note(number, start, length)
            self.bytes += segment.end
        if self._segments:
            last = max(self._segments)
            # Grow the last segment back to its full size, so that it can be appended to.
            path, end = self._segments[last].path, self._segments[last].end
            self._segments[last].close()
            self._segments[last] = Segment(path, self._segment_bytes)
            self._segments[last].end = end

    def _note(self, segment: int, start: int, length: int) -> int:
        record = self._next_record
        self._next_record += 1
        if length:
            self._places[record] = (segment, start, length)
        return record

    def append(self, event: Event, payload: bytes | bytearray | memoryview = b"") -> int:
        """Write one event and its payload; returns the record's number. `sync` makes it survive power loss.

        Raises:
            JournalError: the disk is full or broken; nothing was recorded.
        """
        header = _encode(event)
        payload_bytes = memoryview(payload).nbytes
        head = _HEAD.pack(MAGIC, len(header), payload_bytes, blake3(header).update(payload).digest())
        length = _padded(_HEAD.size + len(header)) + _padded(payload_bytes)
        number, segment = self._room(length)
        try:
            start = segment.append(head, header, payload)
        except OSError as error:
            raise JournalError(f"cannot write to {segment.path}: {error.strerror}") from error
        self.bytes += length
        return self._note(number, start, payload_bytes)

    def _room(self, length: int) -> tuple[int, Segment]:
        number = max(self._segments, default=0)
        if number and self._segments[number].fits(length):
            return number, self._segments[number]
        if number and self.durability == "fsync":
            self._segments[number].sync()
        path = self.directory / f"{number + 1:08d}.segment"
        self._segments[number + 1] = Segment(path, max(self._segment_bytes, length))
        return number + 1, self._segments[number + 1]

    def sync(self) -> None:
        """Make everything appended so far survive power loss. Blocks for milliseconds."""
        if self._segments:
            self._segments[max(self._segments)].sync()

    def payload(self, record: int) -> memoryview:
        """The payload of a record, as a slice of the mapped segment."""
        segment, start, length = self._places[record]
        return self._segments[segment].view[start : start + length]

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()


def read(directory: Path) -> Iterator[tuple[Event, memoryview]]:
    """Every event of a journal and a copy of its payload, for inspection; the broker may be running.

    Raises:
        JournalError: there is no journal, or it is damaged.
    """
    paths = sorted(directory.glob("*.segment"))
    if not paths:
        raise JournalError(f"no journal in {directory}")
    for path in paths:
        data = memoryview(path.read_bytes())
        start = 0
        while start + _HEAD.size <= len(data):
            magic, header_bytes, payload_bytes, digest = _HEAD.unpack_from(data, start)
            header = start + _HEAD.size
            payload = start + _padded(_HEAD.size + header_bytes)
            end = payload + payload_bytes
            if magic != MAGIC or end > len(data):
                break
            if blake3(data[header : header + header_bytes]).update(data[payload:end]).digest() != digest:
                break
            yield _decode(data[header : header + header_bytes]), data[payload:end]
            start += _padded(end - start)
