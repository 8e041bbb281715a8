"""How rows stand: what each is ready for, which groups are complete, how rows end, and the counts of all that.

A row is in exactly one state: waiting (for admission, for its group, for another stage's write), ready, parked (until
somebody names its key), leased, or ended: trained, done, dropped or dead.

A group is ready for a group stage when every member that is left wants the stage or has passed it. Where the stage has
`partial`, a clock runs once that many are there; `Rows.stragglers` ends the rest when it has run out.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from .census import Census
from .config import Flow, Stage
from .errors import UnknownName
from .ready import ReadyQueue
from .recent import remember
from .state import UNBORN, Group, Lease, Line, Place, Row, Statistics, Version

# Keys of ended groups that are still recognised when they are put again.
PAST_KEYS: Final = 1 << 16
# Rows whose lease was ended by its holder, and who may say so again when the reply got lost: those of the last minutes.
PAST_ROWS: Final = 1 << 16

# How a holder ends its lease on a row.
Told = Literal["written", "released", "dropped"]
# How a row ends that was not trained.
How = Literal["done", "dropped", "dead"]


class Path(NamedTuple):
    """The stages that rows of one split pass: their names, those that admit, those of unit row with what they build
    on, those of these that build on nothing, and those of unit group.
    """

    names: frozenset[str]
    admitting: frozenset[str]
    single: tuple[tuple[Stage, frozenset[str]], ...]
    first: tuple[Stage, ...]
    grouped: tuple[Stage, ...]


class Members(NamedTuple):
    """The members of a group, as one group stage sees them: those that could be handed out, those it still lacks, and
    how many it has or had.
    """

    wanting: list[Row]
    missing: list[Row]
    passed: int
    held: int


class Standing:
    """Rows, groups, leases and counts. `Table` changes them, event by event."""

    def __init__(self, flow: Flow) -> None:
        self.rows: dict[int, Row] = {}
        self.leases: dict[int, Lease] = {}
        self._session_leases: defaultdict[str, set[int]] = defaultdict(set)
        self._deadlines: list[tuple[float, int]] = []
        # Deadline of a group's stragglers, a number, the group, the stage. It is over when `Group.waits` lacks it.
        self._waits: list[tuple[float, int, Group, str]] = []
        # Stages that gained ready rows, or room, since the broker last looked.
        self.touched: set[str] = set()
        # Key → its group, while that has live rows; and the first row of groups that ended lately.
        self.keys: dict[str, Group] = {}
        self.past_keys: OrderedDict[str, int] = OrderedDict()
        # Lease → how its holder ended it → on which rows; of the leases that ended last, and how many rows these are.
        self.past_leases: OrderedDict[int, dict[Told, set[int]]] = OrderedDict()
        self._past_rows = 0
        # Record → how many places refer to it; and records that lost their last one since the broker last looked.
        self.references: Counter[int] = Counter()
        self.freed: list[int] = []
        # Split → trained rows that have left the table.
        self.retired: Counter[str] = Counter()
        self.sources: dict[str, int] = {}
        self.versions: dict[int, Version] = {}
        # Session → the last of its announcements that does not count.
        self.fences: OrderedDict[str, int] = OrderedDict()
        self.version = 0
        self.step = 0
        self._now = 0.0
        self._numbers = itertools.count(1)
        self._next_row = self._next_group = self._next_lease = 1
        self._admitted = self._lost = 0
        # Admitted groups with members that have not started, or must start again.
        self._gaps: dict[int, Group] = {}
        # Step → rows trained in all steps up to it. Step 0 trained none.
        self._trained_through: dict[int, int] = {0: 0}
        self._step_rows: dict[int, tuple[int, ...]] = {}
        # Step → rows born under it that are not in the learner's hands: those that were admitted, for which places
        # are kept, and those from outside of admission that are ready to be trained.
        self._on_their_way: Counter[int] = Counter()
        self._from_outside: Counter[int] = Counter()
        # Step → rows in the learner's hands for it.
        self._handed: Counter[int] = Counter()
        self.census = Census()
        self._configure(flow)

    def _configure(self, flow: Flow) -> None:
        self.flow = flow
        self.stages: dict[str, Stage] = {stage.name: stage for stage in flow.stages}
        self.writer = flow.writers()
        self._needs = flow.needs()
        self._paths: dict[str, Path] = {}
        self._trains = next((stage.name for stage in flow.stages if stage.trains), "")
        self._ready = {stage.name: ReadyQueue(stage, flow, self.rows) for stage in flow.stages}
        self.census.configure(flow)

    def stage(self, name: str) -> Stage:
        """The stage of that name.

        Raises:
            UnknownName: listing the stages there are.
        """
        if name not in self.stages:
            raise UnknownName(f"stage: no stage {name!r}; the stages are {', '.join(self.stages)}")
        return self.stages[name]

    @property
    def trains(self) -> bool:
        """Whether some stage trains rows: then the columns of trajectories, rewards and advantages mean just that."""
        return bool(self._trains)

    def version_step(self, version: int) -> int:
        """The optimizer step after which `version` was made; 0 when there is no such version."""
        return self.versions[version].step if version in self.versions else 0

    def trained_at(self, version: int) -> int:
        """Rows trained in steps up to the step of `version`; none, for one of a step before all that still counts."""
        return self._trained_through.get(min(self.version_step(version), self.step), 0)

    # -- readiness

    def path(self, split: str) -> Path:
        """The stages that rows of `split` pass."""
        path = self._paths.get(split)
        if path is None:
            stages = [stage for stage in self.flow.stages if split in stage.splits]
            single = tuple((stage, self._needs[stage.name]) for stage in stages if stage.unit == "row")
            grouped = tuple(stage for stage in stages if stage.unit == "group")
            admitting = frozenset(stage.name for stage in stages if stage.admits)
            names = frozenset(stage.name for stage in stages)
            first = tuple(stage for stage, needs in single if not needs)
            path = self._paths[split] = Path(names, admitting, single, first, grouped)
        return path

    def _advance(self, rows: Iterable[Row]) -> None:
        """After a change to them: make rows ready for what they can do next, or end those for which nothing is left.

        Their groups are left to `_settle`.
        """
        done: list[Row] = []
        here: list[Row] = []
        able: dict[str, list[Row]] = {}
        known, split, path = self.rows, None, None
        for row in rows:
            if row.id not in known:
                # It ended with its group, a moment ago.
                continue
            if path is None or row.split != split:
                split, path = row.split, self.path(row.split)
            places = row.places
            # The comparison of numbers is the cheaper one, and nearly always enough.
            if len(places) > len(path.names) and path.names <= places.keys():
                done.append(row)
                continue
            here.append(row)
            if row.step is None:
                for stage, needs in path.single:
                    name = stage.name
                    open_here = name not in places and name not in row.ready and name not in row.leases
                    if open_here and needs <= places.keys():
                        able.setdefault(name, []).append(row)
        for name, ready in able.items():
            self._push(self.stages[name], ready)
        self.census.recount(here)
        if done:
            self._end(done, "done", "")

    @staticmethod
    def _is_open(stage: str, row: Row) -> bool:
        return stage not in row.places and stage not in row.leases and row.step is None

    def _wants(self, stage: Stage, row: Row) -> bool:
        """Whether the row has what `stage` reads, and neither its columns nor a lease of it."""
        return self._needs[stage.name] <= row.places.keys() and self._is_open(stage.name, row)

    def _settle(self, group: Group) -> None:
        """After a change to its members, a group may be ready, or have to wait for the rest."""
        if group.members:
            for stage in self.path(group.members[0].split).grouped:
                if group.members:
                    self._make_group_ready(group, stage)

    def _make_group_ready(self, group: Group, stage: Stage) -> None:
        """Once every member that is left wants `stage` (or has passed it), the group is ready.

        A group that has become too small to be compared ends.
        """
        if stage.name in group.ready:
            return
        wanting, missing, passed, held = self.members(group, stage)
        if missing or held or not wanting:
            self._wait_for(group, stage, there=len(wanting) + passed + held if missing else 0)
            return
        group.waits.pop(stage.name, None)
        if len(group.members) < stage.min_members:
            self._end([row for row in group.members if row.step is None], "dropped", "group_too_small")
            return
        group.ready[stage.name] = wanting
        self._push(stage, wanting[:1])
        self.census.recount(wanting)

    def members(self, group: Group, stage: Stage) -> Members:
        """How the members of a group stand to a group stage."""
        wanting, missing, passed, held = [], [], 0, 0
        for member in group.members:
            if stage.name in member.places or member.step is not None:
                passed += 1
            elif stage.name in member.leases:
                held += 1
            elif self._wants(stage, member):
                wanting.append(member)
            else:
                missing.append(member)
        return Members(wanting, missing, passed, held)

    def _wait_for(self, group: Group, stage: Stage, there: int) -> None:
        """Start the clock for the members that are missing once enough are there; stop it when they no longer are."""
        if stage.partial is None or stage.straggler_seconds is None:
            return
        if there < stage.partial:
            group.waits.pop(stage.name, None)
        elif stage.name not in group.waits:
            deadline = group.waits[stage.name] = self._now + stage.straggler_seconds
            heapq.heappush(self._waits, (deadline, next(self._numbers), group, stage.name))

    def concerned(self, stage: Stage, row: Row) -> Sequence[Row]:
        """The rows that are handed out together when `row` comes up for `stage`."""
        return row.group.ready[stage.name] if stage.unit == "group" else (row,)

    def _push(self, stage: Stage, rows: Iterable[Row]) -> None:
        """The rows are ready from now on; of a group stage, the whole groups that they stand for."""
        name, grouped = stage.name, stage.unit == "group"
        queue, numbers, line = self._ready[name], self._numbers, self.line
        pushed = 0
        for row in rows:
            members = row.group.ready[name] if grouped else (row,)
            born = min(member.born for member in members) if grouped else row.born
            entry = queue.rank(row, born, next(numbers))
            for member in members:
                member.ready[name] = entry
                if stage.trains and member.outside:
                    self._see(member)
            pushed += len(members)
            queue.push(line(stage, row), entry)
        self.census.stages[name]["ready"] += pushed
        self.touched.add(name)

    def _enqueue(self, stage: Stage, row: Row) -> None:
        self._ready[stage.name].push(self.line(stage, row), row.ready[stage.name])

    def _queue_again(self, row: Row) -> None:
        """Its place in the queues is another than before: what orders it has changed."""
        for name, before in list(row.ready.items()):
            stage, first = self.stages[name], self.rows[before[3]]
            rows = self.concerned(stage, first)
            entry = self._ready[name].rank(first, min(member.born for member in rows), before[2])
            for member in rows:
                member.ready[name] = entry
            self._enqueue(stage, first)

    def _unready(self, name: str, rows: Iterable[Row]) -> None:
        """The rows are no longer ready for a stage, nor are those that would be handed out with them."""
        gone = 0
        for row in rows:
            if name not in row.ready:
                continue
            members = row.group.ready.pop(name, None) or (row,)
            gone += len(members)
            for member in members:
                del member.ready[name]
            if len(members) > 1:
                self.census.recount(member for member in members if member is not row)
        self.census.stages[name]["ready"] -= gone

    def line(self, stage: Stage, row: Row) -> Line:
        """Where the row queues: its environment, and how the staleness bound treats it, so that nobody waits behind a
        row that may not go yet and is itself free to.
        """
        if stage.admits and row.bound:
            return row.env, "admitted" if row.group.admitted else "bound"
        return row.env, "outside" if stage.trains and row.outside else "free"

    def ready_order(self) -> tuple[tuple[str, int], ...]:
        """Stage and row (of a group, its first) in the order of becoming ready, where a stage hands out by that."""
        names = [stage.name for stage in self.flow.stages if stage.order == "ready_first"]
        ready = [(row.ready[name][2], name, row.id) for name in names for row in self._ready[name].ready()]
        return tuple((name, id) for _, name, id in sorted(ready))

    def _make_all_ready(self, order: Iterable[tuple[str, int]]) -> None:
        """Derive from the columns that rows have what they are ready for; those in `order` become so first."""
        for name, id in order:
            stage, row = self.stages[name], self.rows[id]
            if stage.unit == "group":
                self._make_group_ready(row.group, stage)
            elif name not in row.ready and self._wants(stage, row):
                self._push(stage, (row,))
        for row in list(self.rows.values()):
            if row.step is None:
                self._advance([row])
        for group in list(self.keys.values()):
            self._settle(group)

    # -- the staleness bound

    def _admit(self, group: Group) -> None:
        group.admitted = True
        self._admitted += len(group.members)
        self.census.recount(group.members)
        for member in group.members:
            if member.ready:
                self._queue_again(member)

    def oldest_birth(self) -> int | None:
        """The earliest step under which a row was born that is on its way to the learner; None when there is none."""
        births = (*self._on_their_way, *self._from_outside)
        return min((born for born in births if born != UNBORN), default=None)

    def _see(self, row: Row) -> None:
        """A row from outside of admission is ready to be trained: it takes a place like one that was admitted."""
        if row.outside == "unseen":
            row.outside = "seen"
            self._admitted += 1
            self._enter_way(row)

    def _note_gap(self, group: Group) -> None:
        if group.admitted and any(member.born == UNBORN for member in group.members):
            self._gaps[group.id] = group
        else:
            self._gaps.pop(group.id, None)

    def _touch_bound(self) -> None:
        """There may be room again under the staleness bound: to start, and to overtake."""
        self.touched.update(stage.name for stage in self.flow.stages if stage.admits or stage.trains)

    def _set_born(self, row: Row, step: int) -> None:
        if row.born == step:
            return
        on_way = row.on_way or row.born == UNBORN
        self._leave_way(row)
        row.born = step
        if on_way:
            self._enter_way(row)
        if row.ready:
            self._queue_again(row)

    def _enter_way(self, row: Row) -> None:
        if row.on_way:
            return
        if row.outside == "seen":
            self._from_outside[row.born] += 1
        elif row.bound and row.born != UNBORN:
            self._on_their_way[row.born] += 1
        else:
            return
        row.on_way = True

    def _leave_way(self, row: Row) -> None:
        if row.on_way:
            row.on_way = False
            way = self._from_outside if row.outside else self._on_their_way
            way[row.born] -= 1
            if not way[row.born]:
                # Or a long run is slow in the end: births are looked through for every lease.
                del way[row.born]

    # -- leases and ends

    def _note_told(self, lease: int, how: Told, rows: Sequence[int]) -> None:
        self.past_leases.setdefault(lease, {}).setdefault(how, set()).update(rows)
        self._past_rows += len(rows)
        while self._past_rows > PAST_ROWS:
            _, gone = self.past_leases.popitem(last=False)
            self._past_rows -= sum(map(len, gone.values()))

    def _end_lease(self, row: Row, stage: str) -> None:
        self._end_part(self.leases[row.leases[stage]], [row])

    def _end_part(self, lease: Lease, rows: Sequence[Row]) -> None:
        """The lease is over for some of its rows."""
        for row in rows:
            del row.leases[lease.stage]
            lease.rows.discard(row.id)
        self.census.stages[lease.stage]["leased"] -= len(rows)
        if lease.step is not None and lease.step in self._handed:
            self._handed[lease.step] -= len(rows)
        if not lease.rows:
            del self.leases[lease.id]
            held = self._session_leases[lease.session]
            held.discard(lease.id)
            if not held:
                del self._session_leases[lease.session]

    def _end(self, rows: Sequence[Row], how: How, reason: str) -> None:
        """End rows for good. The rest of their groups may be ready without them."""
        for row in rows:
            for stage in tuple(row.leases):
                if how == "dropped":
                    self._note_told(row.leases[stage], "dropped", (row.id,))
                self._end_lease(row, stage)
            for name in tuple(row.ready):
                self._unready(name, (row,))
            # A group that was ready with this member is so without it only once `_settle` says so.
            if row.group.ready:
                for name, concerned in tuple(row.group.ready.items()):
                    self._unready(name, concerned[:1])
                    self.census.recount(concerned[:1])
            self._leave_way(row)
            if (row.bound and row.group.admitted) or row.outside == "seen":
                self._lost += 1
            self.census.end(row, how, reason)
            self._remove(row)
        for group in {row.group.id: row.group for row in rows if row.group.members}.values():
            self._settle(group)
        if rows:
            self._touch_bound()

    def _remove(self, row: Row) -> None:
        """The row leaves the table, and with the last of its group the group's key is one of the past."""
        del self.rows[row.id]
        row.group.members.remove(row)
        if row.group.admitted:
            self._note_gap(row.group)
        for place in row.places.values():
            self._release(place)
        if not row.group.members:
            row.group.waits.clear()
            del self.keys[row.group.key]
            remember(self.past_keys, row.group.key, row.group.first, PAST_KEYS)

    def _release(self, place: Place) -> None:
        self.references[place.record] -= 1
        if not self.references[place.record]:
            del self.references[place.record]
            self.freed.append(place.record)

    def statistics(self) -> Statistics:
        """Counts by state, stage and split."""
        totals, by_split = self.census.totals()
        return Statistics(
            tasks=self._next_row - 1,
            waiting=totals["waiting"],
            leased=totals["leased"],
            ready=totals["ready"],
            parked=totals["parked"],
            trained=totals["trained"],
            done=totals["done"],
            dropped=self.census.reasons("dropped"),
            dead=self.census.reasons("dead"),
            by_split=by_split,
            stages={stage.name: self.census.stage(stage.name, parks=stage.parks) for stage in self.flow.stages},
            admitted=self._admitted,
            step=self.step,
            version=self.version,
            version_step=self.version_step(self.version),
            sources=dict(self.sources),
        )
