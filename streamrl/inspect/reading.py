"""From a journal on disk to lives: the files, and the columns in their payloads."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from streamrl_queue import audit
from streamrl_queue.audit import Entry
from streamrl_queue.batches import decode
from streamrl_queue.config import Flow
from streamrl_queue.errors import SchemaError, UnknownName
from streamrl_queue.events import Moved, Put
from streamrl_queue.state import TASK

from .lives import Columns, Lives
from .target import Target, find

# Columns of one small value each, cheap to keep for every row.
SMALL_COLUMNS: Final = (
    "task",
    "source",
    "index",
    "epoch",
    "seed",
    "turns",
    "status",
    "outcome",
    "error",
    "reward",
    "reward_parts",
    "advantage",
)


def as_target(run: Target | str | os.PathLike[str]) -> Target:
    """The run of that name, or in that directory; a journal's directory will do."""
    return run if isinstance(run, Target) else find(os.fspath(run))


def read_lives(run: Target | str | os.PathLike[str], *, row: int | None = None) -> Lives:
    """Every row's life, or those of the group of `row`, with all of their columns.

    Raises:
        ConfigError: there is no such run.
        JournalError: there is no journal, or one of another release.
        UnknownName: no event of the journal made `row`.
    """
    target = as_target(run)
    lives = fold(target.require_journal("inspection"), target.flow(), row=row)
    if row is not None and row not in lives.rows:
        raise UnknownName(f"row {row}: the journal has rows 1 to {lives.tasks}")
    return lives


def fold(
    journal: Path, flow: Flow | None, *, row: int | None = None, columns: Collection[str] = SMALL_COLUMNS
) -> Lives:
    """The lives in a journal under `flow`, with `columns` of every row or all of the group of `row`."""
    lives = Lives(flow, only=row)
    for entry in audit.events(journal):
        wanted = columns if row is None else None if _concerns(lives, entry, row) else ()
        lives.apply(entry.event, record=entry.record, columns=columns_of(entry, wanted))
    return lives


def _concerns(lives: Lives, entry: Entry, row: int) -> bool:
    if isinstance(entry.event, Put):
        return row in entry.event.rows
    return not lives.rows.keys().isdisjoint(getattr(entry.event, "rows", ()))


def columns_of(entry: Entry, wanted: Collection[str] | None) -> Columns:
    """Values of the payload by column; `wanted` None: of all columns. Nothing when only the ledger has the event."""
    if not entry.payload or wanted == ():
        return {}
    batch = _batch(entry)
    names = [name for name in batch.schema.names if wanted is None or name in wanted]
    return {name: values(batch.column(name)) for name in names}


def values(column: pa.Array) -> list[Any]:
    """One Python value per line; maps as dictionaries."""
    found: list[Any] = column.to_pylist()
    if pa.types.is_map(column.type):
        return [None if value is None else dict(value) for value in found]
    return found


def _batch(entry: Entry) -> pa.RecordBatch:
    assert entry.payload is not None
    try:
        return decode(entry.payload, f"{type(entry.event).__name__} in record {entry.record:#x}")
    except SchemaError as error:
        raise SchemaError(f"{error}; `streamrl queue verify` checks the whole journal") from error


def task_lines(journal: Path, rows: Collection[int]) -> dict[int, pa.RecordBatch]:
    """The task columns that rows were born with, one line each; rows that only the ledger knows are left out."""
    lines: dict[int, int] = {}
    found: dict[int, pa.RecordBatch] = {}
    for entry in audit.events(journal):
        event = entry.event
        if isinstance(event, Put):
            mine = [row for row in rows if row in event.rows]
            lines |= {row: event.line(row - event.first_row) for row in mine}
        elif isinstance(event, Moved) and event.stage == TASK:
            mine = [row for row in rows if row in event.rows]
        else:
            continue
        if mine and entry.payload:
            batch = _batch(entry)
            found |= {row: batch.slice(lines[row], 1) for row in mine}
    return found
