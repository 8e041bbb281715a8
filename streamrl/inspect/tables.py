"""Lives as Arrow tables. Times are UTC; what is not known is null."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from .lives import Life, Lives, Moment, StepLife, VersionLife
from .reading import read_lives
from .target import Target

Run = Target | str | os.PathLike[str]

_TIME: Final = pa.timestamp("us")

ROWS: Final = pa.schema(
    [
        ("row", pa.int64()),
        # Not `group` and below not `at`: those are words of SQL.
        ("group_id", pa.int64()),
        ("member", pa.int32()),
        ("split", pa.string()),
        ("key", pa.string()),
        ("env", pa.string()),
        ("task", pa.string()),
        ("source", pa.string()),
        ("index", pa.int64()),
        ("epoch", pa.int32()),
        ("seed", pa.int64()),
        ("state", pa.string()),
        ("reason", pa.string()),
        ("step", pa.int64()),
        ("lag", pa.int64()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("advantage", pa.float64()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("outcome", pa.float64()),
        ("tokens", pa.int64()),
        ("turns", pa.int32()),
        ("attempts", pa.int32()),
        ("oldest_version", pa.int64()),
        ("born", _TIME),
        ("rollout_started", _TIME),
        ("written", _TIME),
        ("scored", _TIME),
        ("trained", _TIME),
        ("ended", _TIME),
        ("retired", pa.bool_()),
    ]
)

EVENTS: Final = pa.schema(
    [
        ("happened", _TIME),
        ("row", pa.int64()),
        ("event", pa.string()),
        ("stage", pa.string()),
        ("lease", pa.int64()),
        ("session", pa.string()),
        ("attempt", pa.int32()),
        ("version", pa.int64()),
        ("step", pa.int64()),
        ("cause", pa.string()),
        ("reason", pa.string()),
        ("tokens", pa.int64()),
        ("oldest_version", pa.int64()),
        ("segment", pa.int32()),
        ("byte", pa.int64()),
    ]
)

VERSIONS: Final = pa.schema(
    [
        ("version", pa.int64()),
        ("step", pa.int64()),
        ("parent", pa.int64()),
        ("begun", _TIME),
        ("committed", _TIME),
        ("digest", pa.string()),
    ]
)

STEPS: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("committed", _TIME),
        ("rows", pa.int64()),
        ("version", pa.int64()),
        ("retired", _TIME),
        ("given_back", _TIME),
    ]
)


def read_rows(run: Run) -> pa.Table:
    """One line per row that was ever put, with the columns of `ROWS`.

    `run` is the name or directory of a run, or the directory of a journal. `lag` is in steps, `reward`, `advantage`,
    `status` and `turns` are null once the row's columns have left the journal, and so is `task`.

    Raises:
        ConfigError: there is no such run.
        JournalError: there is no journal.
    """
    return rows_table(read_lives(run))


def read_events(run: Run) -> pa.Table:
    """One line per event and row, in the order of the journal, with the columns of `EVENTS`."""
    return events_table(read_lives(run))


def read_versions(run: Run) -> pa.Table:
    """One line per policy version that was begun, with the columns of `VERSIONS`; `committed` is null for some."""
    return versions_table(read_lives(run))


def read_steps(run: Run) -> pa.Table:
    """One line per training step, with the columns of `STEPS`; `given_back` is set for those that a resume undid."""
    return steps_table(read_lives(run))


def read_tables(run: Run) -> dict[str, pa.Table]:
    """All four tables, by name, in one reading of the journal."""
    return tables(read_lives(run))


def tables(lives: Lives) -> dict[str, pa.Table]:
    """The tables `rows`, `events`, `versions` and `steps`."""
    return {
        "rows": rows_table(lives),
        "events": events_table(lives),
        "versions": versions_table(lives),
        "steps": steps_table(lives),
    }


def rows_table(lives: Lives) -> pa.Table:
    return _table(ROWS, (_row(lives, life) for life in lives.rows.values()))


def events_table(lives: Lives) -> pa.Table:
    pairs = [(life.row, moment) for life in lives.rows.values() for moment in life.moments]
    # Moments of one row are in order already; sorting is stable.
    pairs.sort(key=lambda pair: pair[1].record or 0)
    return _table(EVENTS, (_event(row, moment) for row, moment in pairs))


def versions_table(lives: Lives) -> pa.Table:
    return _table(VERSIONS, (_version(version) for version in lives.versions.values()))


def steps_table(lives: Lives) -> pa.Table:
    return _table(STEPS, (_step(step) for step in lives.steps))


def _table(schema: pa.Schema, lines: Iterable[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(lines), schema=schema)


def utc(at: float | None) -> datetime | None:
    """Seconds since the epoch as a UTC time without a zone, which is what DuckDB counts with."""
    return None if at is None else datetime.fromtimestamp(at, UTC).replace(tzinfo=None)


def _at(moment: Moment | None) -> datetime | None:
    return None if moment is None else utc(moment.at)


def _row(lives: Lives, life: Life) -> dict[str, Any]:
    columns = life.columns
    state = lives.state(life)
    task, parts, advantage = columns.get("task"), columns.get("reward_parts"), columns.get("advantage")
    first = lives.first_stage
    return {
        "row": life.row,
        "group_id": life.group,
        "member": life.member,
        "split": life.split,
        "key": life.key,
        "env": life.env,
        "task": task.decode(errors="replace") if isinstance(task, bytes) else task,
        **{name: columns.get(name) for name in ("source", "index", "epoch", "seed")},
        "state": state,
        "reason": life.reason,
        "step": life.step,
        "lag": life.lag,
        **{name: columns.get(name) for name in ("reward", "status", "error", "outcome", "turns")},
        "reward_parts": list(parts.items()) if parts is not None else None,
        # A list is one advantage per token.
        "advantage": advantage if isinstance(advantage, float) else None,
        "tokens": life.tokens,
        "attempts": sum(1 for m in life.moments if m.event == "granted" and m.stage == first),
        "oldest_version": life.oldest_version,
        "born": utc(life.born),
        "rollout_started": _at(life.last("granted", first)),
        "written": _at(life.last("written", first)),
        "scored": _at(life.last("written", "reward")),
        "trained": _at(life.last("trained")) if life.end == "trained" else None,
        "ended": _at(life.last(state)) if life.end is not None else None,
        "retired": life.retired,
    }


def _event(row: int, moment: Moment) -> dict[str, Any]:
    named = {name: getattr(moment, name, None) for name in EVENTS.names}
    segment, byte = divmod(moment.record, 1 << 32) if moment.record is not None else (None, None)
    return named | {"row": row, "happened": utc(moment.at), "segment": segment, "byte": byte}


def _version(version: VersionLife) -> dict[str, Any]:
    named = {name: getattr(version, name) for name in VERSIONS.names}
    return named | {"begun": utc(version.begun), "committed": utc(version.committed)}


def _step(step: StepLife) -> dict[str, Any]:
    return {
        "step": step.step,
        "committed": utc(step.at),
        "rows": len(step.rows),
        "version": step.version,
        "retired": utc(step.retired),
        "given_back": utc(step.given_back),
    }
