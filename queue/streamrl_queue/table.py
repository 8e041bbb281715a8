"""The state of the queue as the fold of its events. `Rows` adds the decisions that make events."""

from __future__ import annotations

import heapq
from typing import Final

import msgspec

from .events import (
    Committed,
    Configured,
    Dropped,
    Ended,
    Event,
    Fenced,
    Granted,
    Moved,
    Put,
    Reconciled,
    Retired,
    VersionBegun,
    VersionCommitted,
    Written,
)
from .recent import remember
from .standing import Standing
from .state import TASK, UNBORN, Group, Lease, Place, Row, Version

# Sessions whose fence is remembered, those fenced last: far more than engines fail while one of them lives.
FENCES: Final = 1 << 10
# Versions that are remembered, the last ones: far more than rows that are not trained yet can come from.
VERSIONS_KEPT: Final = 1 << 12


class Table(Standing):
    """Rows, groups, stages, leases, steps and versions, changed by `apply` alone."""

    def apply(self, event: Event, *, now: float = 0.0, record: int = 0) -> None:
        """Fold one event into the state.

        Args:
            event: what happened.
            now: monotonic seconds; leases granted by it, and clocks it starts, run from here.
            record: where the journal keeps the event's payload.
        """
        self._now = now
        match event:
            case Put():
                self._apply_put(event, record)
            case Granted():
                self._apply_granted(event, now)
            case Written():
                self._apply_written(event, record)
            case Moved():
                self._apply_moved(event, record)
            case Ended():
                self._apply_ended(event)
            case Dropped():
                self._end([row for id in event.rows if (row := self.rows.get(id))], "dropped", event.reason)
            case VersionBegun():
                self._apply_version_begun(event)
            case VersionCommitted():
                self._apply_version_committed(event)
            case Committed():
                self._apply_committed(event)
            case Retired():
                self._apply_retired(event)
            case Reconciled():
                self._apply_reconciled(event)
            case Fenced():
                self._apply_fenced(event)
            case Configured():
                self._apply_configured(event, now)

    def _apply_put(self, event: Put, record: int) -> None:
        id = event.first_row
        bound = event.split == "train" and self.flow.admission is not None
        groups: list[Group] = []
        rows: list[Row] = []
        for i, (line, key, env) in enumerate(zip(event.lines, event.keys, event.envs, strict=True)):
            group = self.keys[key] = Group(event.first_group + i, key, id)
            place = Place(record, line)
            for member in range(event.members):
                row = self.rows[id] = Row(id, group, member, env, event.split, event.priority, place)
                row.bound = bound
                group.members.append(row)
                rows.append(row)
                id += 1
            groups.append(group)
        self.references[record] += len(rows) * (1 + len(event.filled))
        self._begin(event, rows, record)
        if self.path(event.split).grouped:
            for group in groups:
                self._settle(group)
        self._next_row = id
        self._next_group = event.first_group + len(event.lines)
        for source, index in event.sources.items():
            self.sources[source] = max(index, self.sources.get(source, 0))

    def _begin(self, event: Put, rows: list[Row], record: int) -> None:
        """Rows that were put are ready for the first stages, or for what follows those that they bring along."""
        if event.filled:
            for number, row in enumerate(rows):
                self._fill(row, event, number, Place(record, event.line(number)))
                self.census.count(row)
            self._advance(rows)
            return
        for stage in self.path(event.split).first:
            self._push(stage, rows)
        self.census.count_alike(rows)

    def _fill(self, row: Row, event: Put, number: int, place: Place) -> None:
        """The row is born with the columns of some stages."""
        for name in (TASK, *event.filled):
            row.places[name] = place
        if event.tokens:
            row.tokens = event.tokens[number]
        if row.bound and self.path(row.split).admitting <= row.places.keys():
            row.bound, row.outside = False, "unseen"
        if event.oldest and event.oldest[number] in self.versions:
            row.born = self.version_step(event.oldest[number])

    def _apply_granted(self, event: Granted, now: float) -> None:
        stage = self.stages[event.stage]
        lease = Lease(event, now + stage.seconds if stage.seconds is not None else float("inf"))
        self._next_lease = event.lease + 1
        self.leases[lease.id] = lease
        self._session_leases[event.session].add(lease.id)
        if stage.seconds is not None:
            heapq.heappush(self._deadlines, (lease.deadline, lease.id))
        rows = [self.rows[id] for id in event.rows]
        for group in event.admitted:
            self._admit(next(row.group for row in rows if row.group.id == group))
        name = stage.name
        self._unready(name, rows)
        for row in rows:
            row.leases[name] = lease.id
            row.attempts[name] = row.attempts.get(name, 0) + 1
            if stage.admits:
                self._set_born(row, self.version_step(event.version))
            if stage.trains:
                self._see(row)
                self._handed[event.step or 0] += 1
                self._leave_way(row)
        self.census.stages[name]["leased"] += len(rows)
        self.census.recount(rows)
        for row in rows:
            if row.group.admitted:
                self._note_gap(row.group)
        if stage.trains:
            self._touch_bound()

    def _apply_written(self, event: Written, record: int) -> None:
        name = event.stage
        self.census.stages[name]["written"] += len(event.rows)
        rows = [self.rows[id] for id in event.rows]
        self.references[record] += len(rows)
        self._note_told(event.lease, "written", event.rows)
        self._end_part(self.leases[event.lease], rows)
        for line, row in enumerate(rows):
            row.places[name] = Place(record, line, event.lease)
            if event.tokens:
                row.tokens = event.tokens[line]
            if event.oldest and event.oldest[line] in self.versions:
                self._set_born(row, self.version_step(event.oldest[line]))
        self._go_on(rows)

    def _go_on(self, rows: list[Row]) -> None:
        """After a change to them: rows and their groups become ready for what comes next."""
        self._advance(rows)
        for group in {row.group.id: row.group for row in rows if self.path(row.split).grouped}.values():
            self._settle(group)

    def _apply_moved(self, event: Moved, record: int) -> None:
        for row in (self.rows[id] for id in event.rows if id in self.rows):
            old = row.places[event.stage]
            row.places[event.stage] = Place(record, old.line, old.lease)
            self.references[record] += 1
            self._release(old)

    def _apply_ended(self, event: Ended) -> None:
        lease = self.leases.get(event.lease)
        if lease is None:
            # Its last rows ended with their group, when another lease of the same session did.
            return
        stage = self.stages[lease.stage]
        if event.cause == "released":
            self._note_told(event.lease, "released", event.rows)
        spent: list[Row] = []
        back: list[Row] = []
        for row in [self.rows[id] for id in event.rows if id in lease.rows]:
            self._end_lease(row, stage.name)
            if stage.trains:
                self._enter_way(row)
            if stage.admits:
                # Nothing of it is left: it will be born again, under the version of that day.
                self._leave_way(row)
                row.born = UNBORN
            if event.cause == "released":
                row.attempts[stage.name] -= 1
            (spent if row.attempts[stage.name] >= stage.max_deliveries else back).append(row)
        self._end(spent, "dead", f"{stage.name}: {event.reason}")
        self._go_on(back)
        for id in event.rows:
            if id in self.rows:
                self._note_gap(self.rows[id].group)

    def _apply_version_begun(self, event: VersionBegun) -> None:
        self.versions[event.version] = Version(event.version, event.step, event.parent, None, event.request)
        if len(self.versions) > VERSIONS_KEPT:
            del self.versions[next(id for id in self.versions if id != self.version)]

    def _apply_version_committed(self, event: VersionCommitted) -> None:
        known = self.versions[event.version]
        self.versions[event.version] = msgspec.structs.replace(known, digest=event.digest)
        self.version = event.version
        self._touch_bound()

    def _apply_committed(self, event: Committed) -> None:
        self.step = event.step
        self._step_rows[event.step] = event.rows
        self.census.stages[self._trains]["written"] += len(event.rows)
        rows = [self.rows[id] for id in event.rows]
        for row in rows:
            # Whoever else holds it is too late: it has ended.
            for name in tuple(row.leases):
                self._end_lease(row, name)
            for name in tuple(row.ready):
                self._unready(name, (row,))
            row.step = event.step
            self.census.recount((row,))
        self._trained_through[event.step] = self._trained_through[event.step - 1] + len(rows)
        self._handed.pop(event.step, None)
        for group in {row.group.id: row.group for row in rows}.values():
            self._settle(group)

    def _apply_retired(self, event: Retired) -> None:
        # Retired rows stay in the counts as trained; only their columns and their place in the table go.
        for step in [step for step in self._step_rows if step <= event.through]:
            for row in [self.rows[id] for id in self._step_rows.pop(step)]:
                self.retired[row.split] += 1
                self._remove(row)
        # Nobody goes back behind a checkpoint, and the bound looks back to the committed version.
        first = min(event.through, self.version_step(self.version))
        for step in [step for step in self._trained_through if step < first]:
            del self._trained_through[step]

    def _apply_reconciled(self, event: Reconciled) -> None:
        back: list[int] = []
        for step in [step for step in self._step_rows if step > event.step]:
            back.extend(self._step_rows.pop(step))
            self._trained_through.pop(step)
        if back:
            self.census.stages[self._trains]["written"] -= len(back)
        self.step = event.step
        for lease in [lease for lease in self.leases.values() if lease.stage == self._trains]:
            for id in sorted(lease.rows):
                self._end_lease(self.rows[id], self._trains)
                back.append(id)
        rows = [self.rows[id] for id in back]
        for row in rows:
            row.step = None
            self._enter_way(row)
            for name, concerned in tuple(row.group.ready.items()):
                self._unready(name, concerned[:1])
                self.census.recount(concerned[:1])
        self._go_on(rows)
        self._touch_bound()

    def _apply_fenced(self, event: Fenced) -> None:
        remember(self.fences, event.session, event.announced, FENCES)

    def _apply_configured(self, event: Configured, now: float) -> None:
        if event.flow == self.flow:
            return
        order = self.ready_order()
        for row in self.rows.values():
            row.ready.clear()
        for group in self.keys.values():
            group.ready.clear()
            group.waits.clear()
        self._waits.clear()
        for counts in self.census.stages.values():
            counts["ready"] = 0
        self._configure(event.flow)
        self._start_leases(now)
        self._make_all_ready(order)

    def _start_leases(self, now: float) -> None:
        """All leases get their full time anew."""
        self._deadlines.clear()
        for lease in self.leases.values():
            seconds = self.stages[lease.stage].seconds
            lease.deadline = now + seconds if seconds is not None else float("inf")
            if seconds is not None:
                heapq.heappush(self._deadlines, (lease.deadline, lease.id))
