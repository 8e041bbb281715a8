"""Reading a journal that may be damaged, and that its broker may be writing to at this moment.

`Journal.recover` stops at damage, because a queue must not go on from half a state. A person who asks what happened
wants everything that can be read and a list of what cannot: `scan` gives both, in the order of the journal, and
changes no file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
from blake3 import blake3

from .errors import JournalError
from .events import Event
from .journal import ALIGNMENT, MAGIC, _decode, _next_whole, _parse, _Record

# What is damaged: the columns of an event, an event, everything behind the last whole record, or a state.
Kind = Literal["columns", "event", "tail", "snapshot"]

HOLE_BYTES: Final = 1 << 20


class Entry(NamedTuple):
    """One event of a journal on disk. `payload` is None when only the ledger remembers it, or when it is damaged."""

    event: Event
    record: int
    payload: memoryview | None


class Damage(NamedTuple):
    """Bytes of one file that are not what was written. `event` is known when only its columns are damaged."""

    path: Path
    start: int
    length: int
    kind: Kind
    event: Event | None = None
    record: int = 0

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows that lose something, as far as they can be known."""
        return tuple(getattr(self.event, "rows", ()))

    def __str__(self) -> str:
        where = f"{self.path}, byte {self.start}"
        match self.kind:
            case "columns":
                return f"{where}: the columns of {type(self.event).__name__} are damaged; {_names(self.rows)}"
            case "event":
                return f"{where}: an event is damaged ({self.length} bytes); its rows cannot be known"
            case "tail":
                return f"{where}: {self.length} bytes of a record that was not finished; a broker that starts cuts it"
            case "snapshot":
                return f"{where}: the state is damaged; a broker goes back to the one before it"


def _names(rows: tuple[int, ...], most: int = 12) -> str:
    shown = ", ".join(str(row) for row in rows[:most])
    return f"rows {shown}{f' and {len(rows) - most} more' if len(rows) > most else ''}" if rows else "no rows"


class File(NamedTuple):
    """One segment, or the ledger that is left of it."""

    number: int
    path: Path
    data: memoryview

    @property
    def is_ledger(self) -> bool:
        return self.path.suffix == ".ledger"


def numbers(directory: Path) -> set[int]:
    """The segments of which something is left: the file, or its ledger."""
    return {int(path.stem) for suffix in ("segment", "ledger") for path in directory.glob(f"*.{suffix}")}


def exists(directory: Path) -> bool:
    """Whether a journal lies there."""
    return bool(numbers(directory))


def files(directory: Path) -> Iterator[File]:
    """The files of a journal in order, each number once.

    A running broker makes a ledger of a segment while we read: segments are listed first and looked for first, so
    that one of the two is always found, and never both.

    Raises:
        JournalError: there is no journal in `directory`.
    """
    found = numbers(directory)
    if not found:
        raise JournalError(f"no journal in {directory}")
    for number in sorted(found):
        yield _open(directory, number)


def _open(directory: Path, number: int) -> File:
    for suffix in ("segment", "ledger"):
        path = directory / f"{number:08d}.{suffix}"
        try:
            return File(number, path, memoryview(_read(path)))
        except FileNotFoundError:
            continue
    raise JournalError(f"{directory}: segment {number} was there and is gone, without a ledger")


def _read(path: Path) -> bytes:
    """The bytes of a file, without the hole that its broker keeps behind the last record."""
    with path.open("rb") as file:
        return file.read(_last_data(file.fileno()))


def _last_data(fd: int) -> int:
    size, end = os.fstat(fd).st_size, 0
    try:
        while end < size:
            end = os.lseek(fd, os.lseek(fd, end, os.SEEK_DATA), os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:
            end = size
    os.lseek(fd, 0, os.SEEK_SET)
    # A short hole may be the zeros at the end of a payload, which some file systems do not store.
    return end if size - end >= HOLE_BYTES else size


def scan(directory: Path) -> Iterator[Entry | Damage]:
    """Every event that can be read, and every damage, in order.

    Raises:
        JournalError: there is no journal in `directory`.
    """
    for file in files(directory):
        yield from _ledger(file) if file.is_ledger else _segment(file)


def events(directory: Path) -> Iterator[Entry]:
    """Every event that can be read; one whose columns are damaged comes without them."""
    for found in scan(directory):
        if isinstance(found, Entry):
            yield found
        elif found.event is not None:
            yield Entry(found.event, found.record, None)


def _segment(file: File) -> Iterator[Entry | Damage]:
    data, start = file.data, 0
    written = len(bytes(data).rstrip(b"\0"))
    while start < written:
        number = file.number << 32 | start
        record = _record(file, start)
        if record is not None and record.whole:
            yield Entry(record.event, number, data[record.payload : record.payload + record.payload_bytes])
            start = record.end
            continue
        follows = _next_whole(data, start + ALIGNMENT)
        if follows is None:
            _refuse_foreign(file, start)
            yield Damage(file.path, start, written - start, "tail")
            return
        if record is not None:
            yield Damage(file.path, start, record.end - start, "columns", record.event, number)
            start = record.end
        else:
            yield Damage(file.path, start, follows - start, "event")
            start = follows


def _record(file: File, start: int) -> _Record | None:
    try:
        return _parse(file.data, start)
    except msgspec.MsgspecError as error:
        raise JournalError(f"{file.path}, byte {start}: written by another release of streamrl: {error}") from error


def _refuse_foreign(file: File, start: int) -> None:
    """Nothing whole in a whole file, and no mark of ours at its head: that is no damage but another format."""
    head = bytes(file.data[:4])
    if start == 0 and head not in (bytes(4), MAGIC.to_bytes(4, "little")):
        raise JournalError(f"{file.path}: no journal, or one of another release: it begins with {head.hex()}")


def _ledger(file: File) -> Iterator[Entry | Damage]:
    data, start = file.data, 0
    while start < len(data):
        length = int.from_bytes(data[start : start + 4], "little")
        try:
            event = _decode(data[start + 4 : start + 4 + length])
        except msgspec.MsgspecError:
            # Entries carry no mark: behind a damaged one nothing can be found again.
            yield Damage(file.path, start, len(data) - start, "event")
            return
        yield Entry(event, file.number << 32 | start, None)
        start += 4 + length


def snapshots(directory: Path) -> Iterator[tuple[int, bytes] | Damage]:
    """The states that lie beside the segments, by the number of the segment that follows each."""
    for path in sorted(directory.glob("*.snapshot")):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            # The broker keeps only the newest.
            continue
        whole = blake3(data[32:]).digest() == data[:32]
        yield (int(path.stem), data[32:]) if whole else Damage(path, 0, len(data), "snapshot")


def stored_bytes(directory: Path) -> int:
    """Bytes on disk; the hole behind a segment's last record takes none."""
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir() if path.is_file())
