"""The state of the queue as the fold of its events. `Rows` adds the decisions that make events.

A row is in exactly one state: waiting (for admission, for its group, for another stage's write), ready, leased,
or ended: trained, done, dropped or dead. Ready rows lie in heaps per stage and environment, so that a lease costs
the same whether a thousand or a million rows are alive.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec

from .config import ANY, Flow, Stage
from .errors import UnknownName
from .events import (
    Committed,
    Dropped,
    Ended,
    Event,
    Granted,
    Moved,
    Put,
    Reconciled,
    Retired,
    VersionBegun,
    VersionCommitted,
    Written,
)
from .state import TASK, UNBORN, Group, Lease, Line, Place, Rank, Row, StageCount, Statistics, Version

# Keys of ended groups that are still recognised when they are put again.
PAST_KEYS: Final = 1 << 16


class Table:
    """Rows, groups, stages, leases, steps and versions, changed by `apply` alone."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.stages: dict[str, Stage] = {stage.name: stage for stage in flow.stages}
        self.writer = {column: stage.name for stage in flow.stages for column in stage.writes if column != ANY}
        # Stage → the stages that it builds on.
        self._needs = {
            s.name: frozenset(self.writer.get(c, TASK) for c in s.reads) - {TASK} | frozenset(s.after)
            for s in flow.stages
        }
        self._by_split: dict[str, tuple[Stage, ...]] = {}
        self._trains = next((stage.name for stage in flow.stages if stage.trains), "")
        self.rows: dict[int, Row] = {}
        self.leases: dict[int, Lease] = {}
        self._session_leases: defaultdict[str, set[int]] = defaultdict(set)
        self._deadlines: list[tuple[float, int]] = []
        # Stage → queue → heap of ready rows. An entry whose row moved on is skipped when it comes up.
        self._ready: dict[str, defaultdict[Line, list[Rank]]] = {s.name: defaultdict(list) for s in flow.stages}
        # Stages that gained ready rows, or room, since the broker last looked.
        self.touched: set[str] = set()
        # Key of a group with live rows → its first row; and of groups that ended lately.
        self.keys: dict[str, int] = {}
        self.past_keys: OrderedDict[str, int] = OrderedDict()
        # Record → how many places refer to it; and records that lost their last one since the broker last looked.
        self.references: Counter[int] = Counter()
        self.freed: list[int] = []
        # Split → trained rows that have left the table.
        self.retired: Counter[str] = Counter()
        self.sources: dict[str, int] = {}
        self.versions: dict[int, Version] = {}
        self.version = 0
        self.step = 0
        self._next_row = self._next_group = self._next_lease = 1
        self._admitted = self._lost = 0
        # Admitted groups with members that have not started, or must start again.
        self._gaps: dict[int, Group] = {}
        self._waiting_rollout = 0
        # Step → rows trained in all steps up to it. Step 0 trained none.
        self._trained_through: dict[int, int] = {0: 0}
        self._step_rows: dict[int, tuple[int, ...]] = {}
        # Step → rows born under it that are not in the learner's hands.
        self._on_their_way: Counter[int] = Counter()
        # Step → rows in the learner's hands for it.
        self._handed: Counter[int] = Counter()
        self._states: Counter[tuple[str, str]] = Counter()
        self._ends: Counter[tuple[str, str]] = Counter()
        self._stage_counts: dict[str, Counter[str]] = {s.name: Counter() for s in flow.stages}

    def stage(self, name: str) -> Stage:
        """The stage of that name.

        Raises:
            UnknownName: listing the stages there are.
        """
        if name not in self.stages:
            raise UnknownName(f"stage: no stage {name!r}; the stages are {', '.join(self.stages)}")
        return self.stages[name]

    def version_step(self, version: int) -> int:
        """The optimizer step after which `version` was made; 0 when there is no such version."""
        return self.versions[version].step if version in self.versions else 0

    def apply(self, event: Event, *, now: float = 0.0, record: int = 0) -> None:
        """Fold one event into the state.

        Args:
            event: what happened.
            now: monotonic seconds; leases granted by it live from here.
            record: where the journal keeps the event's payload.
        """
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
                self.versions[event.version] = Version(event.version, event.step, event.parent, None, event.request)
            case VersionCommitted():
                self._apply_version_committed(event)
            case Committed():
                self._apply_committed(event)
            case Retired():
                self._apply_retired(event)
            case Reconciled():
                self._apply_reconciled(event)

    def _apply_put(self, event: Put, record: int) -> None:
        ids = itertools.count(event.first_row)
        for number, (line, key, env) in enumerate(zip(event.lines, event.keys, event.envs, strict=True)):
            group = Group(event.first_group + number, key)
            for member in range(event.members):
                row = Row(next(ids), group, member, env, event.split, event.priority, Place(record, line))
                group.members.append(row)
                self.rows[row.id] = row
                self.references[record] += 1
            self.keys[key] = group.members[0].id
            for row in group.members:
                self._count(row)
                self._make_ready(row)
        self._next_row = next(ids)
        self._next_group = event.first_group + len(event.lines)
        for source, index in event.sources.items():
            self.sources[source] = max(index, self.sources.get(source, 0))

    def _apply_granted(self, event: Granted, now: float) -> None:
        stage = self.stages[event.stage]
        deadline = now + stage.seconds if stage.seconds is not None else float("inf")
        lease = Lease(event, deadline)
        self._next_lease = event.lease + 1
        self.leases[lease.id] = lease
        self._session_leases[event.session].add(lease.id)
        if stage.seconds is not None:
            heapq.heappush(self._deadlines, (deadline, lease.id))
        rows = [self.rows[id] for id in event.rows]
        for group in event.admitted:
            self._admit(next(row.group for row in rows if row.group.id == group))
        for row in rows:
            self._unready(stage.name, row)
            row.leases[stage.name] = lease.id
            row.attempts[stage.name] = row.attempts.get(stage.name, 0) + 1
            self._stage_counts[stage.name]["leased"] += 1
            if stage.admits:
                self._set_born(row, self.version_step(event.version))
            if stage.trains:
                self._handed[event.step or 0] += 1
                self._leave_way(row)
        for row in rows:
            self._recount(row)
            self._note_gap(row.group)
        if stage.trains:
            self._touch_bound()

    def _apply_written(self, event: Written, record: int) -> None:
        stage = self.stages[event.stage]
        self._stage_counts[stage.name]["written"] += len(event.rows)
        rows = [self.rows[id] for id in event.rows]
        for line, row in enumerate(rows):
            self._end_lease(row, stage.name)
            row.places[stage.name] = Place(record, line)
            self.references[record] += 1
            row.writers[stage.name] = event.lease
            if event.tokens:
                row.tokens = event.tokens[line]
            if event.oldest and event.oldest[line] in self.versions:
                self._set_born(row, self.version_step(event.oldest[line]))
        for row in rows:
            self._advance(row)

    def _apply_moved(self, event: Moved, record: int) -> None:
        for row in (self.rows[id] for id in event.rows if id in self.rows):
            old = row.places[event.stage]
            row.places[event.stage] = Place(record, old.line)
            self.references[record] += 1
            self._release(old)

    def _apply_ended(self, event: Ended) -> None:
        stage = self.stages[self.leases[event.lease].stage]
        spent: list[Row] = []
        for id in event.rows:
            row = self.rows[id]
            self._end_lease(row, stage.name)
            if stage.trains:
                self._enter_way(row)
            if stage.admits:
                # Nothing of it is left: it will be born again, under the version of that day.
                self._leave_way(row)
                row.born = UNBORN
            if event.cause == "released":
                row.attempts[stage.name] -= 1
            if row.attempts[stage.name] >= stage.max_deliveries:
                spent.append(row)
            else:
                self._advance(row)
        for id in event.rows:
            if id in self.rows:
                self._note_gap(self.rows[id].group)
        self._end(spent, "dead", f"{stage.name}: {event.reason}")

    def _apply_version_committed(self, event: VersionCommitted) -> None:
        known = self.versions[event.version]
        self.versions[event.version] = msgspec.structs.replace(known, digest=event.digest)
        self.version = event.version
        self._touch_bound()

    def _apply_committed(self, event: Committed) -> None:
        self.step = event.step
        self._step_rows[event.step] = event.rows
        self._stage_counts[self._trains]["written"] += len(event.rows)
        for id in event.rows:
            row = self.rows[id]
            self._end_lease(row, self._trains)
            row.step = event.step
            self._recount(row)
        self._trained_through[event.step] = self._trained_through[event.step - 1] + len(event.rows)
        self._handed.pop(event.step, None)

    def _apply_retired(self, event: Retired) -> None:
        # Retired rows stay in the counts as trained; only their columns and their place in the table go.
        for step in [step for step in self._step_rows if step <= event.through]:
            for row in [self.rows[id] for id in self._step_rows.pop(step)]:
                self.retired[row.split] += 1
                self._remove(row)

    def _apply_reconciled(self, event: Reconciled) -> None:
        back: list[int] = []
        for step in [step for step in self._step_rows if step > event.step]:
            back.extend(self._step_rows.pop(step))
            self._trained_through.pop(step)
        if back:
            self._stage_counts[self._trains]["written"] -= len(back)
        self.step = event.step
        for lease in [lease for lease in self.leases.values() if lease.stage == self._trains]:
            for id in tuple(lease.rows):
                self._end_lease(self.rows[id], self._trains)
                back.append(id)
        for row in [self.rows[id] for id in back]:
            row.step = None
            self._enter_way(row)
            self._advance(row)

    # -- leases, readiness, ends

    def is_bound(self, row: Row) -> bool:
        """Whether the staleness bound counts this row: rows that are never trained are free of it."""
        return self.flow.admission is not None and row.split == "train"

    def _admit(self, group: Group) -> None:
        group.admitted = True
        self._admitted += len(group.members)
        for member in group.members:
            self._recount(member)
            for stage in (self.stages[name] for name in member.ready if self.stages[name].admits):
                self._enqueue(stage, member)

    def _note_gap(self, group: Group) -> None:
        if group.admitted and any(member.born == UNBORN for member in group.members):
            self._gaps[group.id] = group
        else:
            self._gaps.pop(group.id, None)

    def _touch_bound(self) -> None:
        """There may be room again under the staleness bound: to start, and to overtake."""
        self.touched.update(stage.name for stage in self.flow.stages if stage.admits or stage.trains)

    def _set_born(self, row: Row, step: int) -> None:
        self._leave_way(row)
        row.born = step
        self._enter_way(row)

    def _enter_way(self, row: Row) -> None:
        if not row.on_way and self.is_bound(row) and row.born != UNBORN:
            row.on_way = True
            self._on_their_way[row.born] += 1

    def _leave_way(self, row: Row) -> None:
        if row.on_way:
            row.on_way = False
            self._on_their_way[row.born] -= 1

    def _end_lease(self, row: Row, stage: str) -> None:
        lease = self.leases[row.leases.pop(stage)]
        lease.rows.discard(row.id)
        self._stage_counts[stage]["leased"] -= 1
        if lease.step is not None and lease.step in self._handed:
            self._handed[lease.step] -= 1
        if not lease.rows:
            del self.leases[lease.id]
            held = self._session_leases[lease.session]
            held.discard(lease.id)
            if not held:
                del self._session_leases[lease.session]

    def _stages_of(self, row: Row) -> tuple[Stage, ...]:
        stages = self._by_split.get(row.split)
        if stages is None:
            stages = self._by_split[row.split] = tuple(s for s in self.flow.stages if row.split in s.splits)
        return stages

    def _advance(self, row: Row) -> None:
        """After a change to `row`: make it ready for what it can do next, or end it when nothing is left."""
        if row.id not in self.rows:
            # It ended with its group, a moment ago.
            return
        if all(stage.name in row.places for stage in self._stages_of(row)):
            self._end([row], "done", "")
        else:
            self._make_ready(row)

    def _make_ready(self, row: Row) -> None:
        for stage in self._stages_of(row):
            if stage.unit == "group":
                self._make_group_ready(row.group, stage)
            elif self._wants(stage, row) and stage.name not in row.ready:
                self._push(stage, row)
        if row.id in self.rows:
            self._recount(row)

    def _make_group_ready(self, group: Group, stage: Stage) -> None:
        """Once every member that is left wants `stage` (or has passed it), the group is ready.

        A group that has become too small to be compared ends.
        """
        wanting = [member for member in group.members if self._wants(stage, member)]
        passed = sum(stage.name in member.places for member in group.members)
        if not wanting or len(wanting) + passed < len(group.members) or stage.name in group.ready:
            return
        if len(group.members) < stage.min_members:
            self._end(tuple(group.members), "dropped", "group_too_small")
            return
        group.ready[stage.name] = wanting
        self._push(stage, wanting[0])
        for member in wanting:
            self._recount(member)

    def concerned(self, stage: Stage, row: Row) -> list[Row]:
        """The rows that are handed out together when `row` comes up for `stage`."""
        return row.group.ready[stage.name] if stage.unit == "group" else [row]

    def _wants(self, stage: Stage, row: Row) -> bool:
        """Whether the row has what `stage` reads, and neither its columns nor a lease of it."""
        return (
            row.step is None
            and stage.name not in row.places
            and stage.name not in row.leases
            and self._needs[stage.name] <= row.places.keys()
        )

    def _push(self, stage: Stage, row: Row) -> None:
        row.ready.add(stage.name)
        self._stage_counts[stage.name]["ready"] += len(self.concerned(stage, row))
        self._enqueue(stage, row)
        self.touched.add(stage.name)

    def _enqueue(self, stage: Stage, row: Row) -> None:
        heapq.heappush(self._ready[stage.name][self.line(stage, row)], self.rank(stage, row))

    def _unready(self, name: str, row: Row) -> None:
        if name in row.ready:
            self._stage_counts[name]["ready"] -= len(self.concerned(self.stages[name], row))
            row.ready.discard(name)
            row.group.ready.pop(name, None)

    def line(self, stage: Stage, row: Row) -> Line:
        """Where the row queues: its environment, and how admission treats it, so that nobody waits behind a row that
        may not start yet and is itself free to.
        """
        bound = stage.admits and self.is_bound(row)
        return row.env, "admitted" if bound and row.group.admitted else "bound" if bound else "free"

    @staticmethod
    def rank(stage: Stage, row: Row) -> Rank:
        """The order of hand-out: for the learner the oldest birth, which places are kept for; priority; admission."""
        return (row.born if stage.trains else 0, -row.priority, row.id)

    def _end(self, rows: Sequence[Row], how: str, reason: str) -> None:
        """End rows for good. The rest of their groups may be ready without them."""
        for row in rows:
            for stage in tuple(row.leases):
                self._end_lease(row, stage)
            for name in tuple(row.ready):
                self._unready(name, row)
            # A group that was ready with this member is so without it only once `_settle` says so.
            for name, concerned in list(row.group.ready.items()):
                self._unready(name, concerned[0])
            self._leave_way(row)
            if self.is_bound(row) and row.group.admitted:
                self._lost += 1
            self._uncount(row)
            self._ends[how, reason] += 1
            self._states[row.split, how] += 1
            self._remove(row)
        for group in {id(row.group): row.group for row in rows}.values():
            self._settle(group)
        if rows:
            self._touch_bound()

    def _remove(self, row: Row) -> None:
        """The row leaves the table, and with the last of its group the group's key is one of the past."""
        del self.rows[row.id]
        row.group.members.remove(row)
        self._note_gap(row.group)
        for place in row.places.values():
            self._release(place)
        if not row.group.members:
            self.past_keys[row.group.key] = self.keys.pop(row.group.key)
            if len(self.past_keys) > PAST_KEYS:
                self.past_keys.popitem(last=False)

    def _release(self, place: Place) -> None:
        self.references[place.record] -= 1
        if not self.references[place.record]:
            del self.references[place.record]
            self.freed.append(place.record)

    def _settle(self, group: Group) -> None:
        """After a member is gone, the rest may be ready without it."""
        if group.members:
            for stage in self._stages_of(group.members[0]):
                if stage.unit == "group" and group.members:
                    self._make_group_ready(group, stage)

    # -- counting

    def _state_of(self, row: Row) -> str:
        if row.step is not None:
            return "trained"
        if row.leases:
            return "leased"
        with_group = any(row in rows for rows in row.group.ready.values())
        if not (row.ready or with_group) or (self.is_bound(row) and not row.group.admitted):
            return "waiting"
        return "ready"

    def _count(self, row: Row) -> None:
        row.state = self._state_of(row)
        row.unstarted = row.state in ("waiting", "ready") and len(row.places) == 1
        self._states[row.split, row.state] += 1
        self._waiting_rollout += row.unstarted

    def _uncount(self, row: Row) -> None:
        self._states[row.split, row.state] -= 1
        self._waiting_rollout -= row.unstarted

    def _recount(self, row: Row) -> None:
        self._uncount(row)
        self._count(row)

    def statistics(self) -> Statistics:
        """Counts by state, stage and split."""
        totals: Counter[str] = Counter()
        by_split: dict[str, dict[str, int]] = {}
        for (split, state), n in sorted(self._states.items()):
            if n:
                totals[state] += n
                by_split.setdefault(split, {})[state] = n
        return Statistics(
            tasks=self._next_row - 1,
            waiting=totals["waiting"],
            leased=totals["leased"],
            ready=totals["ready"],
            trained=totals["trained"],
            done=totals["done"],
            dropped={reason: n for (how, reason), n in self._ends.items() if how == "dropped"},
            dead={reason: n for (how, reason), n in self._ends.items() if how == "dead"},
            by_split=by_split,
            stages={
                name: StageCount(counts["ready"], counts["leased"], counts["written"])
                for name, counts in self._stage_counts.items()
            },
            admitted=self._admitted,
            step=self.step,
            version=self.version,
            version_step=self.version_step(self.version),
            sources=dict(self.sources),
        )
