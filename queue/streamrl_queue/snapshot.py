"""The whole state of the queue as bytes, and back.

Only what cannot be derived is written. Readiness follows from the columns a row has; of the order in which rows became
ready, what some stage hands out by.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .config import Flow
from .errors import JournalError
from .events import Granted
from .rows import Rows
from .standing import Told
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
    places: dict[str, Place]
    attempts: dict[str, int]
    outside: Literal["", "unseen", "seen"]


class State(msgspec.Struct, frozen=True):
    """All that recovery cannot derive; the names are those of `table.Table`."""

    flow: Flow
    rows: tuple[RowState, ...]
    # Id → key, whether it is admitted.
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
    fences: dict[str, int]
    past_leases: dict[int, dict[Told, set[int]]]
    # Stage and row, in the order of becoming ready.
    ready: tuple[tuple[str, int], ...]


ENDS = ("done", "dropped", "dead")


def dump(rows: Rows) -> bytes:
    """The state as bytes."""
    groups = {row.group.id: row.group for row in rows.rows.values()}
    state = State(
        flow=rows.flow,
        rows=tuple(map(_row_state, rows.rows.values())),
        groups={group.id: (group.key, group.admitted) for group in groups.values()},
        leases=tuple(
            Granted(x.at, x.id, x.stage, x.session, tuple(sorted(x.rows)), (), x.step, 0, x.request)
            for x in rows.leases.values()
        ),
        keys={key: group.first for key, group in rows.keys.items()},
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
        ended=tuple((split, how, n) for (split, how), n in rows.census.states.items() if how in ENDS),
        reasons=tuple((how, reason, n) for (how, reason), n in rows.census.ends.items()),
        written={name: counts["written"] for name, counts in rows.census.stages.items()},
        fences=dict(rows.fences),
        past_leases=dict(rows.past_leases),
        ready=rows.ready_order(),
    )
    return msgspec.msgpack.encode(state)


def load(data: bytes, *, now: float) -> Rows:
    """The state that `dump` wrote, under the flow of that day; leases and stragglers get their full time anew.

    Raises:
        JournalError: another release wrote it.
    """
    try:
        state = msgspec.msgpack.decode(data, type=State)
    except msgspec.ValidationError as error:
        raise JournalError(
            f"the newest snapshot was written by another release of streamrl ({error}); let that one finish the run"
        ) from error
    rows = Rows(state.flow)
    rows._now = now
    rows.sources, rows.versions = state.sources, state.versions
    rows.past_keys.update(state.past_keys)
    rows.fences.update(state.fences)
    rows.past_leases.update(state.past_leases)
    rows._past_rows = sum(len(ids) for told in state.past_leases.values() for ids in told.values())
    rows.version, rows.step = state.version, state.step
    rows._next_row, rows._next_group, rows._next_lease = state.next_row, state.next_group, state.next_lease
    rows._admitted, rows._lost = state.admitted, state.lost
    rows._trained_through, rows._step_rows = state.trained_through, state.step_rows
    for split, n in state.retired.items():
        rows.retired[split] = n
        rows.census.states[split, "trained"] += n
    for split, how, n in state.ended:
        rows.census.states[split, how] += n
    for how, reason, n in state.reasons:
        rows.census.ends[how, reason] += n
    for name, n in state.written.items():
        rows.census.stages[name]["written"] = n
    _load_rows(rows, state)
    _load_leases(rows, state)
    rows._start_leases(now)
    rows._make_all_ready(state.ready)
    return rows


def _row_state(row: Row) -> Any:
    """What is written of a row: the fields of `RowState`, as a tuple, which costs a third of the struct."""
    return (
        row.id,
        row.group.id,
        row.member,
        row.env,
        row.split,
        row.priority,
        row.born,
        row.step,
        row.tokens,
        row.places,
        row.attempts,
        row.outside,
    )


def _load_rows(rows: Rows, state: State) -> None:
    groups = {id: Group(id, key, state.keys[key]) for id, (key, _) in state.groups.items()}
    rows.keys.update({group.key: group for group in groups.values()})
    for known in state.rows:
        group = groups[known.group]
        row = Row(known.id, group, known.member, known.env, known.split, known.priority, Place(0, 0))
        row.born, row.step, row.tokens = known.born, known.step, known.tokens
        row.places, row.attempts, row.outside = known.places, known.attempts, known.outside
        row.bound = row.split == "train" and rows.flow.admission is not None and not row.outside
        group.admitted = state.groups[known.group][1]
        group.members.append(row)
        rows.rows[row.id] = row
        for place in row.places.values():
            rows.references[place.record] += 1
    for row in rows.rows.values():
        if row.step is None:
            rows._enter_way(row)
        rows.census.count(row)
    for group in groups.values():
        rows._note_gap(group)


def _load_leases(rows: Rows, state: State) -> None:
    for granted in state.leases:
        lease = Lease(granted, float("inf"))
        rows.leases[lease.id] = lease
        rows._session_leases[lease.session].add(lease.id)
        for row in [rows.rows[id] for id in granted.rows]:
            row.leases[lease.stage] = lease.id
            rows.census.stages[lease.stage]["leased"] += 1
            if rows.stages[lease.stage].trains:
                rows._leave_way(row)
                if (lease.step or 0) > rows.step:
                    rows._handed[lease.step or 0] += 1
            rows.census.recount((row,))
