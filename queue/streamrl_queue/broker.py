"""The broker: one loop that turns requests into events, journals them, and answers.

    sockets ──► wire ──► decide (rows) ──► journal ──► apply ──► replies
                             ▲                           │
                             └── waiting requests ◄──────┘

A request that must wait (for rows, for room, for members) is kept with its deadline and looked at again when the
state it waits for has changed; it never holds up another.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import trio

from . import messages as m
from . import wire
from .batches import Mapped, Part, RowKeys, decode
from .border import check_put, check_written, envs_of, rows_of, tokens_of
from .config import Durability, Flow, Recovery
from .errors import JournalError, MessageTooLarge, ProtocolError, QueueFull, SchemaError, SessionLost, StreamRLError
from .events import EndCause, Event, Granted
from .gate import Gate
from .journal import Journal
from .keys import check_key
from .mapped import host
from .nonces import SECRET_BYTES, Door, Strangers
from .nursery import open_nursery
from .replays import Replays
from .rows import Rows
from .rpc import Forget
from .sessions import Sessions
from .state import Lease, Row
from .store import BrokenState, Store
from .transport import ZEROMQ, Buffer, Router, Transport

log = logging.getLogger(__name__)

# Messages taken in before replies go out: enough to share one fsync, few enough to answer soon.
BATCH: Final = 64
# A broker that wakes so much later than it meant to, in seconds, did not run; and how long its sockets then have to
# bring what was sent meanwhile, before anybody is called late.
PAUSE_SECONDS: Final = 0.5
GRACE_SECONDS: Final = 1.0
# Rounds of messages that may wait before those who are late are judged all the same: a flood saves nobody.
MOST_BEHIND: Final = 64
# Rows of one lease: their keys fit what a message has beside its payload.
MOST_LEASED: Final = 1 << 17
# Rows shown to a peek: enough for a screen, few enough to hold up nobody.
MOST_PEEKED: Final = 1000
# A request waits at most this long; its client asks again.
LONGEST_WAIT_SECONDS: Final = 3600.0
# After the disk refused, the time until the next attempt.
RETRY_SECONDS: Final = 1.0
# What is left of a message's limit when its header has had its share.
LARGEST_PAYLOAD: Final = wire.MAX_MESSAGE_BYTES - (16 << 20)
# No room that there ever is: whoever waits for room looks again.
ANOTHER_ROOM: Final = (-1, -1)

_decode_request = msgspec.msgpack.Decoder(m.Request | Forget).decode


@dataclass(slots=True, eq=False)
class Asked:
    """One request and where its reply goes."""

    peer: bytes
    envelope: wire.Envelope
    request: Any
    payload: Buffer
    deadline: float
    # Of a put that waits: the rows it needs room for, when somebody last looked.
    fresh: int = 0

    @property
    def session(self) -> str:
        return self.envelope.session

    @property
    def id(self) -> int:
        return self.envelope.id


# What one request gets: a reply, perhaps with a payload; None as long as it must wait.
Handler = Callable[[Asked], msgspec.Struct | tuple[msgspec.Struct, Buffer | None] | None]


class Broker:
    """Serves one queue. Open it with `open_broker`."""

    def __init__(
        self,
        flow: Flow,
        journal: Journal,
        router: Router,
        *,
        key: bytes | None = None,
        clock: Callable[[], float] = trio.current_time,
        wall: Callable[[], float] = time.time,
        shares_files: bool = True,
        secret: bytes | None = None,
    ) -> None:
        self._outbox: list[list[Buffer]] = []
        self._gate = Gate(key, secret, lambda frames: self._outbox.append(frames), router.address)
        self._shares_files = shares_files
        self.store = Store(flow, journal, clock=clock, wall=wall)
        self.sessions = Sessions(flow.session_seconds, epoch=int(wall() * 1e6))
        self.address = router.address
        self._router = router
        self._clock = clock
        self._wall = wall
        self._waiting: list[Asked] = []
        self._replays = Replays()
        # Requests whose reply nobody gets; what they were granted goes back.
        self._unforgotten: dict[tuple[str, int], None] = {}
        self._seen_epoch = self.sessions.epoch
        self._seen_room = (0, 0)
        self._not_before = 0.0
        # Until then nobody is late: this process did not run, and does not know yet what was sent meanwhile.
        self._lenient_until = 0.0
        # Rounds since the socket was last empty.
        self._behind = 0
        # Who was here before a restart is back by then, or gone.
        self._all_back = self._clock() + flow.session_seconds
        self._handlers: dict[type, Handler] = {
            m.Hello: self._hello,
            m.Heartbeat: self._heartbeat,
            m.Bye: self._bye,
            m.EndSession: self._end_session,
            m.ReleaseAbsent: self._release_absent,
            m.Announce: self._announce,
            m.Fence: self._fence,
            m.Members: self._members,
            m.PutTasks: self._put,
            m.LeaseRows: self._lease,
            m.Fetch: self._fetch,
            m.Peek: self._peek,
            m.WriteColumns: self._write,
            m.Extend: self._extend,
            m.Release: self._release,
            m.Drop: self._drop,
            m.DropUnfinished: self._drop_unfinished,
            m.BeginVersion: self._begin_version,
            m.CommitVersion: self._commit_version,
            m.ListVersions: self._versions,
            m.CommitStep: self._commit,
            m.Retire: self._retire,
            m.Reconcile: self._reconcile,
            m.GetStatistics: self._statistics,
            m.GetLeased: self._leased,
        }

    @property
    def door(self) -> Door:
        """What tells this life's messages from others."""
        return self._gate.door

    @property
    def strangers(self) -> Strangers:
        """Who sent the messages that were dropped."""
        return self._gate.strangers

    @property
    def protocol_errors(self) -> int:
        """Messages that were dropped because they are not of this queue's clients; `strangers` says whose they were."""
        return self.strangers.total

    @property
    def refused(self) -> Counter[str]:
        """Refusals that were sent, by the class of the error."""
        return self._gate.refused

    @property
    def rows(self) -> Rows:
        """The rows, for looking."""
        return self.store.rows

    @property
    def waiting(self) -> list[m.Request]:
        """The requests that wait for rows, for room or for members."""
        return [asked.request for asked in self._waiting]

    def watch(self, event: Callable[[Event], None], timed: Callable[[type, Handler], Handler]) -> None:
        """From now on `event` hears of every event before it is folded, and `timed` stands around every handler."""
        self.store.watch = event
        self._handlers = {kind: timed(kind, handler) for kind, handler in self._handlers.items()}

    def recover(self) -> int:
        """Fold the journal; returns how many events there were. Sessions get their full time anew."""
        events = self.store.recover()
        for lease in self.rows.leases.values():
            self.sessions.expect(self._clock(), lease.session)
        return events

    async def serve(self) -> None:
        """Answer until cancelled.

        Consumes requests; produces events in the journal and replies; waits for the next message or the next
        deadline of a lease, a session or a waiting request; unblocked by its sockets and the clock.
        """
        while True:
            deadline = self._next_deadline()
            frames = await self._router.recv(deadline)
            if self._behind == 0 and (overslept := self._clock() - deadline) > PAUSE_SECONDS:
                log.warning("did not run for %.1f s; nobody is late for that", overslept)
                self._lenient_until = self._clock() + GRACE_SECONDS
            taken = 0
            while frames is not None:
                self._take(frames)
                taken += 1
                frames = self._router.try_recv() if taken < BATCH else None
            # After a pause of this process the messages of those who were not silent still lie in the socket.
            self._behind = self._behind + 1 if taken == BATCH else 0
            self._keep_time(self._clock())
            self._look_again()
            await self._answer()

    def _take(self, frames: list[Buffer]) -> None:
        """Check, decode and handle one message. What is not ours is dropped, with a word in the log."""
        peer = bytes(frames[0])
        if (opened := self._gate.open(peer, frames[1:])) is None:
            return
        envelope, payload = opened
        try:
            request = _decode_request(envelope.body)
        except wire.MALFORMED as error:
            refused = wire.Refused(ProtocolError.__name__, f"this request is not understood here: {error}")
            self._gate.answer(peer, envelope, refused)
            return
        self._replays.note(envelope.session, envelope.asking)
        if isinstance(request, Forget):
            self._forget(envelope.session, envelope.id)
            return
        if self._replays.is_over(envelope.session, envelope.id):
            log.debug("dropped request %d of %s, whose reply nobody awaits", envelope.id, envelope.session)
            return
        wait = getattr(request, "wait", 0.0)
        # Written so that a NaN does not wait.
        deadline = self._clock() + (min(wait, LONGEST_WAIT_SECONDS) if wait > 0.0 else 0.0)
        asked = Asked(peer, envelope, request, payload or b"", deadline)
        if (reply := self._replays.reply(asked.session, asked.id)) is not None:
            self._gate.answer(peer, envelope, *reply)
        elif not self._is_waiting(asked):
            if self._waiting and isinstance(request, m.LeaseRows) and request.stage in self.rows.touched:
                # Who waits for these rows comes first.
                self._look_again()
            self._handle(asked)

    def _forget(self, session: str, id: int) -> None:
        """Nobody waits for this request's reply any more: rows that it was granted go back."""
        self._waiting = [asked for asked in self._waiting if (asked.session, asked.id) != (session, id)]
        self._next_put()
        self._unforgotten[session, id] = None

    def _give_back(self) -> None:
        """Of requests that nobody awaits any more, the rows."""
        for session, id in sorted(self._unforgotten):
            if (lease := self.rows.granted(session, id)) is not None:
                reason = "nobody got the reply"
                self.store.record(self.rows.release(self._wall(), session, lease.id, None, "released", reason))
            del self._unforgotten[session, id]

    def _is_waiting(self, asked: Asked) -> bool:
        """Whether this request is a repetition of one that waits; then its reply goes to the new peer."""
        for other in self._waiting:
            if other.session == asked.session and other.id == asked.id:
                other.peer = asked.peer
                return True
        return False

    def _handle(self, asked: Asked) -> bool:
        """Answer the request, or keep it waiting; tells whether it was answered."""
        lasting = not isinstance(asked.request, m.Heartbeat | m.GetStatistics | m.GetLeased)
        try:
            if not isinstance(asked.request, m.Hello):
                self.sessions.require(asked.session)
            answer = self._handlers[type(asked.request)](asked)
        except StreamRLError as error:
            answer = wire.Refused(type(error).__name__, str(error))
            # It is asked again, under the same id, once the session is open.
            lasting &= not isinstance(error, SessionLost)
        except BrokenState:
            raise
        # The supervision edge of a request: nothing was recorded, so whatever is wrong with it is its sender's.
        except Exception as error:
            log.exception("request %s of %s failed", type(asked.request).__name__, self.sessions.name(asked.session))
            answer = wire.Refused("QueueError", f"the broker could not handle this request: {error!r}")
        if answer is None:
            if asked not in self._waiting:
                self._waiting.append(asked)
            return False
        if lasting and isinstance(answer, wire.Refused) and isinstance(asked.request, m.LeaseRows):
            # What cannot be shown is not held.
            self._unforgotten[asked.session, asked.id] = None
        reply = answer if isinstance(answer, tuple) else (answer, None)
        if lasting and self.sessions.is_open(asked.session):
            self._replays.keep(asked.session, asked.id, reply)
        self._gate.answer(asked.peer, asked.envelope, *reply)
        return True

    async def _answer(self) -> None:
        """Send the replies, after what they promise is true."""
        await self.store.settle()
        outbox, self._outbox = self._outbox, []
        for frames in outbox:
            # A peer that is gone or does not keep up asks again.
            self._router.send(frames)

    # -- time

    def _next_deadline(self) -> float:
        waiting = min((asked.deadline for asked in self._waiting), default=float("inf"))
        lease = self.rows.next_deadline()
        late = min(self.sessions.next_deadline(), lease if lease is not None else float("inf"))
        return max(min(waiting, max(late, self._lenient_until)), self._not_before)

    def _keep_time(self, now: float) -> None:
        try:
            self._tick(now)
        except JournalError as error:
            # The disk is full: what ran out has not ended yet. Look again a little later.
            log.error("%s; trying again in %.0f s", error, RETRY_SECONDS)
            self._not_before = now + RETRY_SECONDS

    def _tick(self, now: float) -> None:
        """End what has run out: leases, stragglers, sessions. Tidy the journal."""
        self._give_back()
        if now >= self._lenient_until and (self._behind == 0 or self._behind > MOST_BEHIND):
            self._end_late(now)
        self.store.tidy()

    def _end_late(self, now: float) -> None:
        for ended in self.rows.expire(now, self._wall()):
            lease = self.rows.leases[ended.lease]
            log.warning("lease %d of %s ran out: %d rows requeued", lease.id, lease.stage, len(ended.rows))
            self.store.record(ended)
        for dropped in self.rows.stragglers(now, self._wall()):
            log.warning("rows %s are dropped: the rest of their group went on without them", dropped.rows)
            self.store.record(dropped)
        for session in self.sessions.late(now):
            seconds = self.sessions.session_seconds
            self._lose(session, f"no heartbeat for {seconds:.1f} s")

    def _lose(self, session: str, reason: str) -> int:
        """A process is gone: its leases end."""
        name = self.sessions.name(session)
        rows = self._end_session_of(session, reason)
        log.warning("%s lost: %s; %d rows requeued", name, reason, rows)
        self._waiting = [asked for asked in self._waiting if asked.session != session]
        self._next_put()
        return rows

    def _end_session_of(self, session: str, reason: str, cause: EndCause = "session") -> int:
        """The session and its leases are over; how many rows go back."""
        rows = 0
        for ended in self.rows.end_session(self._wall(), session, reason, cause):
            self.store.record(ended)
            rows += len(ended.rows)
        self.sessions.end(session)
        self._replays.end(session)
        return rows

    def _look_again(self) -> None:
        """Try waiting requests whose state may have changed, in order of arrival."""
        now = self._clock()
        # What was asked in vain: stage, environment and step → the fewest rows.
        vain: dict[tuple[object, ...], int] = {}
        # Splits whose first put still waits: puts of one split go in order.
        full: set[str] = set()
        touched = self.rows.touched
        self.rows.touched = set()
        moved = self.sessions.epoch != self._seen_epoch
        self._seen_epoch = self.sessions.epoch
        room = self.rows.room(), self.store.journal.needed_bytes
        freed = room != self._seen_room
        self._seen_room = room
        for asked in list(self._waiting):
            late = asked.deadline <= now
            match asked.request:
                case m.LeaseRows(stage=stage, at_least=n) as ask:
                    wanted = stage, ask.env, ask.step, ask.keys
                    worth = stage in touched and n < vain.get(wanted, n + 1)
                case m.PutTasks(split=split):
                    worth = freed and split not in full and asked.fresh <= room[0]
                    full.add(split)
                case _:
                    worth = moved
            if (worth or late) and self._handle(asked):
                self._waiting.remove(asked)
                if isinstance(asked.request, m.PutTasks):
                    self._next_put()
            elif worth and isinstance(asked.request, m.LeaseRows):
                vain[wanted] = n
        if self.rows.touched or self._seen_room == ANOTHER_ROOM:
            # What was answered made room for others.
            self._look_again()

    def _next_put(self) -> None:
        """The put that was first among those that wait is gone."""
        self._seen_room = ANOTHER_ROOM

    def _is_late(self, asked: Asked) -> bool:
        return asked.deadline <= self._clock()

    # -- sessions

    def _hello(self, asked: Asked) -> m.Welcome:
        fenced = self.rows.fences.get(asked.session)
        self.sessions.open(self._clock(), self._wall(), asked.session, asked.request, fenced)
        for other in [other for other in self._waiting if isinstance(other.request, m.Fence)]:
            # Before anybody is told that it is back.
            if other.request.session == asked.session and self._handle(other):
                self._waiting.remove(other)
        journal = str(self.store.journal.directory.resolve()) if self._shares_files else ""
        return m.Welcome(self.sessions.session_seconds, host(), journal)

    def _heartbeat(self, asked: Asked) -> m.Number:
        self.sessions.beat(self._clock(), asked.session, asked.request, asked.id)
        for id in asked.request.given_up:
            self._forget(asked.session, id)
        return m.Number(self.sessions.epoch)

    def _bye(self, asked: Asked) -> m.Number:
        rows = self._end_session_of(asked.session, "its holder left")
        # Nothing that it said before counts again, whoever says it.
        self._replays.note(asked.session, (asked.id + 1, asked.id))
        return m.Number(rows)

    def _end_session(self, asked: Asked) -> m.Number:
        sessions = self.sessions.named(asked.request.name)
        return m.Number(sum(self._lose(session, "its process ended") for session in sessions))

    def _release_absent(self, asked: Asked) -> m.Number:
        reason = "the run it belonged to ended"
        return m.Number(sum(self._end_session_of(id, reason, "released") for id in self.sessions.absent()))

    def _announce(self, asked: Asked) -> m.Number:
        self.sessions.announce(asked.session, asked.request)
        return m.Number(self.sessions.epoch)

    def _fence(self, asked: Asked) -> m.Number | None:
        session, reason = asked.request.session, asked.request.reason
        if self.sessions.is_open(session):
            log.warning("%s is fenced: %s", self.sessions.name(session), reason)
            self.store.record(self.rows.fence(self._wall(), session, self.sessions.announced(session), reason))
            self.sessions.fence(session)
        elif not self._is_late(asked) and self._clock() < self._all_back:
            return None
        return m.Number(self.sessions.epoch)

    def _members(self, asked: Asked) -> m.Membership | None:
        if self.sessions.epoch != asked.request.after or self._is_late(asked):
            return self.sessions.membership(asked.request.role)
        return None

    # -- rows

    def _put(self, asked: Asked) -> m.Receipt | None:
        ask: m.PutTasks = asked.request
        if not ask.filled and len(ask.keys) * ask.members > self.rows.flow.waiting_rows:
            raise QueueFull(
                f"put of {len(ask.keys) * ask.members} rows can never fit: queue.waiting_rows is "
                f"{self.rows.flow.waiting_rows}; put fewer at once"
            )
        fresh = self.rows.fresh(ask.keys) * ask.members
        asked.fresh = 0 if ask.filled else fresh
        full = self._is_full(fresh, len(asked.payload), rolled_out=bool(ask.filled))
        full = full or (self._is_behind(asked) if fresh else None)
        if full is not None:
            if not self._is_late(asked):
                return None
            raise QueueFull(f"{full}, and {ask.wait:.1f} s made no room for {fresh} more rows")
        batch = decode(asked.payload, "put")
        check_put(batch, [self.rows.stage(name) for name in ask.filled], training=self.rows.trains)
        lines = len(ask.keys) * (ask.members if ask.filled else 1)
        if len(batch) != lines:
            each = "row, which `filled` makes a line" if ask.filled else "line"
            raise SchemaError(f"put: expected {lines} lines for {len(ask.keys)} keys, one {each}; got {len(batch)}")
        oldest, tokens = self._tokens_of(batch) if ask.filled else ((), ())
        envs = envs_of(batch)
        event, rows, known = self.rows.put(
            self._wall(),
            ask.keys,
            envs,
            members=ask.members,
            split=ask.split,
            priority=ask.priority,
            sources=ask.sources,
            filled=ask.filled,
            oldest=oldest,
            tokens=tokens,
        )
        self.store.record(event, asked.payload, asked.envelope.payload)
        return m.Receipt(rows, len(known), self.store.journal.durability, known)

    def _is_full(self, rows: int, size: int, *, rolled_out: bool) -> str | None:
        """Why `rows` more rows of `size` bytes must wait; None when there is room."""
        limit = self.rows.flow.waiting_rows
        if rows > (room := self.rows.room()) and not rolled_out:
            return f"{limit - room} of {limit} rows wait to be rolled out (queue.waiting_rows)"
        used, budget = self.store.journal.needed_bytes, self.rows.flow.budget_bytes
        # A put larger than the whole budget gets in when nothing else is there.
        if rows and used and used + size > budget:
            return f"{used / 2**20:.1f} of {budget / 2**20:.1f} MiB are taken by rows (queue.budget_mebibytes)"
        return None

    def _is_behind(self, asked: Asked) -> str | None:
        """Why a put must wait although there is room for it; small ones would else keep out a large one for ever."""
        puts = (other for other in self._waiting if isinstance(other.request, m.PutTasks))
        first = next((other for other in puts if other.request.split == asked.request.split), asked)
        if (first.session, first.id) == (asked.session, asked.id):
            return None
        return f"a put of {len(first.request.keys) * first.request.members} rows waits for room before this one"

    def _lease(self, asked: Asked) -> tuple[msgspec.Struct, Buffer | None] | m.Grant | None:
        ask: m.LeaseRows = asked.request
        if (before := self.rows.granted(asked.session, asked.id)) is not None:
            return self._grant(before.id, sorted(before.rows), ask)
        late = self._is_late(asked)
        while True:
            event = self.rows.lease(
                self._wall(),
                asked.session,
                ask.stage,
                rows=min(ask.rows, MOST_LEASED),
                at_least=1 if late else ask.at_least,
                env=ask.env,
                step=ask.step,
                request=asked.id,
                keys=ask.keys,
            )
            self.store.record(event)
            match event:
                case None:
                    return m.Grant(0, ask.stage, (), None, 0, 0) if late else None
                case Granted():
                    return self._grant(event.lease, event.rows, ask)

    def _grant(self, lease: int, ids: Sequence[int], ask: m.LeaseRows) -> tuple[msgspec.Struct, Buffer | None]:
        stage = self.rows.stage(ask.stage)
        rows = [self.rows.rows[id] for id in ids]
        parts: tuple[Part, ...] = ()
        mapped: tuple[Mapped, ...] = ()
        payload: Buffer | None = None
        if ask.payload and ask.mapped:
            mapped = self.store.places(rows, ask.columns or stage.reads, stage)
        elif ask.payload:
            parts, payload = self.store.columns(rows, ask.columns or stage.reads, stage)
        if payload is not None and len(payload) > LARGEST_PAYLOAD:
            raise MessageTooLarge(
                f"{len(rows)} rows of {stage.name} are {len(payload) / 2**20:.0f} MiB, "
                f"limit {LARGEST_PAYLOAD / 2**20:.0f} MiB; lease fewer rows at once"
            )
        version = self.rows.version
        keys = tuple(self._keys(row, stage.name) for row in rows)
        step = self.rows.version_step(version)
        return m.Grant(lease, stage.name, keys, stage.seconds, version, step, parts, mapped), payload

    def _fetch(self, asked: Asked) -> m.Columns | tuple[m.Columns, Buffer]:
        ask: m.Fetch = asked.request
        stage = self.rows.stage(ask.stage) if ask.stage else None
        names = ask.columns or (stage.reads if stage else ())
        rows = self.store.rows_of(ask.rows)
        keys = tuple(self._keys(row, ask.stage) for row in rows)
        if ask.mapped:
            return m.Columns(keys, mapped=self.store.places(rows, names, stage))
        # Perhaps asked by one that could not read in place, because it saw damage.
        parts, payload = self.store.columns(rows, names, stage, anew=True)
        return m.Columns(keys, parts), payload

    def _peek(self, asked: Asked) -> m.Columns:
        ask: m.Peek = asked.request
        rows = self.rows.peek(ask.stage, min(ask.rows, MOST_PEEKED))
        return m.Columns(tuple(self._keys(row, ask.stage) for row in rows), ())

    def _write(self, asked: Asked) -> m.Receipt:
        lease_id = asked.request.lease
        batch = decode(asked.payload, "write")
        rows = rows_of(batch)
        if self.rows.written_before(lease_id, rows):
            return m.Receipt(rows, len(rows), self.store.journal.durability)
        lease, _ = self.rows.held(lease_id, asked.session, rows)
        stage = self.rows.stages[lease.stage]
        check_written(batch, stage, training=self.rows.trains)
        event = self.rows.write(self._wall(), asked.session, lease_id, rows, *self._tokens_of(batch))
        self.store.record(event, asked.payload, asked.envelope.payload)
        return m.Receipt(rows, 0, self.store.journal.durability)

    def _extend(self, asked: Asked) -> m.Held:
        return m.Held(self.rows.extend(self._clock(), asked.session, asked.request.lease))

    def _release(self, asked: Asked) -> m.Receipt:
        ask: m.Release = asked.request
        if before := self.rows.told_before(ask.lease, ask.rows, "released"):
            return m.Receipt(before, len(before), self.store.journal.durability)
        event = self.rows.release(self._wall(), asked.session, ask.lease, ask.rows, "released", ask.reason)
        self.store.record(event)
        return m.Receipt(event.rows, 0, self.store.journal.durability)

    def _drop(self, asked: Asked) -> m.Receipt:
        ask: m.Drop = asked.request
        if before := self.rows.told_before(ask.lease, ask.rows, "dropped"):
            return m.Receipt(before, len(before), self.store.journal.durability)
        event = self.rows.drop(self._wall(), asked.session, ask.lease, ask.rows, ask.reason)
        self.store.record(event)
        return m.Receipt(event.rows, 0, self.store.journal.durability)

    def _drop_unfinished(self, asked: Asked) -> m.Number:
        event = self.rows.drop_unfinished(self._wall(), asked.request.split, asked.request.reason)
        self.store.record(event)
        return m.Number(len(event.rows) if event else 0)

    # -- versions and steps

    def _begin_version(self, asked: Asked) -> m.Number:
        request = f"{asked.session}/{asked.id}"
        if (before := self.rows.begun(request)) is not None:
            return m.Number(before.id)
        event = self.rows.begin_version(self._wall(), asked.request.step, asked.request.parent, request)
        self.store.record(event)
        return m.Number(event.version)

    def _commit_version(self, asked: Asked) -> m.Number:
        event = self.rows.commit_version(self._wall(), asked.request.version, asked.request.digest)
        self.store.record(event, sync=True)
        return m.Number(asked.request.version)

    def _versions(self, asked: Asked) -> m.Versions:
        return m.Versions(tuple(self.rows.versions.values()), self.rows.version)

    def _commit(self, asked: Asked) -> m.Receipt:
        ask: m.CommitStep = asked.request
        event = self.rows.commit(self._wall(), asked.session, ask.step, ask.rows)
        self.store.record(event, sync=True)
        return m.Receipt(ask.rows, 0 if event else len(ask.rows), "fsync")

    def _retire(self, asked: Asked) -> m.Number:
        self.store.record(self.rows.retire(self._wall(), asked.request.through))
        return m.Number(asked.request.through)

    def _reconcile(self, asked: Asked) -> m.Number:
        before = self.rows.statistics().trained
        self.store.record(self.rows.reconcile(self._wall(), asked.request.step), sync=True)
        return m.Number(before - self.rows.statistics().trained)

    def _statistics(self, asked: Asked) -> m.Counts:
        return m.Counts(self.rows.statistics(), self.store.journal.size, self.protocol_errors, self.strangers.by_peer)

    def _leased(self, asked: Asked) -> m.Leased:
        ask: m.GetLeased = asked.request
        named = (row for id in ask.rows[:MOST_PEEKED] if (row := self.rows.rows.get(id)))
        rows = {row.id: row for row in (*named, *self.rows.longest_held(min(ask.most, MOST_PEEKED)))}
        held = [(self.rows.leases[lease], row) for row in rows.values() for lease in row.leases.values()]
        held = [(lease, row) for lease, row in held if not self.rows.stage(lease.stage).trains]
        held.sort(key=lambda pair: (pair[0].id, pair[1].id))
        puts = (other for other in self._waiting if isinstance(other.request, m.PutTasks))
        first = next(puts, None)
        return m.Leased(
            tuple(self._leased_row(lease, row) for lease, row in held),
            (first and self._is_full(first.fresh, len(first.payload), rolled_out=bool(first.request.filled))) or "",
        )

    def _leased_row(self, lease: Lease, row: Row) -> m.LeasedRow:
        members = row.group.members
        return m.LeasedRow(
            row.id,
            row.group.id,
            row.member,
            lease.stage,
            self.sessions.name(lease.session),
            lease.at or None,
            len(members),
            sum(lease.stage not in member.places for member in members[:MOST_PEEKED]),
        )

    # -- columns

    def _tokens_of(self, batch: pa.RecordBatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tokens_of(batch, self.rows.versions) if self.rows.trains else ((), ())

    def _keys(self, row: Row, stage: str) -> RowKeys:
        return RowKeys(row.id, row.group.id, row.member, row.attempts.get(stage, 0), row.split, row.tokens)


@asynccontextmanager
async def open_broker(
    flow: Flow,
    directory: Path,
    *,
    bind: str = "tcp://127.0.0.1:0",
    durability: Durability = "flush",
    segment_bytes: int = 64 << 20,
    recovery: Recovery = "stop",
    key: bytes | None = None,
    transport: Transport = ZEROMQ,
    wall: Callable[[], float] = time.time,
    open_journal: Callable[..., Journal] = Journal,
) -> AsyncIterator[Broker]:
    """A broker that serves until the block is left. `broker.address` tells where.

    Raises:
        AddressError: the address is taken, or public without a key.
        JournalError: the journal is damaged, or another broker has it.
    """
    check_key(key)
    journal = open_journal(directory, durability=durability, segment_bytes=segment_bytes, recovery=recovery)
    try:
        with transport.router(bind, key=key) as router:
            broker = Broker(
                flow,
                journal,
                router,
                key=key,
                wall=wall,
                shares_files=transport.shares_files,
                secret=transport.entropy(SECRET_BYTES),
            )
            events = broker.recover()
            if events:
                log.info("recovered %d events from %s", events, directory)
            async with open_nursery() as nursery:
                nursery.start_soon(broker.serve)
                yield broker
                nursery.cancel_scope.cancel()
    finally:
        journal.close()
