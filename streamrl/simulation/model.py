"""What the queue must be, written naively and apart from its code: the fold of journaled events with every rule.

Each event is refused with `Broken` when it contradicts what went before. Nothing here is fast or shared with
`streamrl_queue.rows` and `table`; only the flow (which is data) and the event structs are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from streamrl_queue import events as e
from streamrl_queue.config import Flow, Stage

EPSILON: Final = 1e-6


class Broken(Exception):
    """An invariant does not hold. `rows` are those that it is about."""

    def __init__(self, message: str, rows: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class Row:
    """One attempt at a task. `held` and `done` are stage → lease."""

    def __init__(self, id: int, group: Group, member: int, split: str) -> None:
        self.id = id
        self.group = group
        self.member = member
        self.split = split
        self.done: dict[str, int] = {}
        self.held: dict[str, int] = {}
        self.attempts: Counter[str] = Counter()
        self.born: int | None = None
        self.step: int | None = None
        self.end: tuple[str, str] | None = None
        self.retired = False

    def __repr__(self) -> str:
        state = self.end or (f"trained in step {self.step}" if self.step is not None else "alive")
        return f"<Row {self.id} of group {self.group.id}: {state}, done {self.done}, held {self.held}>"

    @property
    def here(self) -> bool:
        """Whether the queue still has the row."""
        return self.end is None and not self.retired


class Group:
    """Rows of one task."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.rows: list[Row] = []
        self.admitted = False
        # Stage → since when enough members for it were there; only the rest is waited for.
        self.since: dict[str, float] = {}

    @property
    def here(self) -> list[Row]:
        return [row for row in self.rows if row.here]


class Lease:
    """Rows that a session holds. It must not end before `earliest`, and must not live past `latest`."""

    def __init__(self, event: e.Granted, until: float) -> None:
        self.id = event.lease
        self.stage = event.stage
        self.session = event.session
        self.granted = event.rows
        self.rows = set(event.rows)
        self.step = event.step
        self.earliest = self.latest = until
        self.released: set[int] = set()


