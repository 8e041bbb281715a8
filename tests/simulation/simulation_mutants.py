"""Small faults planted in the core, each as a set of attributes that replace those of the code.

A simulator that lets one of them pass is not worth its running time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from streamrl_queue import admission, snapshot
from streamrl_queue import events as e
from streamrl_queue import messages as m
from streamrl_queue.broker import Broker
from streamrl_queue.errors import LeaseExpired
from streamrl_queue.journal import Journal
from streamrl_queue.ready import ReadyQueue
from streamrl_queue.rows import Rows
from streamrl_queue.sessions import Sessions
from streamrl_queue.state import Group, Lease, Line, Rank, Row
from streamrl_queue.store import Store
from streamrl_queue.table import Table


class Mutant(NamedTuple):
    """`patches` are (object, attribute, replacement). `hint` is a seed that caught it, under `faults`.

    One that `crashes` the broker by an error of its own (which no unchanged broker does) counts as caught by that.
    """

    name: str
    hint: int
    patches: tuple[tuple[object, str, Any], ...]
    crashes: bool = False
    faults: str = "random"


MUTANTS: list[Mutant] = []


def mutant(
    target: object, attribute: str, hint: int = 0, *, faults: str = "random"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function, whose name is the mutant's, replaces `target.attribute`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        MUTANTS.append(Mutant(function.__name__, hint, ((target, attribute, function),), False, faults))
        return function

    return register


expire, end_session, lease, commit, held = Rows.expire, Rows.end_session, Rows.lease, Rows.commit, Rows.held
begin_version, release, stragglers = Rows.begin_version, Rows.release, Rows.stragglers
apply_granted, apply_ended, apply_reconciled = Table._apply_granted, Table._apply_ended, Table._apply_reconciled
end, push, record, recover, dump = Table._end, ReadyQueue.push, Store.record, Journal.recover, snapshot.dump
broker_commit, broker_begin = Broker._commit, Broker._begin_version


@mutant(Rows, "expire")
def a_lease_is_not_expired_at_its_deadline(self: Rows, now: float, at: float) -> Iterator[e.Ended]:
    return iter(())


@mutant(Rows, "extend")
def a_sign_of_life_is_ignored(self: Rows, now: float, session: str, lease_id: int) -> tuple[int, ...]:
    return self.held(lease_id, session)[1]


@mutant(Rows, "end_session", faults="crash=1,every=2")
def the_end_of_a_session_forgets_its_leases(
    self: Rows, at: float, session: str, reason: str, cause: e.EndCause = "session"
) -> list[e.Ended]:
    return []


@mutant(Sessions, "late")
def a_lost_heartbeat_never_ends_the_session(self: Sessions, now: float) -> list[str]:
    return []


@mutant(Rows, "commit", 8, faults="torn=1,every=1")
def a_step_is_committed_twice(self: Rows, at: float, session: str, step: int, rows: Sequence[int]) -> e.Committed:
    return commit(self, at, session, step, rows) or e.Committed(at, step, tuple(sorted(rows)))


@mutant(Rows, "commit", faults="pause=1,every=2")
def a_step_is_committed_without_its_leases(
    self: Rows, at: float, session: str, step: int, rows: Sequence[int]
) -> e.Committed | None:
    try:
        return commit(self, at, session, step, rows)
    except LeaseExpired:
        return e.Committed(at, step, tuple(sorted(rows)))


@mutant(admission, "may_admit")
def admission_is_off_by_one_group(bound: Any, *, admitted: int, lost: int, trained: int) -> bool:
    return admitted - lost <= trained + (bound.max_staleness + 1) * bound.rows_per_step


@mutant(Rows, "trained_at")
def admission_counts_steps_that_no_version_has(self: Rows, version: int) -> int:
    return self._trained_through[self.step]


@mutant(Rows, "lease", faults="crash=1,every=2")
def admission_uses_the_version_begun_last(self: Rows, *args: Any, **options: Any) -> list[e.Event]:
    committed, self.version = self.version, max(self.versions, default=0)
    try:
        return lease(self, *args, **options)
    finally:
        self.version = committed


@mutant(Rows, "begin_version", 1, faults="crash=1,every=2")
def a_version_id_is_used_again(self: Rows, at: float, step: int, parent: int | None, request: str = "") -> Any:
    return e.VersionBegun(at, self.version + 1, step, parent, request)


@mutant(Broker, "_begin_version")
def a_version_is_handed_out_but_not_begun(self: Broker, asked: Any) -> m.Number:
    return m.Number(max(self.rows.versions, default=0) + 1)


@mutant(Broker, "_commit")
def rows_are_retired_before_the_marker(self: Broker, asked: Any) -> m.Receipt:
    receipt: m.Receipt = broker_commit(self, asked)
    self.store.record(self.rows.retire(self._wall(), asked.request.step))
    return receipt


@mutant(Table, "_apply_reconciled", faults="crash=1,every=2")
def reconcile_keeps_trained_rows_trained(self: Table, event: e.Reconciled) -> None:
    kept = {step: self._step_rows.pop(step) for step in list(self._step_rows) if step > event.step}
    apply_reconciled(self, event)
    self._step_rows.update(kept)


@mutant(Rows, "held", faults="pause=3,cut=1,every=2")
def a_late_writer_is_not_fenced(
    self: Rows, lease_id: int, session: str, rows: Sequence[int] | None = None
) -> tuple[Lease, tuple[int, ...]]:
    try:
        return held(self, lease_id, session, rows)
    except LeaseExpired:
        for other in self.leases.values():
            if rows and set(rows) <= other.rows:
                return other, tuple(rows)
        raise


@mutant(Rows, "written_before", faults="torn=1,every=1")
def a_repeated_write_is_refused(self: Rows, lease_id: int, rows: Sequence[int]) -> bool:
    return False


@mutant(Table, "_apply_granted")
def a_delivery_is_not_counted(self: Table, event: e.Granted, now: float) -> None:
    apply_granted(self, event, now)
    for id in event.rows:
        self.rows[id].attempts[event.stage] -= 1


@mutant(Rows, "release")
def a_release_counts_as_a_lost_delivery(
    self: Rows, at: float, session: str, lease_id: int, rows: Any, cause: Any, reason: str
) -> e.Ended:
    return msgspec.structs.replace(release(self, at, session, lease_id, rows, cause, reason), cause="fenced")


@mutant(ReadyQueue, "push")
def rows_that_come_back_are_lost(self: ReadyQueue, line: Line, entry: Rank) -> None:
    if self.name not in self._rows[entry[3]].attempts:
        push(self, line, entry)


@mutant(Table, "_make_group_ready")
def a_group_is_ready_with_a_member_missing(self: Table, group: Group, stage: Any) -> None:
    wanting = [member for member in group.members if self._wants(stage, member)]
    if wanting and stage.name not in group.ready:
        group.ready[stage.name] = wanting
        self._push(stage, wanting[:1])


@mutant(Table, "_end")
def a_dropped_row_is_counted_twice(self: Table, rows: Sequence[Row], how: str, reason: str) -> None:
    end(self, rows, how, reason)
    self.census.ends[how, reason] += len(rows) if how == "dropped" else 0


@mutant(Store, "record")
def a_commit_is_answered_before_it_is_journaled(
    self: Store, event: Any, payload: Any = b"", digest: bytes = b"", *, sync: bool = False
) -> None:
    if isinstance(event, e.Committed):
        self.rows.apply(event, now=self._clock())
    else:
        record(self, event, payload, digest, sync=sync)


async def _answer_at_once(self: Broker) -> None:
    outbox, self._outbox = self._outbox, []
    for frames in outbox:
        self._router.send(frames)
    await self.store.settle()


MUTANTS.append(Mutant("replies_leave_before_the_sync", 0, ((Broker, "_answer", _answer_at_once),)))


@mutant(Journal, "sync", 3, faults="none")
def only_the_last_segment_is_synced(self: Journal) -> None:
    if self._segments:
        self._segments[max(self._segments)].sync()


@mutant(Journal, "recover", faults="torn=1,every=1")
def recovery_skips_the_last_record(self: Journal) -> Iterator[Any]:
    found = list(recover(self))
    yield from found[:-1]


@mutant(snapshot, "dump", faults="torn=1,every=1")
def a_snapshot_forgets_deliveries(rows: Rows) -> bytes:
    state = msgspec.msgpack.decode(dump(rows), type=snapshot.State)
    kept = tuple(msgspec.structs.replace(row, attempts={}) for row in state.rows)
    return msgspec.msgpack.encode(msgspec.structs.replace(state, rows=kept))


@mutant(admission, "may_train", 1, faults="none")
def a_straggler_is_overtaken_beyond_the_bound(
    bound: Any, *, born: int, step: int, handed: int, on_their_way: Mapping[int, int], outside: bool = False
) -> bool:
    return handed < bound.rows_per_step


@mutant(admission, "may_train", 1, faults="none")
def a_step_gets_too_many_rows(
    bound: Any, *, born: int, step: int, handed: int, on_their_way: Mapping[int, int], outside: bool = False
) -> bool:
    return True


@mutant(admission, "is_stale")
def stale_rows_are_trained(bound: Any, *, born: int, step: int) -> bool:
    return False


@mutant(Rows, "_unknown")
def a_repeated_key_makes_a_second_group(self: Rows, keys: Sequence[str]) -> list[str]:
    return list(keys)


@mutant(Table, "line")
def free_rows_queue_behind_bound_ones(self: Table, stage: Any, row: Row) -> tuple[str, str]:
    return row.env, "free"


@mutant(Rows, "stragglers", 2)
def stragglers_are_waited_for_for_ever(self: Rows, now: float, at: float) -> Iterator[e.Dropped]:
    return iter(())


@mutant(Rows, "stragglers", 2)
def a_straggler_is_dropped_while_it_has_time_left(self: Rows, now: float, at: float) -> Iterator[e.Dropped]:
    return stragglers(self, now + 1.0, at)


@mutant(Broker, "_look_again")
def waiting_requests_are_looked_at_only_when_late(self: Broker) -> None:
    for asked in [asked for asked in self._waiting if asked.deadline <= self._clock()]:
        if self._handle(asked):
            self._waiting.remove(asked)
