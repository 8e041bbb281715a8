"""The whole state of the queue as bytes, and back.

Only what cannot be derived is written. Readiness follows from the columns a row has, so a flow that gained a stage
since the snapshot was written makes its rows ready for it.
"""

from __future__ import annotations

import heapq

import msgspec

from .config import Flow
from .errors import ConfigError
from .events import Granted
from .rows import Rows
from .state import Group, Lease, Place, Row, Version


class RowState(msgspec.Struct, frozen=True, array_like=True):
    """One row; the names are those of `state.Row`."""

    id: int
    group: int
    member: int
    env: str
    split: str
    priority: int
    born: int
    step: int | None
    tokens: int
    places: dict[str, tuple[int, int]]
    writers: dict[str, int]
    attempts: dict[str, int]


class State(msgspec.Struct, frozen=True):
    """All that recovery cannot derive; the names are those of `table.Table`."""

    stages: tuple[str, ...]
    rows: tuple[RowState, ...]
    groups: dict[int, tuple[str, bool]]
    leases: tuple[Granted, ...]
    keys: dict[str, int]
    past_keys: dict[str, int]
    sources: dict[str, int]
    versions: dict[int, Version]
    version: int
    step: int
    next_row: int
    next_group: int
    next_lease: int
    admitted: int
    lost: int
    trained_through: dict[int, int]
    step_rows: dict[int, tuple[int, ...]]
    retired: dict[str, int]
    ended: tuple[tuple[str, str, int], ...]
    reasons: tuple[tuple[str, str, int], ...]
    written: dict[str, int]


ENDS = ("done", "dropped", "dead")


def dump(rows: Rows) -> bytes:
    """The state as bytes."""
    groups = {row.group.id: row.group for row in rows.rows.values()}
    state = State(
        stages=tuple(rows.stages),
        rows=tuple(_row_state(row) for row in rows.rows.values()),
        groups={group.id: (group.key, group.admitted) for group in groups.values()},
        leases=tuple(
            Granted(0.0, x.id, x.stage, x.session, tuple(sorted(x.rows)), (), x.step, 0, x.request)
            for x in rows.leases.values()
        ),
        keys=rows.keys,
        past_keys=dict(rows.past_keys),
        sources=rows.sources,
        versions=rows.versions,
        version=rows.version,
        step=rows.step,
        next_row=rows._next_row,
        next_group=rows._next_group,
        next_lease=rows._next_lease,
        admitted=rows._admitted,
        lost=rows._lost,
        trained_through=rows._trained_through,
        step_rows=rows._step_rows,
        retired=dict(rows.retired),
        ended=tuple((split, how, n) for (split, how), n in rows._states.items() if how in ENDS),
        reasons=tuple((how, reason, n) for (how, reason), n in rows._ends.items()),
        written={name: counts["written"] for name, counts in rows._stage_counts.items()},
    )
    return msgspec.msgpack.encode(state)


def load(flow: Flow, data: bytes, *, now: float) -> Rows:
    """The state that `dump` wrote, under `flow`; leases get their full time anew.

    Raises:
        ConfigError: the flow lacks a stage that the state has.
    """
    state = msgspec.msgpack.decode(data, type=State)
    rows = Rows(flow)
    if lost := [name for name in state.stages if name not in rows.stages]:
        raise ConfigError(f"stages: the journal has rows of stage {', '.join(lost)}, which this flow lacks")
    rows.keys, rows.sources, rows.versions = state.keys, state.sources, state.versions
    rows.past_keys.update(state.past_keys)
    rows.version, rows.step = state.version, state.step
    rows._next_row, rows._next_group, rows._next_lease = state.next_row, state.next_group, state.next_lease
    rows._admitted, rows._lost = state.admitted, state.lost
    rows._trained_through, rows._step_rows = state.trained_through, state.step_rows
    for split, n in state.retired.items():
        rows.retired[split] = n
        rows._states[split, "trained"] += n
    for split, how, n in state.ended:
        rows._states[split, how] += n
    for how, reason, n in state.reasons:
        rows._ends[how, reason] += n
    for name, n in state.written.items():
        rows._stage_counts[name]["written"] = n
    _load_rows(rows, state)
    _load_leases(rows, state, now)
    for row in list(rows.rows.values()):
        rows._make_ready(row)
    return rows


def _row_state(row: Row) -> RowState:
    return RowState(
        row.id,
        row.group.id,
        row.member,
        row.env,
        row.split,
        row.priority,
        row.born,
        row.step,
        row.tokens,
        {stage: (place.record, place.line) for stage, place in row.places.items()},
        row.writers,
        row.attempts,
    )


def _load_rows(rows: Rows, state: State) -> None:
    groups = {id: Group(id, key) for id, (key, _) in state.groups.items()}
    for known in state.rows:
        group = groups[known.group]
        row = Row(known.id, group, known.member, known.env, known.split, known.priority, Place(0, 0))
        row.born, row.step, row.tokens = known.born, known.step, known.tokens
        row.places = {stage: Place(*place) for stage, place in known.places.items()}
        row.writers, row.attempts = known.writers, known.attempts
        group.admitted = state.groups[known.group][1]
        group.members.append(row)
        rows.rows[row.id] = row
        for place in row.places.values():
            rows.references[place.record] += 1
    for row in rows.rows.values():
        if row.step is None:
            rows._enter_way(row)
        rows._count(row)
    for group in groups.values():
        rows._note_gap(group)


def _load_leases(rows: Rows, state: State, now: float) -> None:
    for granted in state.leases:
        seconds = rows.stages[granted.stage].seconds
        lease = Lease(granted, now + seconds if seconds is not None else float("inf"))
        rows.leases[lease.id] = lease
        rows._session_leases[lease.session].add(lease.id)
        if seconds is not None:
            heapq.heappush(rows._deadlines, (lease.deadline, lease.id))
        for row in [rows.rows[id] for id in granted.rows]:
            row.leases[lease.stage] = lease.id
            rows._stage_counts[lease.stage]["leased"] += 1
            if rows.stages[lease.stage].trains:
                rows._leave_way(row)
                if (lease.step or 0) > rows.step:
                    rows._handed[lease.step or 0] += 1
            rows._recount(row)
