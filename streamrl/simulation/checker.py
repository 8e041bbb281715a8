"""Checks a run while it happens, from outside: what is journaled, what is asked and answered, and when.

    requests ──► received ─┐                          ┌─► Broken, with the rows concerned
    journal  ──► journaled ┼─► Model (model.py) ──────┤
    replies  ◄── sent ─────┤                          └─► compare with the broker's own table
    the broker waits ─ idle┘

A reply must be true of what is on the disk at that moment; a lease or session must end when its time is over and not
before; a request that waits must be one that cannot be served. After a restart the broker must stand where it stood.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow.compute as pc
import trio

from streamrl_queue import Broker, wire
from streamrl_queue import events as e
from streamrl_queue import messages as m
from streamrl_queue.batches import decode
from streamrl_queue.config import Flow
from streamrl_queue.errors import ProtocolError
from streamrl_queue.rpc import Forget
from streamrl_queue.state import TASK
from streamrl_queue.transport import Buffer

from . import replies
from .model import EPSILON, Broken, Group, Model
from .trace import Trace

# The broker acts on a deadline at its next turn, at most one slow sync later.
TOLERANCE_SECONDS: Final = 0.5
# Every so many turns of the broker all rows are compared, not only those that moved.
FULL_EVERY: Final = 50
# More turns than that in one moment are a loop that waits for nothing.
MOST_SPINS: Final = 1000

_request = msgspec.msgpack.Decoder(m.Request | Forget).decode
_reply = msgspec.msgpack.Decoder(m.Reply | wire.Refused | wire.Challenge).decode


class Session:
    """A process at the broker, as its messages show. It must not be lost before `earliest`."""

    def __init__(self, name: str, until: float) -> None:
        self.name = name
        self.earliest = self.latest = until
        self.open = True
        # It said goodbye, or its supervisor did; it is gone when that is answered.
        self.leaving = False


class Checker:
    """The observer of the broker's socket and the witness of its disk."""

    def __init__(self, flow: Flow, trace: Trace, durable_step: Callable[[], int], durable: Callable[[], int]) -> None:
        self.model = Model(flow, durable_step)
        self.failure: Broken | None = None
        self.failed = trio.Event()
        self.events = 0
        self.refused: defaultdict[str, int] = defaultdict(int)
        self.late_writes = 0
        self._flow = flow
        self._durable_step = durable_step
        self._durable = durable
        self._trace = trace
        self._broker: Broker | None = None
        self._history: list[tuple[e.Event, float, tuple[int | None, ...]]] = []
        # What was promised to survive power loss → how many events must be durable for that.
        self._needed: dict[object, int] = {}
        self._sessions: dict[str, Session] = {}
        self._asked: dict[tuple[str, int], tuple[Any, Buffer]] = {}
        # Requests that took effect already when they come again, and those whose reply was checked.
        self._handled: set[tuple[str, int]] = set()
        self._answered: set[tuple[str, int]] = set()
        self._touched: dict[int, Group] = {}
        self._turns = 0
        self._waiting: list[tuple[str, int]] = []
        self._spins = 0
        self._last_turn = -1.0

    # -- the disk

    def journaled(self, event: e.Event, payload: Buffer) -> None:
        """An event is on the disk; it must be legal."""
        now = trio.current_time()
        self.events += 1
        self._trace.note(now, _describe(event), tuple(getattr(event, "rows", ())))
        with self._judging():
            born = self._born(event, payload)
            self._check_session(event, now)
            for group in self.model.fold(event, now, born):
                self._touched[group.id] = group
            self._history.append((event, now, born))
            for fact in replies.facts(event):
                self._needed[fact] = len(self._history)

    def lost(self, kept: int) -> None:
        """Only the first `kept` events are left after a power loss; the others were promised to nobody."""
        if kept == len(self._history):
            return
        self._trace.note(trio.current_time(), f"power loss takes {len(self._history) - kept} events")
        del self._history[kept:]
        self._touched.clear()
        model = Model(self._flow, self._durable_step)
        for event, now, born in self._history:
            model.fold(event, now, born)
        self.model = model

    def recovered(self, broker: Broker) -> None:
        """The broker is (again) there and must stand where it stood; all deadlines begin anew."""
        now = trio.current_time()
        self._broker = broker
        self._asked.clear()
        self._answered.clear()
        self._handled.clear()
        holders = {lease.session for lease in self.model.live.values()}
        for name in list(self._sessions):
            if name not in holders:
                del self._sessions[name]
        for name in sorted(holders):
            self._sessions[name] = Session(name, now + self._flow.session_seconds)
            self._sessions[name].open = False
        for lease in self.model.live.values():
            seconds = self.model.stages[lease.stage].seconds
            lease.earliest = lease.latest = now + seconds if seconds is not None else float("inf")
        for group in self.model.alive.values():
            group.since = dict.fromkeys(group.since, now)
        with self._judging():
            self._compare(full=True)

    def down(self) -> None:
        """The broker is dead."""
        self._broker = None

    # -- the socket

    def received(self, frames: Sequence[Buffer]) -> None:
        """The broker takes a message."""
        try:
            envelope, payload = wire.unseal(frames[1:], None)
            request = _request(envelope.body)
        except (ProtocolError, msgspec.MsgspecError):
            return
        assert self._broker is not None
        if not self._broker.door.admits(envelope.session, envelope.nonce):
            return
        key = envelope.session, envelope.id
        self._note_time(envelope.session, request, again=key in self._handled)
        self._handled.add(key)
        self._asked[key] = request, payload or b""

    def sent(self, frames: Sequence[Buffer]) -> None:
        """The broker answers. What it says must be true of the disk."""
        envelope, _ = wire.unseal(frames[1:], None)
        reply = _reply(envelope.body)
        if isinstance(reply, wire.Challenge):
            return
        key = envelope.session, envelope.id
        request, asked = self._asked[key]
        if key in self._answered:
            return
        lost = isinstance(reply, wire.Refused) and reply.error == "SessionLost"
        if lost:
            self._handled.discard(key)
        elif not isinstance(request, m.Heartbeat | m.GetStatistics | m.GetLeased):
            self._answered.add(key)
        self._note_leaving(envelope.session, request, refused=lost)
        if isinstance(reply, wire.Refused):
            self.refused[reply.error] += 1
            if isinstance(request, m.WriteColumns) and reply.error == "LeaseExpired":
                with self._judging():
                    replies.refused_write(self.model, envelope.session, request, asked, reply.message)
                self.late_writes += 1
            return
        with self._judging():
            self._check_reply(envelope.session, request, reply)

    def idle(self) -> None:
        """The broker waits: all that it was told has taken effect, all that is due has happened."""
        with self._judging():
            self._check_spinning()
            self.check()
            moved = bool(self._touched)
            self._compare(full=self._turns % FULL_EVERY == 0)
            assert self._broker is not None
            waiting = [(asked.session, asked.id) for asked in self._broker._waiting]
            if moved or waiting != self._waiting:
                self._waiting = waiting
                self._check_waiting()
        self._turns += 1

    # -- time

    def check(self) -> None:
        """Nothing is overdue. Called at every turn, and by the clock."""
        if self._broker is None:
            return
        now = trio.current_time()
        if late := self.model.overdue(now - TOLERANCE_SECONDS):
            raise Broken("a group still waits for stragglers whose time is over", [row.id for row in late])
        for lease in self.model.live.values():
            if lease.latest + TOLERANCE_SECONDS < now:
                raise Broken(f"lease {lease.id} of {lease.stage} should have run out at {lease.latest:.3f}", lease.rows)
            session = self._sessions.get(lease.session)
            if session is None:
                raise Broken(f"lease {lease.id} belongs to session {lease.session}, which has left", lease.rows)
            if session.latest + TOLERANCE_SECONDS < now:
                raise Broken(
                    f"session {lease.session} was last heard of {now - session.latest:.1f} s too long ago and still "
                    f"holds lease {lease.id} of {lease.stage}",
                    lease.rows,
                )

    def _check_spinning(self) -> None:
        now = trio.current_time()
        self._spins = self._spins + 1 if now == self._last_turn else 0
        self._last_turn = now
        if self._spins > MOST_SPINS:
            raise Broken(f"the broker has nothing to do and does not wait ({self._spins} turns in no time)")

    def judged_check(self) -> None:
        """`check`, from the clock."""
        with self._judging():
            self.check()

    def _note_time(self, session: str, request: Any, *, again: bool) -> None:
        now = trio.current_time()
        until = now + self._flow.session_seconds
        known = self._sessions.get(session)
        match request:
            case m.Hello(name=name):
                if known is None or not again:
                    self._sessions[session] = Session(name, until)
                known = self._sessions[session]
                # One that comes again opens the session, if the session was lost in between.
                known.open = True
                known.latest = until
            case m.Heartbeat() if known and known.open:
                known.latest = until
                # One that comes again may be a copy of one that is over, which is no sign of life.
                if not again:
                    known.earliest = until
            case m.Bye() if known and not again:
                known.leaving = True
            case m.EndSession(name=name) if not again:
                for other in self._sessions.values():
                    other.leaving |= other.name == name
            case m.Extend(lease=id) if known and known.open:
                self._extend(session, id, now, again)

    def _note_leaving(self, session: str, request: Any, *, refused: bool) -> None:
        """A goodbye is answered: who left is gone, unless the broker did not know who asked."""
        if isinstance(request, m.Bye | m.EndSession):
            name = request.name if isinstance(request, m.EndSession) else ""
            for id in [id for id, x in self._sessions.items() if x.leaving and (x.name == name or id == session)]:
                if refused:
                    self._sessions[id].leaving = False
                else:
                    del self._sessions[id]

    def _extend(self, session: str, id: int, now: float, again: bool) -> None:
        lease = self.model.live.get(id)
        seconds = self.model.stages[lease.stage].seconds if lease else None
        if lease and seconds is not None and lease.session == session:
            lease.latest = now + seconds
            if not again:
                lease.earliest = now + seconds

    def _check_session(self, event: e.Event, now: float) -> None:
        """Leases go to sessions that are there, and end with those that are not."""
        if isinstance(event, e.Granted):
            session = self._sessions.get(event.session)
            if session is None or session.latest < now - TOLERANCE_SECONDS:
                raise Broken(f"lease {event.lease} went to session {event.session}, which is not there", event.rows)
        if isinstance(event, e.Ended) and event.cause == "session" and (lease := self.model.leases.get(event.lease)):
            session = self._sessions.get(lease.session)
            if session is not None and not session.leaving and now < session.earliest - EPSILON:
                raise Broken(
                    f"session {lease.session} lost lease {lease.id} {session.earliest - now:.3f} s too early",
                    event.rows,
                )
            if session is not None and session.latest <= now + EPSILON:
                session.open = False

    # -- the table

    def _compare(self, *, full: bool) -> None:
        """The broker's table says what the events amount to."""
        assert self._broker is not None
        table = self._broker.rows
        groups = [*self.model.alive.values(), *self._touched.values()] if full else self._touched.values()
        if not full and not self._touched:
            return
        for group in groups:
            self._compare_group(group)
        if full:
            here = {row.id for group in self.model.alive.values() for row in group.here}
            if odd := here ^ table.rows.keys():
                raise Broken(f"rows {sorted(odd)[:9]} are in the table or in the journal, but not in both", odd)
        self._touched.clear()
        leases = {(x.id, x.stage, x.session, x.step, frozenset(x.rows)) for x in table.leases.values()}
        expected = {(x.id, x.stage, x.session, x.step, frozenset(x.rows)) for x in self.model.live.values()}
        if odd_leases := leases ^ expected:
            raise Broken(f"leases differ from the journal: {sorted(map(str, odd_leases))[:4]}")
        here_now = table.version, table.step, set(table.versions)
        if here_now != (self.model.version, self.model.step, set(self.model.versions)):
            raise Broken(
                f"version, step, versions are {here_now}; the journal says {self.model.version}, {self.model.step}"
            )
        self._compare_counts()

    def _compare_group(self, group: Group) -> None:
        assert self._broker is not None
        for row in group.rows:
            known = self._broker.rows.rows.get(row.id)
            if (known is not None) != row.here:
                raise Broken(f"the table {'has' if known else 'lacks'} {row}", [row.id])
            if known is None:
                continue
            done = set(known.places) - {TASK}
            attempts = {stage: n for stage, n in known.attempts.items() if n}
            seen = (known.step, known.leases, done, attempts)
            if seen != (row.step, row.held, set(row.done), {s: n for s, n in row.attempts.items() if n}):
                raise Broken(
                    f"the table says step, leases, done, attempts {seen} of {row}, {dict(row.attempts)}", [row.id]
                )
            for stage in self.model.stages_of(row):
                if stage.unit == "row" and self.model.wants(stage, row) != (stage.name in known.ready):
                    raise Broken(
                        f"row {row.id} is ready for {sorted(known.ready)}, which is wrong of {stage.name}", [row.id]
                    )

    def _compare_counts(self) -> None:
        assert self._broker is not None
        statistics = self._broker.rows.statistics()
        try:
            statistics.check()
        except AssertionError as error:
            raise Broken(f"conservation: {error}") from error
        found = {f"{how} {reason}": n for how in ("dropped", "dead") for reason, n in getattr(statistics, how).items()}
        found |= {"done": statistics.done, "trained": statistics.trained, "leased": statistics.leased}
        found["unleased"] = statistics.waiting + statistics.ready + statistics.parked
        counts = self.model.counts()
        if statistics.tasks != len(self.model.rows) or {k: n for k, n in found.items() if n} != dict(counts):
            raise Broken(
                f"counted {found} of {statistics.tasks} tasks; there are {dict(counts)} of {len(self.model.rows)}"
            )

    def _check_waiting(self) -> None:
        """No request waits that could be served."""
        assert self._broker is not None
        stages = {asked.request.stage for asked in self._broker._waiting if isinstance(asked.request, m.LeaseRows)}
        for stage in (self.model.stages[name] for name in sorted(stages)):
            if stage.trains:
                continue
            room = {True: self.model.may_start(), False: self.model.may_admit()} if stage.admits else {}
            for group in self.model.alive.values():
                first = group.rows[0]
                if first.split not in stage.splits or (self.model.bound(first) and not room.get(group.admitted, True)):
                    continue
                whole = stage.unit == "row" or self.model.group_ready(stage, group)
                if ready := [row.id for row in group.rows if whole and self.model.wants(stage, row)]:
                    raise Broken(f"a lease of {stage.name} waits although rows {ready} are ready for it", ready)

    # -- replies

    def _check_reply(self, session: str, request: Any, reply: Any) -> None:
        """What is acknowledged is on the disk, and as durable as the reply says."""
        promised = getattr(reply, "durability", "") == "fsync" or isinstance(request, m.CommitVersion | m.Reconcile)
        needed = max((self._needed.get(fact, 0) for fact in replies.promised(request, reply)), default=0)
        if promised and needed > self._durable():
            raise Broken(
                f"{type(request).__name__} was acknowledged as fsynced, which is not done yet", self._rows_of(reply)
            )
        if (check := replies.CHECKS.get(type(request))) is not None:
            check(self.model, session, request, reply)

    @staticmethod
    def _rows_of(reply: Any) -> tuple[int, ...]:
        return reply.rows if isinstance(reply, m.Receipt) else ()

    # -- parts

    def _born(self, event: e.Event, payload: Buffer) -> tuple[int | None, ...]:
        """What the payload of a rollout's write says about the versions that sampled it."""
        if not isinstance(event, e.Written) or event.stage not in self.model.stages:
            return ()
        if "versions" not in self.model.stages[event.stage].writes:
            return ()
        batch = decode(payload, "journal")
        if tuple(batch.column("row").to_pylist()) != event.rows:
            raise Broken(f"event and columns of a write disagree about its rows: {event.rows}", event.rows)
        counts = pc.list_value_length(batch.column("versions")).to_numpy(zero_copy_only=False)
        ids = batch.column("versions").flatten().field("version").to_numpy(zero_copy_only=False)
        steps = [self.model.versions[int(id)].step if int(id) in self.model.versions else None for id in ids]
        ends = np.cumsum(counts)
        parts = [[s for s in steps[end - n : end] if s is not None] for end, n in zip(ends, counts, strict=True)]
        return tuple(min(part) if part else None for part in parts)

    def _judging(self) -> _Judging:
        return _Judging(self)


class _Judging:
    """Remembers the first failure, wherever its exception may get lost."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker

    def __enter__(self) -> None:
        if self._checker.failure is not None:
            raise self._checker.failure

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Broken) and self._checker.failure is None:
            self._checker.failure = error
            self._checker.failed.set()


def _describe(event: e.Event) -> str:
    """One event in a line, without its rows."""
    match event:
        case e.Put(keys=keys, split=split):
            return f"put {len(keys)} groups of {event.members} {split} rows, {keys[0]}…"
        case e.Granted():
            step = f" for step {event.step}" if event.step is not None else ""
            return f"lease {event.lease} of {event.stage}{step} to {event.session}, version {event.version}"
        case e.Written():
            return f"lease {event.lease} writes {event.stage}"
        case e.Ended():
            return f"lease {event.lease} ends: {event.cause}, {event.reason}"
        case e.Committed():
            return f"step {event.step} committed"
        case _:
            fields = ", ".join(f"{f}={getattr(event, f)}" for f in event.__struct_fields__ if f not in ("at", "rows"))
            return f"{type(event).__name__}({fields})"
