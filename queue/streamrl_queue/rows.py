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
from collections.abc import Iterator, Sequence
from typing import Final

from .config import Flow, Stage
from .errors import LeaseExpired, SchemaError, StepConflict, UnknownName, VersionConflict
from .events import (
    Committed,
    Configured,
    Dropped,
    EndCause,
    Ended,
    Fenced,
    Granted,
    Put,
    Reconciled,
    Retired,
    VersionBegun,
    VersionCommitted,
    Written,
)
from .picking import Pick, parked, stale
from .standing import Told
from .state import Lease, Row, Version
from .table import Table

# Leases among which the oldest are looked for: more than there are processes, few enough to hold up nobody.
LEASES_LOOKED_AT: Final = 1024


class Rows(Table):
    """The state machine: the decisions on top of the fold."""

    def room(self) -> int:
        """How many more rows may be put."""
        return self.flow.waiting_rows - self.census.unstarted

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
        filled: Sequence[str] = (),
        oldest: Sequence[int] = (),
        tokens: Sequence[int] = (),
    ) -> tuple[Put | None, tuple[int, ...], tuple[int, ...]]:
        """The event that makes rows of the keys not seen before, all row ids of `keys`, and which keys were there.

        With `filled`, `oldest` and `tokens` (or nothing) are those of all rows of all keys.
        """
        if not any(split in stage.splits for stage in self.flow.stages):
            raise UnknownName(f"split: no stage takes {split!r}; known: {', '.join(self._splits())}")
        if len(set(filled)) != len(filled):
            raise SchemaError(f"put: filled: expected every stage once, got {', '.join(filled)}")
        self._check_filled(filled, split, oldest)
        fresh = self._unknown(keys)
        if len(fresh) == len(keys):
            # As nearly always: nothing is put for the second time.
            numbers: Sequence[int] = range(len(keys))
            rows = tuple(range(self._next_row, self._next_row + len(keys) * members))
        else:
            line_of = {key: line for line, key in reversed([*enumerate(keys)])}
            numbers = [line_of[key] for key in fresh]
            first = {key: self._next_row + i * members for i, key in enumerate(fresh)}
            starts = (first[key] if key in first else self._first_row(key) for key in keys)
            rows = tuple(row for start in starts for row in range(start, start + members))
        lines = tuple(number * members for number in numbers) if filled else tuple(numbers)
        chosen = [line + member for line in lines for member in range(members)] if filled else ()
        event = Put(
            at,
            self._next_row,
            self._next_group,
            lines,
            members,
            tuple(fresh),
            tuple([envs[line] for line in lines]),
            split,
            priority,
            sources,
            tuple(filled),
            tuple(oldest[line] for line in chosen) if oldest else (),
            tuple(tokens[line] for line in chosen) if tokens else (),
        )
        known = tuple(sorted({*range(len(keys))} - {*numbers})) if len(numbers) < len(keys) else ()
        return (event if lines else None), rows, known

    def _check_filled(self, filled: Sequence[str], split: str, oldest: Sequence[int]) -> None:
        for stage in (self.stage(name) for name in filled):
            if split not in stage.splits or stage.trains:
                why = "trains rows" if stage.trains else f"does not take split {split!r}"
                raise UnknownName(f"put: filled: stage {stage.name} {why}")
            if missing := self._needs[stage.name] - set(filled):
                raise SchemaError(
                    f"put: filled: stage {stage.name} builds on {', '.join(sorted(missing))}; bring these columns too"
                )
        if unknown := sorted({version for version in oldest if version >= 0} - self.versions.keys()):
            raise SchemaError(
                f"put: filled: version {unknown[0]} was never begun here, so nobody knows how stale its rows are; "
                "bring rows that another policy sampled with mask 0 and without versions"
            )

    def fresh(self, keys: Sequence[str]) -> int:
        """How many groups a put of these keys would make."""
        return len(self._unknown(keys))

    def _unknown(self, keys: Sequence[str]) -> list[str]:
        """Those that were never put (as far as the past is remembered), each once."""
        known, past = self.keys, self.past_keys
        return [key for key in dict.fromkeys(keys) if key not in known and key not in past]

    def _first_row(self, key: str) -> int:
        """The first row of the group that was put with this key."""
        group = self.keys.get(key)
        return group.first if group is not None else self.past_keys[key]

    def _splits(self) -> list[str]:
        return sorted({split for stage in self.flow.stages for split in stage.splits})

    def lease(
        self,
        at: float,
        session: str,
        stage_name: str,
        *,
        rows: int = 1 << 31,
        at_least: int = 1,
        env: str | None = None,
        step: int | None = None,
        request: int = 0,
        keys: Sequence[str] | None = None,
    ) -> Granted | Dropped | None:
        """The grant of up to `rows` ready rows; None when fewer than `at_least` are ready.

        Rows that would pass the staleness bound are dropped first: then this is their end, which may end others, and
        the caller asks again. Of a stage that parks: the grant of all rows of the groups with these `keys`.
        """
        stage = self.stage(stage_name)
        if stage.trains and step != self.step + 1:
            raise StepConflict(f"lease of {stage.name}: expected step {self.step + 1} to assemble, got {step}")
        if not stage.trains and step is not None:
            raise StepConflict(f"lease of {stage.name}: expected no step, for it trains nothing; got {step}")
        if stage.parks != (keys is not None):
            raise UnknownName(
                f"lease of {stage.name}: it parks its rows; name the keys of those you want"
                if stage.parks
                else f"lease of {stage.name}: keys are for stages that park; this one hands out by itself"
            )
        if keys is not None:
            found = parked(self, stage, keys)
            ids = tuple(row.id for row in found)
            return self._grant(at, stage, session, ids, (), step, request) if ids else None
        if gone := stale(self, stage, step):
            return Dropped(at, gone, "stale")
        # Of few ready rows none is looked at; the count may be of rows that may not go, never of too few.
        if self.census.stages[stage.name]["ready"] < at_least:
            return None
        pick = Pick(self, stage, step)
        pick.fill(rows, env)
        if not pick.rows and at_least <= 1:
            pick.fill_gap(env)
        if len(pick.rows) < max(at_least, 1):
            return None
        return self._grant(at, stage, session, tuple(pick.rows), tuple(pick.admitted), step, request)

    def _grant(
        self,
        at: float,
        stage: Stage,
        session: str,
        rows: tuple[int, ...],
        admitted: tuple[int, ...],
        step: int | None,
        request: int,
    ) -> Granted:
        return Granted(at, self._next_lease, stage.name, session, rows, admitted, step, self.version, request)

    def peek(self, stage_name: str, rows: int) -> list[Row]:
        """Rows that are ready (or parked) for a stage, in the order of hand-out; whether admission lets them out is
        not asked.
        """
        stage = self.stage(stage_name)
        found: list[Row] = []
        for row in self._ready[stage.name].peek():
            found += self.concerned(stage, row)
            if len(found) >= rows:
                break
        return found[:rows]

    def longest_held(self, most: int) -> Iterator[Row]:
        """Of each stage that trains nothing, the `most` rows that are held longest, as far as that can be told from the
        first `LEASES_LOOKED_AT` leases.
        """
        left = {stage.name: most for stage in self.flow.stages if not stage.trains}
        for lease in itertools.islice(self.leases.values(), LEASES_LOOKED_AT):
            rows = sorted(itertools.islice(lease.rows, left.get(lease.stage, 0)))
            for id in rows:
                left[lease.stage] -= 1
                yield self.rows[id]

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
        past = self.past_leases.get(lease_id, {}).get("written", ())
        return bool(rows) and all(id in past or self._has_written(lease_id, id) for id in rows)

    def _has_written(self, lease_id: int, id: int) -> bool:
        row = self.rows.get(id)
        return row is not None and any(place.lease == lease_id for place in row.places.values())

    def told_before(self, lease_id: int, rows: Sequence[int] | None, how: Told) -> tuple[int, ...]:
        """`rows` (default: all that there are), if this lease has already been ended on them that way: then it is told
        again. Empty otherwise.
        """
        past = self.past_leases.get(lease_id, {}).get(how, set())
        if rows is None:
            return () if lease_id in self.leases else tuple(sorted(past))
        return tuple(rows) if past.issuperset(rows) else ()

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
        if not rows:
            raise SchemaError(f"write to {lease.stage}: expected the lease's rows or some of them, got none")
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

    def stragglers(self, now: float, at: float) -> Iterator[Dropped]:
        """The ends of members that their groups have waited for long enough. Each must be applied before the next is
        asked for.
        """
        while self._waits and self._waits[0][0] <= now:
            first = deadline, _, group, stage = self._waits[0]
            if group.waits.get(stage) == deadline:
                rows = (row.id for row in self.members(group, self.stages[stage]).missing)
                yield Dropped(at, tuple(sorted(rows)), "straggler")
            if self._waits and self._waits[0] is first:
                heapq.heappop(self._waits)

    def next_deadline(self) -> float | None:
        """When `expire` and `stragglers` should look again."""
        return min((heap[0][0] for heap in (self._deadlines, self._waits) if heap), default=None)

    def configure(self, at: float, flow: Flow) -> Configured | None:
        """The event after which rows pass the stages of `flow`; None when they do already.

        Raises:
            ConfigError: the rows that there are cannot pass them.
        """
        return Configured(at, flow.succeed(self.flow)) if flow != self.flow else None

    def extend(self, now: float, session: str, lease_id: int) -> tuple[int, ...]:
        """A sign of life: the lease's deadline starts anew. Not journaled; recovery starts all deadlines anew.

        Returns the rows that it still holds: some may have been dropped.
        """
        lease, rows = self.held(lease_id, session)
        if (seconds := self.stages[lease.stage].seconds) is not None:
            lease.deadline = now + seconds
        return rows

    def end_session(self, at: float, session: str, reason: str, cause: EndCause = "session") -> list[Ended]:
        """The ends of all leases of a session that is gone."""
        return [
            Ended(at, id, tuple(sorted(self.leases[id].rows)), cause, reason)
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
        self._require_training("commit")
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

    def _require_training(self, what: str) -> None:
        if not self.trains:
            raise UnknownName(f"{what}: no stage of this queue trains rows; rows end by a write to their last stage")

    def retire(self, at: float, through: int) -> Retired | None:
        """The event that lets the rows of steps up to `through` go; None when there are none left."""
        if through > self.step:
            raise StepConflict(f"retire through step {through}: only {self.step} steps are committed")
        return Retired(at, through) if any(step <= through for step in self._step_rows) else None

    def reconcile(self, at: float, step: int) -> Reconciled:
        """The event after which the learner goes on from `step`."""
        self._require_training("reconcile")
        if step > self.step:
            raise StepConflict(
                f"reconcile to step {step}: only {self.step} steps are committed; is this another run's checkpoint?"
            )
        gone = [s for s in range(step + 1, self.step + 1) if s not in self._step_rows]
        if gone:
            raise StepConflict(f"reconcile to step {step}: rows of step {gone[0]} are retired and cannot come back")
        return Reconciled(at, step)

    def fence(self, at: float, session: str, announced: int, reason: str) -> Fenced | None:
        """The event after which the session's announcements up to `announced` do not count; None when they do not."""
        known = self.fences.get(session)
        return Fenced(at, session, announced, reason) if known is None or known < announced else None

    def in_segment(self, segment: int) -> dict[tuple[int, str], list[int]]:
        """Where columns lie in one segment of the journal: record and stage → the rows."""
        found: dict[tuple[int, str], list[int]] = {}
        for row in self.rows.values():
            for stage, place in row.places.items():
                if place.record >> 32 == segment:
                    found.setdefault((place.record, stage), []).append(row.id)
        return found
