"""Which of the ready rows a lease gets: the order is the queue's (`ready.py`), the limit is the staleness bound's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from . import admission
from .config import Admission, Stage
from .errors import LeaseExpired, UnknownName
from .standing import Standing
from .state import UNBORN, Row


class Pick:
    """Rows for one lease. Nothing is changed: the caller grants them, or forgets them."""

    def __init__(self, table: Standing, stage: Stage, step: int | None) -> None:
        self.rows: dict[int, Row] = {}
        # Groups that the lease admits.
        self.admitted: dict[int, None] = {}
        self._table = table
        self._stage = stage
        self._step = step
        # Of the rows: those that the bound counts; and the rows on their way without them.
        self._bound = 0
        self._left = Counter(table._on_their_way)

    def fill(self, rows: int, env: str | None) -> None:
        """Take up to `rows` rows, or the whole of the first group of a group stage, if that is more."""
        table, stage = self._table, self._stage
        # Where nothing is admitted and nothing trained, every row may go.
        free = table.flow.admission is None or not (stage.admits or stage.trains)
        queue = table._ready[stage.name]
        for row in queue.take(env, self._is_wanted if free else self._may_take, self._tokens):
            self._add(row)
            if len(self.rows) >= rows:
                break

    def _is_wanted(self, row: Row) -> bool:
        return True

    def _tokens(self, row: Row) -> int:
        return sum(member.tokens for member in self._table.concerned(self._stage, row))

    def _add(self, row: Row) -> None:
        if self._stage.unit == "row" and not (self._stage.admits or self._stage.trains):
            self.rows[row.id] = row
            return
        for member in self._table.concerned(self._stage, row):
            self.rows[member.id] = member
            self._bound += member.bound
            if member.on_way and not member.outside:
                self._left[member.born] -= 1
        if self._stage.admits and row.bound and not row.group.admitted:
            self.admitted[row.group.id] = None

    def _may_take(self, row: Row) -> bool:
        bound = self._table.flow.admission
        if bound is None:
            return True
        if self._stage.admits:
            return not row.bound or self._may_start(bound, row)
        if self._step is not None and (row.bound or row.outside):
            return admission.may_train(
                bound,
                born=row.born,
                step=self._step,
                handed=self._table._handed[self._step] + len(self.rows),
                on_their_way=self._left,
                outside=bool(row.outside),
            )
        return True

    def _may_start(self, bound: Admission, row: Row) -> bool:
        table = self._table
        trained = table.trained_at(table.version)
        if not row.group.admitted and row.group.id not in self.admitted:
            pending = len(self.admitted) * len(row.group.members)
            return admission.may_admit(bound, admitted=table._admitted + pending, lost=table._lost, trained=trained)
        handed, on_way = table._handed.total(), table._on_their_way.total()
        started = table._trained_through[table.step] + on_way + handed + self._bound
        return admission.may_start(bound, started=started, trained=trained)

    def fill_gap(self, env: str | None) -> None:
        """Take the row that must start for the learner to go on, although the bound has no place for it: the next one
        of the group that began first. One at a time: it may be all that was missing.
        """
        table, stage = self._table, self._stage
        bound = table.flow.admission
        if bound is None or not stage.admits or not table._gaps or not self._is_stuck(bound):
            return
        births = {
            id: min(member.born for member in group.members if member.born != UNBORN)
            for id, group in table._gaps.items()
            if any(member.born != UNBORN for member in group.members)
        }
        members = (member for id in births for member in table._gaps[id].members)
        fit = [row for row in members if stage.name in row.ready and env in (None, row.env)]
        if fit:
            self._add(min(fit, key=lambda row: (births[row.group.id], row.ready[stage.name])))

    def _is_stuck(self, bound: Admission) -> bool:
        """Whether the learner's next step cannot be filled before groups that have begun are complete.

        Rows that were lost leave places for a part of a group only; what such a group has too many may become stale.
        """
        table = self._table
        if table.version_step(table.version) != table.step:
            # The next version makes room.
            return False
        incomplete = Counter(m.born for group in table._gaps.values() for m in group.members if m.on_way)
        coming = table._on_their_way - incomplete
        handed, step = table._handed[table.step + 1], table.step + 1
        if handed >= bound.rows_per_step:
            return False
        return not coming or not admission.may_train(
            bound, born=min(coming), step=step, handed=handed, on_their_way=table._on_their_way
        )


def stale(table: Standing, stage: Stage, step: int | None) -> tuple[int, ...]:
    """Ready rows that training in `step` would take past the bound."""
    bound = table.flow.admission
    if not stage.trains or step is None or bound is None or bound.on_stale == "keep":
        return ()
    # A stale row's birth has a bucket of its own, so nothing is searched when there is none.
    births = [born for way in (table._on_their_way, table._from_outside) for born, n in way.items() if n]
    if not any(admission.is_stale(bound, born=born, step=step) for born in births):
        return ()
    rows = (member for row in table._ready[stage.name].ready() for member in table.concerned(stage, row))
    return tuple(sorted({row.id for row in rows if admission.is_stale(bound, born=row.born, step=step)}))


def parked(table: Standing, stage: Stage, keys: Sequence[str]) -> list[Row]:
    """The parked rows of the groups with these keys; none while one of them is still on its way to `stage`.

    Raises:
        UnknownName: a key that was never put.
        LeaseExpired: rows that somebody holds, or that have passed the stage or ended.
    """
    found: list[Row] = []
    waits = False
    for key in dict.fromkeys(keys):
        here, missing = _of_key(table, stage, key)
        found += here
        waits |= missing
    return [] if waits else found


def _of_key(table: Standing, stage: Stage, key: str) -> tuple[list[Row], bool]:
    group = table.keys.get(key)
    if group is None:
        if key in table.past_keys:
            raise LeaseExpired(f"lease of {stage.name}: the rows of key {key!r} have ended")
        raise UnknownName(f"lease of {stage.name}: no rows were put under key {key!r}")
    split = group.members[0].split
    if split not in stage.splits:
        raise UnknownName(f"lease of {stage.name}: key {key!r} is of split {split}, which does not pass this stage")
    held = [member for member in group.members if stage.name in member.leases]
    if held:
        session = table.leases[held[0].leases[stage.name]].session
        raise LeaseExpired(f"lease of {stage.name}: row {held[0].id} of key {key!r} is held by {session}")
    here = [member for member in group.members if stage.name in member.ready]
    missing = [m for m in group.members if m not in here and stage.name not in m.places and m.step is None]
    if not here and not missing:
        raise LeaseExpired(f"lease of {stage.name}: the rows of key {key!r} have passed it")
    return here, bool(missing)
