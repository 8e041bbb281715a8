"""Columns read in place: a client on the broker's host maps the journal's segments and looks at them itself.

The broker then sends descriptors alone. A reader checks the digest of every record before it touches what lies in
it; a segment that was mapped is never written over, only unlinked, so what a reader holds stays valid.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from pathlib import Path
from typing import Final

import pyarrow as pa

from . import wire
from .batches import Mapped, decode, select
from .errors import JournalError
from .recent import remember

# Records whose digest was checked lately; a record is often read in parts.
RECORDS_KEPT: Final = 64
# Segments mapped at once. What is in use stays mapped as long as it is.
SEGMENTS_KEPT: Final = 16


def host() -> str:
    """What tells this host from others, until it starts anew."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class MappedJournal:
    """The segments of one journal, read in place."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._segments: OrderedDict[int, memoryview] = OrderedDict()
        self._records: OrderedDict[tuple[int, bytes], pa.RecordBatch] = OrderedDict()

    def read(self, part: Mapped) -> pa.RecordBatch:
        """The lines and columns that `part` describes; not copied when the lines are consecutive.

        Raises:
            JournalError: the segment cannot be read from here, or it is not what the broker means.
        """
        return select(self._record(part), part.lines, part.columns)

    def _record(self, part: Mapped) -> pa.RecordBatch:
        key = part.record, part.digest
        if (known := self._records.get(key)) is not None:
            self._records.move_to_end(key)
            return known
        data = self._segment(part.record >> 32, part.start + part.length)[part.start : part.start + part.length]
        if wire.payload_digest(data) != part.digest:
            raise JournalError(f"record {part.record} in {self._directory} is not what the broker means")
        batch = decode(data, f"columns of {part.stage or 'the task'}")
        remember(self._records, key, batch, RECORDS_KEPT)
        return batch

    def _segment(self, number: int, end: int) -> memoryview:
        view = self._segments.get(number)
        if view is None or len(view) < end:
            view = _map(self._directory / f"{number:08d}.segment")
            remember(self._segments, number, view, SEGMENTS_KEPT)
        return view


def _map(path: Path) -> memoryview:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise JournalError(f"cannot map {path}: {error}") from error