class Version:
    """A policy version."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.committed = False


class Model:
    """The state that the journaled events amount to."""

    def __init__(self, flow: Flow, durable_step: Callable[[], int]) -> None:
        self.flow = flow
        self._durable_step = durable_step
        self.stages = {stage.name: stage for stage in flow.stages}
        writer = {column: stage.name for stage in flow.stages for column in stage.writes}
        self.needs = {s.name: {writer[c] for c in s.reads if c in writer} | {*s.after} for s in flow.stages}
        self.rows: dict[int, Row] = {}
        # All groups, and those with rows that the queue still has.
        self.groups: dict[int, Group] = {}
        self.alive: dict[int, Group] = {}
        # How rows ended that did not leave trained, and how many did.
        self.ends: Counter[str] = Counter()
        self.retired = 0
        self.keys: dict[str, Group] = {}
        # Every lease that ever was, and those that still hold rows.
        self.leases: dict[int, Lease] = {}
        self.live: dict[int, Lease] = {}
        self.versions: dict[int, Version] = {}
        # Session → its last announcement that must not count, and since when.
        self.fences: dict[str, tuple[int, float]] = {}
        self.version = 0
        self.step = 0
        self.retired_through = 0
        self.steps: dict[int, tuple[int, ...]] = {}
        self.admitted = 0
        self.lost = 0
        self._last_lease = 0
        # Rows trained in steps up to each step.
        self._through: dict[int, int] = {0: 0}
        # Whether the learner ever went back, a row was lost, or an engine sampled under an older version than the
        # lease's: then a row may become stale although younger rows were held back for it.
        self.disturbed = False
        self.folds: dict[type[e.Event], Callable[..., Sequence[Group]]] = {
            e.Configured: self._configured,
            e.Put: self._put,
            e.Granted: self._granted,
            e.Written: self._written,
            e.Ended: self._ended,
            e.Dropped: self._dropped,
            e.Moved: self._moved,
            e.VersionBegun: self._begun,
            e.VersionCommitted: self._version_committed,
            e.Committed: self._committed,
            e.Retired: self._retired,
            e.Reconciled: self._reconciled,
            e.Fenced: self._fenced,
        }

    def fold(self, event: e.Event, now: float, born: Sequence[int | None] = ()) -> Sequence[Group]:
        """Check the event and what it makes of the state; returns the groups that it touched.

        `born[i]` is the step of the oldest version that really sampled row i of a rollout's write.
        """
        groups = (
            self._written(event, now, born) if isinstance(event, e.Written) else self.folds[type(event)](event, now)
        )
        for group in groups:
            self._settle(group)
        self.note_waits(groups, now)
        return groups

    # -- questions

    def stages_of(self, row: Row) -> list[Stage]:
        return [stage for stage in self.flow.stages if row.split in stage.splits]

    def bound(self, row: Row) -> bool:
        """Whether the staleness bound counts this row."""
        return self.flow.admission is not None and row.split == "train"

    def wants(self, stage: Stage, row: Row) -> bool:
        """Whether `stage` could be done to the row now."""
        name = stage.name
        if name in row.done or name in row.held or row.step is not None or row.end is not None:
            return False
        return self.needs[name] <= row.done.keys()

    def group_ready(self, stage: Stage, group: Group) -> bool:
        """Whether all that is left of the group wants the group stage, or has passed it."""
        wanting = [row for row in group.here if self.wants(stage, row)]
        return bool(wanting) and all(row in wanting or stage.name in row.done for row in group.here)

    def missing(self, stage: Stage, group: Group) -> list[Row]:
        """Members that the group stage still lacks."""
        name = stage.name
        here = [row for row in group.here if row.step is None and name not in row.done and name not in row.held]
        return [row for row in here if not self.wants(stage, row)]

    def note_waits(self, groups: Iterable[Group], now: float) -> None:
        """Start and stop the clocks of stragglers."""
        for group in groups:
            for stage in self.flow.stages:
                missing = self.missing(stage, group)
                enough = stage.partial is not None and len(group.here) - len(missing) >= stage.partial
                if missing and enough and group.here and stage in self.stages_of(group.here[0]):
                    group.since.setdefault(stage.name, now)
                else:
                    group.since.pop(stage.name, None)

    def overdue(self, now: float) -> list[Row]:
        """Members that should have been dropped by `now`."""
        return [
            row
            for group in self.alive.values()
            for name, since in group.since.items()
            if since + (self.stages[name].straggler_seconds or 0.0) < now
            for row in self.missing(self.stages[name], group)
        ]

    def trained_at(self, step: int) -> int:
        """Rows trained in the steps up to `step` of the surviving history."""
        return self._through[min(step, self.step)]

    def may_admit(self) -> bool:
        """Whether one more group may start."""
        bound = self.flow.admission
        if bound is None:
            return True
        room = (bound.max_staleness + 1) * bound.rows_per_step
        return self.admitted - self.lost < self.trained_at(self._version_step()) + room

    def may_start(self) -> bool:
        """Whether one more row of an admitted group may start: it and all that are on their way have their places."""
        bound = self.flow.admission
        if bound is None:
            return True
        here = (row for group in self.alive.values() for row in group.here)
        started = sum(self.bound(row) and row.born is not None and row.step is None for row in here)
        room = (bound.max_staleness + 1) * bound.rows_per_step
        return self.trained_at(self.step) + started < self.trained_at(self._version_step()) + room

    def _version_step(self) -> int:
        return self.versions[self.version].step if self.version else 0

    def counts(self) -> Counter[str]:
        """Rows by how they stand."""
        found = Counter(self.ends)
        found["trained"] += self.retired
        for row in (row for group in self.alive.values() for row in group.here):
            found["trained" if row.step is not None else "leased" if row.held else "unleased"] += 1
        return +found

    # -- events

    def _configured(self, event: e.Configured, now: float) -> list[Group]:
        if event.flow != self.flow:
            raise Broken("the journal names another flow than the broker was given")
        if self.rows or self.versions:
            raise Broken("the flow was written again although it is the same")
        return []

    def _put(self, event: e.Put, now: float) -> list[Group]:
        if again := [key for key in event.keys if key in self.keys]:
            raise Broken(f"a second group was made for key {again[0]}", [r.id for r in self.keys[again[0]].rows])
        if len(set(event.keys)) != len(event.keys):
            raise Broken(f"one put names a key twice: {event.keys}")
        if event.first_row != len(self.rows) + 1 or event.first_group != len(self.groups) + 1:
            raise Broken(
                f"put starts at row {event.first_row} and group {event.first_group}: ids repeat or are skipped"
            )
        groups = []
        for number, key in enumerate(event.keys):
            group = self.keys[key] = Group(event.first_group + number)
            self.groups[group.id] = self.alive[group.id] = group
            for member in range(event.members):
                row = Row(len(self.rows) + 1, group, member, event.split)
                self.rows[row.id] = row
                group.rows.append(row)
            groups.append(group)
        return groups

    def _granted(self, event: e.Granted, now: float) -> list[Group]:
        stage = self.stages[event.stage]
        rows = [self._row(id) for id in event.rows]
        if event.lease in self.leases or event.lease <= self._last_lease:
            raise Broken(f"lease id {event.lease} was used before", event.rows)
        if not rows or len(set(event.rows)) != len(rows):
            raise Broken(f"a lease of {len(rows)} rows, {len(set(event.rows))} of them different", event.rows)
        for row in rows:
            if stage not in self.stages_of(row) or not self.wants(stage, row):
                raise Broken(f"row {row.id} was leased for {stage.name} but is not ready for it: {row}", [row.id])
        if event.version != self.version:
            raise Broken(f"lease under version {event.version}; committed is {self.version}", event.rows)
        if stage.unit == "group":
            self._check_whole(stage, rows)
        if stage.admits:
            self._admit(event, rows)
        if stage.trains:
            self._check_step(event, rows)
        until = now + stage.seconds if stage.seconds is not None else float("inf")
        self._last_lease = event.lease
        self.leases[event.lease] = self.live[event.lease] = Lease(event, until)
        for row in rows:
            row.held[stage.name] = event.lease
            row.attempts[stage.name] += 1
            if stage.admits:
                row.born = self._version_step()
        return _groups(rows)

    def _check_whole(self, stage: Stage, rows: list[Row]) -> None:
        ids = {row.id for row in rows}
        for group in _groups(rows):
            if missing := [row.id for row in group.here if row.id not in ids and stage.name not in row.done]:
                raise Broken(f"group {group.id} was leased for {stage.name} without rows {missing}", ids)
            if len(group.here) < stage.min_members:
                raise Broken(f"group {group.id} was leased for {stage.name} with {len(group.here)} members", ids)

    def _admit(self, event: e.Granted, rows: list[Row]) -> None:
        fresh = {row.group.id: row.group for row in rows if self.bound(row) and not row.group.admitted}
        if set(event.admitted) != set(fresh) or len(event.admitted) != len(fresh):
            raise Broken(f"groups {sorted(fresh)} start with this lease, but {event.admitted} were counted", event.rows)
        for id in event.admitted:
            if not self.may_admit():
                raise Broken(
                    f"group {id} was admitted past the bound: {self.admitted} admitted, {self.lost} lost, version "
                    f"{self.version} in force",
                    [row.id for row in fresh[id].rows],
                )
            fresh[id].admitted = True
            self.admitted += len(fresh[id].here)

    def _check_step(self, event: e.Granted, rows: list[Row]) -> None:
        step, bound = event.step, self.flow.admission
        if step is None or step <= self.step:
            raise Broken(f"lease for step {step}, but {self.step} steps are committed", event.rows)
        if bound is None:
            return
        handed = sum(len(x.rows) for x in self.live.values() if x.step == step)
        if handed + len(rows) > bound.rows_per_step:
            raise Broken(f"{handed + len(rows)} rows were handed out for step {step}", event.rows)
        for row in rows:
            self._check_lag(row, step)

    def _check_lag(self, row: Row, step: int) -> None:
        bound = self.flow.admission
        if bound is None or bound.on_stale == "keep" or row.born is None:
            return
        if step - 1 - row.born > bound.max_staleness:
            raise Broken(f"row {row.id} goes into step {step} with lag {step - 1 - row.born}", [row.id])

    def _written(self, event: e.Written, now: float, born: Sequence[int | None]) -> list[Group]:
        stage = self.stages[event.stage]
        lease = self._lease(event.lease, event.rows, "write")
        if lease.stage != event.stage or stage.trains or len(set(event.rows)) != len(event.rows):
            raise Broken(f"lease {lease.id} of {lease.stage} wrote {event.stage} of rows {event.rows}", event.rows)
        rows = [self._row(id) for id in event.rows]
        for line, row in enumerate(rows):
            if stage.name in row.done:
                raise Broken(f"row {row.id}: {stage.name} was written twice", [row.id])
            self._give_back(row, lease)
            row.done[stage.name] = lease.id
            if born and (step := born[line]) is not None:
                self.disturbed |= row.born is None or step < row.born
                row.born = step
        return _groups(rows)

    def _ended(self, event: e.Ended, now: float) -> list[Group]:
        lease = self._lease(event.lease, event.rows, f"end ({event.cause})")
        stage = self.stages[lease.stage]
        if event.cause == "released":
            lease.released.update(event.rows)
        if event.cause == "expired" and now < lease.earliest - EPSILON:
            raise Broken(f"lease {lease.id} ran out {lease.earliest - now:.3f} s too early", event.rows)
        rows = [self._row(id) for id in event.rows]
        for row in rows:
            self._give_back(row, lease)
            if stage.admits:
                row.born = None
            if event.cause == "released":
                row.attempts[stage.name] -= 1
            elif row.attempts[stage.name] >= stage.max_deliveries:
                self._end(row, "dead", f"{stage.name}: {event.reason}")
        return _groups(rows)

    def _dropped(self, event: e.Dropped, now: float) -> list[Group]:
        if len(set(event.rows)) != len(event.rows):
            raise Broken("a drop names a row twice", event.rows)
        rows = [self._row(id) for id in event.rows]
        for row in rows:
            if not row.here or row.step is not None:
                raise Broken(f"row {row.id} was dropped ({event.reason}) although it had ended: {row}", [row.id])
            if event.reason == "stale":
                self._check_stale(row)
            if event.reason == "straggler":
                self._check_straggler(row, now)
            self._end(row, "dropped", event.reason)
        return _groups(rows)

    def _check_straggler(self, row: Row, now: float) -> None:
        waits = [self.stages[name] for name in row.group.since if row in self.missing(self.stages[name], row.group)]
        late = [s for s in waits if now >= row.group.since[s.name] + (s.straggler_seconds or 0.0) - EPSILON]
        if not late:
            raise Broken(
                f"row {row.id} was dropped as a straggler although nobody has waited for it long enough", [row.id]
            )

    def _check_stale(self, row: Row) -> None:
        bound = self.flow.admission
        if bound is None or bound.on_stale == "keep" or row.born is None:
            raise Broken(f"row {row.id} was dropped as stale, but nothing is stale here", [row.id])
        if self.step - row.born <= bound.max_staleness:
            raise Broken(f"row {row.id} was dropped as stale with lag {self.step - row.born}", [row.id])
        if bound.on_stale == "wait" and not self.disturbed:
            raise Broken(
                f"row {row.id}, born under step {row.born}, was overtaken until step {self.step + 1}, and dropped",
                [row.id],
            )

    def _moved(self, event: e.Moved, now: float) -> list[Group]:
        for row in (self._row(id) for id in event.rows):
            if event.stage and event.stage not in row.done:
                raise Broken(f"row {row.id}: columns of {event.stage} were moved, but there are none", [row.id])
        return []

    def _begun(self, event: e.VersionBegun, now: float) -> list[Group]:
        if event.version <= max(self.versions, default=0):
            raise Broken(f"version id {event.version} was used before")
        self.versions[event.version] = Version(event.step)
        return []

    def _version_committed(self, event: e.VersionCommitted, now: float) -> list[Group]:
        version = self.versions.get(event.version)
        if version is None or version.committed or event.version <= self.version:
            raise Broken(f"version {event.version} was committed without being begun, twice, or out of order")
        version.committed = True
        self.version = event.version
        return []

    def _committed(self, event: e.Committed, now: float) -> list[Group]:
        if event.step != self.step + 1:
            raise Broken(f"step {event.step} was committed after step {self.step}", event.rows)
        if len(set(event.rows)) != len(event.rows):
            raise Broken(f"step {event.step} trains a row twice", event.rows)
        rows = [self._row(id) for id in event.rows]
        sessions = set()
        for row in rows:
            if row.step is not None or not row.here:
                raise Broken(f"row {row.id} was trained in step {event.step} although it had ended: {row}", [row.id])
            held = [self.leases[id] for stage, id in row.held.items() if self.stages[stage].trains]
            if not held or held[0].step != event.step:
                raise Broken(f"row {row.id} was trained in step {event.step} but not leased for it: {row}", [row.id])
            sessions.add(held[0].session)
            self._check_lag(row, event.step)
            self._give_back(row, held[0])
            row.step = event.step
        if len(sessions) > 1:
            raise Broken(f"step {event.step} has rows of several learners: {sorted(sessions)}", event.rows)
        self.step = event.step
        self.steps[event.step] = event.rows
        self._through[event.step] = self._through[event.step - 1] + len(rows)
        return _groups(rows)

    def _retired(self, event: e.Retired, now: float) -> list[Group]:
        if event.through > self._durable_step():
            raise Broken(f"steps to {event.through} were retired; the checkpoint covers {self._durable_step()}")
        steps = range(self.retired_through + 1, event.through + 1)
        rows = [self.rows[id] for step in steps for id in self.steps[step]]
        for row in rows:
            row.retired = True
        self.retired += len(rows)
        self.retired_through = max(self.retired_through, event.through)
        return _groups(rows)

    def _reconciled(self, event: e.Reconciled, now: float) -> list[Group]:
        if not self.retired_through <= event.step <= self.step:
            raise Broken(f"back to step {event.step} of {self.step}, with steps to {self.retired_through} retired")
        touched = []
        for step in range(event.step + 1, self.step + 1):
            self.disturbed = True
            for row in (self.rows[id] for id in self.steps.pop(step)):
                row.step = None
                touched.append(row)
        for lease in list(self.live.values()):
            if self.stages[lease.stage].trains:
                for id in sorted(lease.rows):
                    self._give_back(self.rows[id], lease)
                    touched.append(self.rows[id])
        self.step = event.step
        return _groups(touched)

    def _fenced(self, event: e.Fenced, now: float) -> list[Group]:
        self.fences[event.session] = event.announced, now
        return []

    # -- parts

    def _row(self, id: int) -> Row:
        if id not in self.rows:
            raise Broken(f"there is no row {id}", [id])
        return self.rows[id]

    def _lease(self, id: int, rows: Sequence[int], what: str) -> Lease:
        lease = self.leases.get(id)
        if lease is None:
            raise Broken(f"{what}: there never was a lease {id}", rows)
        if lost := [row for row in rows if row not in lease.rows]:
            raise Broken(f"{what}: lease {id} of {lease.stage} does not hold rows {lost}", lost)
        return lease

    def _give_back(self, row: Row, lease: Lease) -> None:
        row.held.pop(lease.stage)
        lease.rows.discard(row.id)
        if not lease.rows:
            self.live.pop(lease.id, None)

    def _end(self, row: Row, how: str, reason: str) -> None:
        for id in list(row.held.values()):
            self._give_back(row, self.leases[id])
        row.end = how, reason
        self.ends[f"{how} {reason}".strip()] += 1
        if self.bound(row) and row.group.admitted:
            self.lost += 1
            # Its place is free for a part of a group only.
            self.disturbed = True

    def _settle(self, group: Group) -> None:
        """End rows that have passed all their stages, and what is left of groups that became too small."""
        for row in group.here:
            if all(stage.name in row.done for stage in self.stages_of(row)):
                self._end(row, "done", "")
        for stage in self.flow.stages:
            small = stage.unit == "group" and len(group.here) < stage.min_members
            if small and group.here and stage in self.stages_of(group.here[0]) and self.group_ready(stage, group):
                for row in group.here:
                    self._end(row, "dropped", "group_too_small")
        if not group.here:
            self.alive.pop(group.id, None)


def _groups(rows: Iterable[Row]) -> list[Group]:
    return list({row.group.id: row.group for row in rows}.values())
