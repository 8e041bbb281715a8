"""The decisions of the queue. No clock, no socket, no file.

Every change is two moves. A *decision* (`put`, `lease`, `write`, …) looks at the state, raises when the request is
wrong, and returns events; it changes nothing that can be seen. `apply` (see `table.py`) folds one event into the
state and cannot fail. The broker journals an event between the two, so a restart folds the journal and stands where
it stood.

    decide ──► events ──► journal ──► apply ──► state
                             │                    ▲
                             └───── recovery ─────┘
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from . import admission
from .config import Admission, Stage
from .errors import LeaseExpired, StepConflict, UnknownName, VersionConflict
from .events import (
    Committed,
    Dropped,
    EndCause,
    Ended,
    Event,
    Granted,
    Put,
    Reconciled,
    Retired,
    VersionBegun,
    VersionCommitted,
    Written,
)
from .state import UNBORN, Lease, Line, Rank, Row, Version
from .table import Table


class Rows(Table):
    """The state machine: the decisions on top of the fold."""

    def room(self) -> int:
        """How many more rows may be put."""
        return self.flow.waiting_rows - self._waiting_rollout

    def put(
        self,
        at: float,
        keys: Sequence[str],
        envs: Sequence[str],
        *,
        members: int,
        split: str,
        priority: int,
        sources: dict[str, int],
    ) -> tuple[Put | None, tuple[int, ...], int]:
        """The event that makes rows of the keys not seen before, all row ids of `keys`, and the repeated keys."""
        if not any(split in stage.splits for stage in self.flow.stages):
            raise UnknownName(f"split: no stage takes {split!r}; known: {', '.join(self._splits())}")
        fresh: dict[str, int] = {}
        for line, key in enumerate(keys):
            if self._first_row(key) is None and key not in fresh:
                fresh[key] = line
        lines = tuple(fresh.values())
        first = {key: self._next_row + i * members for i, key in enumerate(fresh)}
        starts = [first.get(key) or self._first_row(key) or 0 for key in keys]
        rows = tuple(row for start in starts for row in range(start, start + members))
        event = Put(
            at,
            self._next_row,
            self._next_group,
            lines,
            members,
            tuple(fresh),
            tuple(envs[line] for line in lines),
            split,
            priority,
            sources,
        )
        return (event if lines else None), rows, len(keys) - len(lines)

    def fresh(self, keys: Sequence[str]) -> int:
        """How many groups a put of these keys would make."""
        return sum(self._first_row(key) is None for key in dict.fromkeys(keys))

    def _first_row(self, key: str) -> int | None:
        """The first row of the group with this key, if it was ever put (as far as the past is remembered)."""
        return self.keys.get(key) or self.past_keys.get(key)

    def _splits(self) -> list[str]:
        return sorted({split for stage in self.flow.stages for split in stage.splits})

    def lease(
        self,
        at: float,
        session: str,
        stage_name: str,
        *,
        rows: int,
        at_least: int = 1,
        env: str | None = None,
        step: int | None = None,
        request: int = 0,
    ) -> list[Event]:
        """The grant of up to `rows` ready rows, or no grant when fewer than `at_least` are ready.

        Rows that would pass the staleness bound are dropped on the way, by an event of their own.
        """
        stage = self.stage(stage_name)
        if stage.trains and (step is None or step <= self.step):
            raise StepConflict(f"lease of {stage.name}: expected a step after {self.step} to assemble; got {step}")
        stale = self._stale(stage, step)
        events: list[Event] = [Dropped(at, stale, "stale")] if stale else []
        picked, admitted = self._pick(stage, rows, env, step, frozenset(stale))
        if len(picked) < max(at_least, 1):
            self._give_back(stage, picked)
            return events
        ids = tuple(row.id for row in picked)
        return [*events, Granted(at, self._next_lease, stage.name, session, ids, admitted, step, self.version, request)]

    def _stale(self, stage: Stage, step: int | None) -> tuple[int, ...]:
        """Ready rows that training in `step` would take past the bound."""
        bound = self.flow.admission
        if not stage.trains or step is None or bound is None or bound.on_stale == "keep":
            return ()
        # A stale row's birth has a bucket of its own, so nothing is searched when there is none.
        if not any(n and admission.is_stale(bound, born=b, step=step) for b, n in self._on_their_way.items()):
            return ()
        ready = (self.rows.get(id) for heap in self._ready[stage.name].values() for _, _, id in heap)
        return tuple(
            sorted(
                {
                    row.id
                    for row in ready
                    if row and stage.name in row.ready and admission.is_stale(bound, born=row.born, step=step)
                }
            )
        )

    def _pick(
        self, stage: Stage, rows: int, env: str | None, step: int | None, skip: frozenset[int]
    ) -> tuple[list[Row], tuple[int, ...]]:
        """Take the next rows out of the ready heaps (whole groups for a group stage), and the groups this admits.

        The caller grants them all or gives them all back.
        """
        heaps = self._ready[stage.name]
        lines = [line for line in heaps if env is None or line[0] == env]
        picked: dict[int, Row] = {}
        admitted: dict[int, None] = {}
        while len(picked) < rows:
            lines = [line for line in lines if self._head(stage, line, picked, skip)]
            if not lines:
                break
            line = min(lines, key=lambda x: heaps[x][0])
            row = self.rows[heaps[line][0][2]]
            if not self._may_take(stage, row, step, picked, admitted):
                lines.remove(line)
                continue
            heapq.heappop(heaps[line])
            if stage.admits and self.is_bound(row) and not row.group.admitted:
                admitted[row.group.id] = None
            picked |= {r.id: r for r in self.concerned(stage, row)}
        return list(picked.values()), tuple(admitted)

    def _head(self, stage: Stage, line: Line, picked: dict[int, Row], skip: frozenset[int]) -> bool:
        """Clear entries at the front of a queue that no longer hold; tells whether one is left."""
        heap = self._ready[stage.name][line]
        while heap:
            row = self.rows.get(heap[0][2])
            holds = row is not None and stage.name in row.ready and self.rank(stage, row) == heap[0]
            holds = holds and row is not None and self.line(stage, row) == line
            if holds and heap[0][2] not in picked and heap[0][2] not in skip:
                return True
            heapq.heappop(heap)
        return False

    def peek(self, stage_name: str, rows: int) -> list[Row]:
        """Rows that are ready for a stage, in the order of hand-out; whether admission lets them out is not asked."""
        stage = self.stage(stage_name)
        found: dict[int, Row] = {}
        for rank in heapq.merge(*(_in_order(heap) for heap in self._ready[stage.name].values())):
            row = self.rows.get(rank[2])
            if row is not None and stage.name in row.ready and self.rank(stage, row) == rank:
                found |= {r.id: r for r in self.concerned(stage, row)}
            if len(found) >= rows:
                break
        return list(found.values())[:rows]

    def _give_back(self, stage: Stage, picked: list[Row]) -> None:
        for row in picked:
            if stage.name in row.ready:
                self._enqueue(stage, row)

    def _may_take(
        self, stage: Stage, row: Row, step: int | None, picked: dict[int, Row], admitted: dict[int, None]
    ) -> bool:
        bound = self.flow.admission
        if bound is None or not self.is_bound(row):
            return True
        if stage.admits:
            return self._may_start(bound, row, picked, admitted)
        if stage.trains and step is not None:
            return self._may_train(bound, row, step, picked)
        return True

    def _may_start(self, bound: Admission, row: Row, picked: dict[int, Row], admitted: dict[int, None]) -> bool:
        trained = self._trained_at(self.version)
        if not row.group.admitted and row.group.id not in admitted:
            pending = len(admitted) * len(row.group.members)
            return admission.may_admit(bound, admitted=self._admitted + pending, lost=self._lost, trained=trained)
        started = self._trained_through[self.step] + self._on_their_way.total() + self._handed.total() + len(picked)
        if admission.may_start(bound, started=started, trained=trained):
            return True
        # One row at a time: it may be the one that was missing.
        begun = any(member.born != UNBORN for member in row.group.members)
        return begun and not picked and self._is_stuck(bound)

    def _is_stuck(self, bound: Admission) -> bool:
        """Whether the learner's next step cannot be filled before groups that have begun are complete.

        Rows that were lost leave places for a part of a group only; what such a group has too many may become stale.
        """
        if self.version_step(self.version) != self.step:
            # The next version makes room.
            return False
        incomplete = Counter(m.born for group in self._gaps.values() for m in group.members if m.on_way)
        coming = self._on_their_way - incomplete
        handed, step = self._handed[self.step + 1], self.step + 1
        if handed >= bound.rows_per_step:
            return False
        return not coming or not admission.may_train(
            bound, born=min(coming), step=step, handed=handed, on_their_way=self._on_their_way
        )

    def _may_train(self, bound: Admission, row: Row, step: int, picked: dict[int, Row]) -> bool:
        on_their_way = self._on_their_way - Counter(other.born for other in picked.values())
        handed = self._handed[step] + len(picked)
        return admission.may_train(bound, born=row.born, step=step, handed=handed, on_their_way=on_their_way)

    def _trained_at(self, version: int) -> int:
        """Rows trained in steps up to the step of `version`."""
        step = self.version_step(version)
        while step not in self._trained_through:
            step -= 1
        return self._trained_through[step]

    def held(self, lease_id: int, session: str, rows: Sequence[int] | None = None) -> tuple[Lease, tuple[int, ...]]:
        """The lease, and `rows` (default: all of it), if `session` still holds them.

        Raises:
            LeaseExpired: naming the rows that are lost.
        """
        lease = self.leases.get(lease_id)
        if lease is None or lease.session != session:
            raise LeaseExpired(f"lease {lease_id} is over; its rows were handed out again or have ended")
        wanted = tuple(sorted(lease.rows)) if rows is None else tuple(rows)
        if lost := [row for row in wanted if row not in lease.rows]:
            raise LeaseExpired(f"lease {lease_id} of {lease.stage} no longer holds rows {lost[:8]}")
        if len(set(wanted)) != len(wanted):
            raise LeaseExpired(f"lease {lease_id} of {lease.stage}: a row is named twice in {wanted[:8]}")
        return lease, wanted

    def written_before(self, lease_id: int, rows: Sequence[int]) -> bool:
        """Whether exactly this lease has already written all of `rows`: then a write is a repetition."""
        return bool(rows) and all(
            (row := self.rows.get(id)) is not None and lease_id in row.writers.values() for id in rows
        )

    def write(
        self,
        at: float,
        session: str,
        lease_id: int,
        rows: Sequence[int],
        oldest: Sequence[int],
        tokens: Sequence[int],
    ) -> Written:
        """The event that fills the stage's columns of `rows` and ends the lease on them."""
        lease, rows = self.held(lease_id, session, rows)
        if self.stages[lease.stage].trains:
            raise UnknownName(f"stage {lease.stage} is ended by commit, not by write")
        return Written(at, lease_id, lease.stage, tuple(rows), tuple(oldest), tuple(tokens))

    def release(
        self, at: float, session: str, lease_id: int, rows: Sequence[int] | None, cause: EndCause, reason: str
    ) -> Ended:
        """The event that gives rows back unwritten."""
        _, rows = self.held(lease_id, session, rows)
        return Ended(at, lease_id, tuple(rows), cause, reason)

    def drop(self, at: float, session: str, lease_id: int, rows: Sequence[int] | None, reason: str) -> Dropped:
        """The event that ends leased rows untrained."""
        _, rows = self.held(lease_id, session, rows)
        return Dropped(at, tuple(rows), reason)

    def expire(self, now: float, at: float) -> Iterator[Ended]:
        """The ends of all leases whose deadline has passed. Each must be applied before the next is asked for."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, id = self._deadlines[0]
            lease = self.leases.get(id)
            if lease is not None and lease.deadline <= now:
                yield Ended(at, id, tuple(sorted(lease.rows)), "expired", "lease deadline")
            heapq.heappop(self._deadlines)
            if lease is not None and lease.deadline > deadline:
                heapq.heappush(self._deadlines, (lease.deadline, id))

    def next_deadline(self) -> float | None:
        """When `expire` should look again."""
        return self._deadlines[0][0] if self._deadlines else None

    def extend(self, now: float, session: str, lease_id: int) -> None:
        """A sign of life: the lease's deadline starts anew. Not journaled; recovery starts all deadlines anew."""
        lease, _ = self.held(lease_id, session)
        if (seconds := self.stages[lease.stage].seconds) is not None:
            lease.deadline = now + seconds

    def end_session(self, at: float, session: str, reason: str) -> list[Ended]:
        """The ends of all leases of a session that is gone."""
        return [
            Ended(at, id, tuple(sorted(self.leases[id].rows)), "session", reason)
            for id in sorted(self._session_leases.get(session, ()))
        ]

    def drop_unfinished(self, at: float, split: str, reason: str) -> Dropped | None:
        """The event that ends every row of `split` that has not ended, e.g. because the run is over."""
        rows = tuple(id for id, row in self.rows.items() if row.split == split and row.step is None)
        return Dropped(at, rows, reason) if rows else None

    def granted(self, session: str, request: int) -> Lease | None:
        """The lease that this request was given before, when its reply was lost."""
        held = (self.leases[id] for id in self._session_leases.get(session, ()))
        return next((lease for lease in held if lease.request == request), None)

    def begun(self, request: str) -> Version | None:
        """The version that this request took before, when its reply was lost."""
        newest = self.versions.get(max(self.versions, default=0))
        return newest if newest and newest.request == request else None

    def begin_version(self, at: float, step: int, parent: int | None, request: str = "") -> VersionBegun:
        """The event that takes the next version id."""
        if parent is not None and parent not in self.versions:
            raise UnknownName(f"version: parent {parent} was never begun")
        return VersionBegun(at, max(self.versions, default=0) + 1, step, parent, request)

    def commit_version(self, at: float, version: int, digest: str) -> VersionCommitted | None:
        """The event that makes `version` exist; None when it already does, with the same digest."""
        known = self.versions.get(version)
        if known is None:
            raise VersionConflict(f"version {version} was never begun; call begin_version for a fresh id")
        if known.committed:
            if known.digest != digest:
                raise VersionConflict(f"version {version} exists with digest {known.digest}, got {digest}")
            return None
        if version < self.version:
            raise VersionConflict(f"version {version} is older than the committed version {self.version}")
        return VersionCommitted(at, version, digest)

    def commit(self, at: float, session: str, step: int, rows: Sequence[int]) -> Committed | None:
        """The event that records a training step; None when it is recorded already, with the same rows."""
        ids = tuple(sorted(rows))
        if step in self._step_rows:
            if self._step_rows[step] != ids:
                raise StepConflict(f"step {step} was committed with other rows; a step is committed once")
            return None
        if step != self.step + 1:
            raise StepConflict(f"commit: expected step {self.step + 1}, got {step}")
        if twice := sorted({a for a, b in itertools.pairwise(ids) if a == b}):
            raise LeaseExpired(f"commit of step {step}: rows {twice[:8]} are named twice; their first lease was lost")
        for id in ids:
            row = self.rows.get(id)
            lease = self.leases.get(row.leases.get(self._trains, 0)) if row else None
            if lease is None or lease.session != session or lease.step != step:
                raise LeaseExpired(f"commit of step {step}: row {id} is not leased to this session for this step")
        return Committed(at, step, ids)

    def retire(self, at: float, through: int) -> Retired | None:
        """The event that lets the rows of steps up to `through` go; None when there are none left."""
        if through > self.step:
            raise StepConflict(f"retire through step {through}: only {self.step} steps are committed")
        return Retired(at, through) if any(step <= through for step in self._step_rows) else None

    def reconcile(self, at: float, step: int) -> Reconciled:
        """The event after which the learner goes on from `step`."""
        if step > self.step:
            raise StepConflict(
                f"reconcile to step {step}: only {self.step} steps are committed; is this another run's checkpoint?"
            )
        gone = [s for s in range(step + 1, self.step + 1) if s not in self._step_rows]
        if gone:
            raise StepConflict(f"reconcile to step {step}: rows of step {gone[0]} are retired and cannot come back")
        return Reconciled(at, step)

    def in_segment(self, segment: int) -> dict[tuple[int, str], list[int]]:
        """Where columns lie in one segment of the journal: record and stage → the rows."""
        found: dict[tuple[int, str], list[int]] = {}
        for row in self.rows.values():
            for stage, place in row.places.items():
                if place.record >> 32 == segment:
                    found.setdefault((place.record, stage), []).append(row.id)
        return found


def _in_order(heap: list[Rank]) -> Iterator[Rank]:
    """The smallest entries of a heap first, as many as are asked for, without taking one out."""
    front = [(heap[0], 0)] if heap else []
    while front:
        rank, place = heapq.heappop(front)
        yield rank
        for child in (2 * place + 1, 2 * place + 2):
            if child < len(heap):
                heapq.heappush(front, (heap[child], child))
