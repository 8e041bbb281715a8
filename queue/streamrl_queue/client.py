"""The queue's client under trio."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec
import pyarrow as pa
import trio

from . import messages as m
from .batches import RowKeys, assemble, encode, unpack
from .config import MOST_MEMBERS
from .errors import DeadlineExceeded, JournalError, SchemaError, SessionLost
from .mapped import MappedJournal, host
from .nonces import NONCE_BYTES
from .nursery import open_nursery
from .rpc import RpcClient
from .schema import Task, task_batch
from .state import Statistics, Version
from .together import Together
from .transport import ZEROMQ, Transport
from .waits import Wait, Waits

log = logging.getLogger(__name__)

# A session survives two lost heartbeats; more often than this tells nobody anything.
HEARTBEATS_PER_SESSION: Final = 3
MOST_HEARTBEAT_SECONDS: Final = 1.0
# Every request may be repeated without harm, so one whose reply is lost (the broker restarts) is sent again.
RESEND_SECONDS: Final = 2.0
# How long a broker may be away before its clients give up.
PATIENCE_SECONDS: Final = 60.0
# At the end of a session, how long to wait for the broker to hear of it.
BYE_SECONDS: Final = 1.0


class Lease(NamedTuple):
    """Rows of one stage that this session holds.

    `seconds` is the time until the lease ends without `extend` (None: it lives with the session). `version` is the
    policy version in force at the grant, made after `version_step` optimizer steps. `batch` has the key columns and
    the stage's columns in the order of `rows`; None when the lease was asked for without its payload.
    """

    id: int
    stage: str
    rows: tuple[RowKeys, ...]
    seconds: float | None
    version: int
    version_step: int
    batch: pa.RecordBatch | None

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(row.row for row in self.rows)


class TransferQueue:
    """A session at a broker. Open it with `connect`; share it between tasks."""

    def __init__(
        self,
        rpc: RpcClient,
        nursery: trio.Nursery,
        session: str,
        hello: m.Hello,
        address: str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.session = session
        self.address = address
        self._rpc = rpc
        self._hello = hello
        self._activity = "starts"
        self._wall = wall
        self._since = wall()
        self._gauges: dict[str, float] = {}
        self._waits = Waits(wall)
        self._puts = itertools.count(1)
        self._together = Together(self._exchange, nursery)
        # Where columns can be read in place.
        self._journal: MappedJournal | None = None
        # Requests that nobody awaits any more; the broker is told of them with the next heartbeat.
        self._given_up: set[int] = set()
        self._session_seconds = 0.0

    def __repr__(self) -> str:
        return f"<TransferQueue {self._hello.name} at {self.address}: {self._activity}>"

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        address: str,
        *,
        key: bytes | None = None,
        role: str = "client",
        name: str | None = None,
        endpoint: str | None = None,
        deadline: float = 10.0,
        transport: Transport = ZEROMQ,
        session: str | None = None,
        wall: Callable[[], float] = time.time,
        mapped: bool = True,
    ) -> AsyncIterator[Self]:
        """A session that lives, by heartbeat, as long as the block.

        Args:
            address: where the broker listens.
            key: the queue's key, 32 bytes.
            role: what this process is, for `members`.
            name: what this process is called; by default role and process id.
            endpoint: where this process itself listens, for `members`.
            deadline: seconds to wait for the broker.
            transport: how to get there; the simulator has its own.
            session: the session's name, unique for ever; random by default.
            wall: the clock for people, in seconds since the epoch.
            mapped: read columns in place when the broker is on this host and its files can be read; otherwise, or if
                that fails, they travel.

        Raises:
            DeadlineExceeded: nobody answers at `address` (or the key is another one: such messages are dropped).
        """
        hello = m.Hello(name or f"{role}-{os.getpid()}", role, endpoint)
        # The journal knows sessions only: their names say whose they were.
        session = session or f"{hello.name}.{os.urandom(8).hex()}"
        with transport.dealer(address, key=key) as dealer:
            rpc = RpcClient(dealer, m.Reply, key, session, transport.entropy(NONCE_BYTES))
            async with open_nursery() as nursery:
                nursery.start_soon(rpc.receive)
                queue = cls(rpc, nursery, session, hello, address, wall)
                source = f"the queue at {address}"
                welcome: m.Welcome = await rpc.call(hello, deadline=deadline, resend=RESEND_SECONDS, source=source)
                if mapped and transport.shares_files and welcome.journal and welcome.host == host():
                    queue._journal = MappedJournal(Path(welcome.journal))
                queue._session_seconds = welcome.session_seconds
                nursery.start_soon(queue._beat, welcome.session_seconds / HEARTBEATS_PER_SESSION)
                try:
                    yield queue
                finally:
                    await queue._leave()
                    nursery.cancel_scope.cancel()

    async def _leave(self) -> None:
        if trio.current_effective_deadline() <= trio.current_time():
            # Cancelled: nobody reads replies any more.
            self._rpc.tell(m.Bye())
            return
        with trio.move_on_after(BYE_SECONDS, shield=True):
            try:
                await self._rpc.call(m.Bye(), deadline=BYE_SECONDS, source="the queue")
            except (DeadlineExceeded, SessionLost) as error:
                log.debug("left without a goodbye: %s", error)

    async def _beat(self, seconds: float) -> None:
        """Consumes what `report` says; produces heartbeats; waits for and is unblocked by the clock."""
        while True:
            given_up = tuple(self._given_up)
            waits = self._waits.longest()
            await self._ask(m.Heartbeat(self._activity, self._since, dict(self._gauges), given_up, waits))
            self._given_up.difference_update(given_up)
            await trio.sleep(min(seconds, MOST_HEARTBEAT_SECONDS))

    async def _ask(self, request: msgspec.Struct, wait: float = 0.0) -> Any:
        reply, _ = await self._exchange(request, None, wait)
        return reply

    async def _exchange(self, request: msgspec.Struct, payload: Any, wait: float = 0.0) -> tuple[Any, Any]:
        """Ask, and ask again after a broker restart or a lost session, under the same id: what the request was given
        before, and its reply did not tell, it is given again.
        """
        _check_wait(wait)
        with self._rpc.asking() as id:
            try:
                return await self._exchange_as(id, request, payload, trio.current_time() + wait + PATIENCE_SECONDS)
            except (DeadlineExceeded, trio.Cancelled):
                self._given_up.add(id)
                raise

    async def _exchange_as(self, id: int, request: msgspec.Struct, payload: Any, deadline: float) -> tuple[Any, Any]:
        source = f"the queue at {self.address}"
        while True:
            left = deadline - trio.current_time()
            try:
                return await self._rpc.exchange(
                    request, payload, deadline=left, resend=RESEND_SECONDS, source=source, id=id
                )
            except SessionLost as error:
                log.warning("%s; opening it again", error)
                await self._rpc.call(self._hello, deadline=left, resend=RESEND_SECONDS, source=source)

    # -- about this process

    def report(self, activity: str | None = None, **gauges: float) -> None:
        """Say what this process does or waits for, and show numbers; both go out with the next heartbeat."""
        if activity is not None and activity != self._activity:
            self._activity, self._since = activity, self._wall()
        self._gauges.update(gauges)

    def waiting(self, what: str, *, row: int = 0, on: str = "") -> AbstractContextManager[Wait]:
        """Say for as long as the block what this process waits for or works on; heartbeats tell what lasts longest.

        Args:
            what: in a few words.
            row: the row that it is about.
            on: who must act before it ends: the name of a process, a role, or a stage of the queue.
        """
        return self._waits.waiting(what, row=row, on=on)

    async def announce(self, *, ready: bool, version: int | None = None) -> None:
        """For engines: whether requests may be routed here, and which version answers them."""
        number = self._hello.announced + 1
        self._hello = msgspec.structs.replace(self._hello, ready=ready, version=version, announced=number)
        await self._ask(m.Announce(ready, version, number))

    async def members(self, role: str | None = None, *, after: int = -1, wait: float = 0.0) -> m.Membership:
        """Who is at the queue. Returns when the epoch is another than `after`, or after `wait` seconds."""
        reply: m.Membership = await self._ask(m.Members(role, after, wait), wait)
        return reply

    async def fence(self, session: str, reason: str) -> None:
        """Keep requests away from that session's engine until it announces itself again."""
        await self._ask(m.Fence(session, reason, self._session_seconds), self._session_seconds)

    async def end_session(self, name: str) -> int:
        """For supervisors: the process of that name is gone. Returns how many rows it held."""
        reply: m.Number = await self._ask(m.EndSession(name))
        return reply.value

    async def release_absent(self) -> int:
        """For coordinators that resume a run: no process of before lives, so their rows go back at once.

        Returns how many; no delivery is counted.
        """
        reply: m.Number = await self._ask(m.ReleaseAbsent())
        return reply.value

    # -- rows

    async def put(
        self,
        batch: pa.RecordBatch | Sequence[Task],
        *,
        keys: Sequence[str] | None = None,
        members: int = 1,
        split: str = "train",
        priority: int = 0,
        wait: float = 30.0,
        filled: Sequence[str] = (),
    ) -> m.Receipt:
        """Every line of `batch` becomes one group of `members` rows; blocks while the queue is full.

        Small puts that tasks make at the same time leave in one message.

        Args:
            batch: tasks, or a record batch of any columns.
            keys: one per line, unique for ever: a repeated key makes no second group. Tasks bring their own; for a
                record batch the default is this call's own, so that only a resend of this very call is recognised.
            members: rows per group.
            split: `train` or `eval`.
            priority: higher goes first.
            wait: seconds to wait for room.
            filled: stages whose columns the batch brings too, e.g. `("rollout",)` for episodes that were played
                elsewhere: the rows are born with these stages done. Then every line is one row, and `members` lines
                in a row are a group. Admission does not hold such rows back, and `queue.waiting_rows` does not count
                them; what is trained of them is bound by `max_staleness` like everything else.

        Raises:
            QueueFull: no room within `wait`; nothing was stored.
            SchemaError: the columns do not fit.
        """
        _check_wait(wait)
        if not 1 <= members <= MOST_MEMBERS:
            raise SchemaError(f"put: members: expected 1 to {MOST_MEMBERS} rows per group, got {members}")
        sources: dict[str, int] = {}
        if not isinstance(batch, pa.RecordBatch):
            keys = keys or [task.key if split == "train" else f"{split}/{task.key}" for task in batch]
            for task in batch if split == "train" else ():
                sources[task.source] = max(task.index + 1, sources.get(task.source, 0))
            batch = task_batch(batch)
        elif keys is None:
            number = next(self._puts)
            groups = len(batch) // members if filled else len(batch)
            keys = [f"{self.session}/{number}/{line}" for line in range(groups)]
        ask = m.PutTasks(tuple(keys), members, split, priority, sources, wait, tuple(filled))
        return await self._together.put(ask, batch)

    async def lease(
        self,
        stage: str,
        *,
        rows: int | None = None,
        at_least: int = 1,
        wait: float = 0.0,
        where: Mapping[str, str] | None = None,
        step: int | None = None,
        payload: bool = True,
        columns: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
    ) -> Lease | None:
        """Hold up to `rows` rows that are ready for `stage`; None when there are none within `wait` seconds.

        Args:
            stage: the stage's name.
            rows: the most to hand out. A group stage hands out whole groups, at least one.
            at_least: wait for this many; when `wait` runs out fewer are handed out.
            wait: seconds.
            where: `{"env": name}` for the rows of one environment.
            step: for a stage that trains: the optimizer step these rows will be part of.
            payload: whether to bring the columns along.
            columns: which ones; by default those that the stage reads.
            keys: for a stage that parks: all rows of the groups with these keys, in place of `rows`. None as long as
                one of them is not there yet.

        Raises:
            UnknownName: no such stage, or nothing was ever put under one of the keys.
            LeaseExpired: rows of the keys are held by somebody, have passed the stage, or have ended.
        """
        if unknown := set(where or ()) - {"env"}:
            raise ValueError(f"where: expected only 'env', got {', '.join(sorted(unknown))}")
        if (rows is None) == (keys is None):
            raise ValueError("lease: expected `rows`, the most to hand out, or the `keys` of parked rows")
        env = (where or {}).get("env")
        names = tuple(columns) if columns else None
        most, mapped = rows if rows is not None else 1, self._journal is not None
        named = tuple(keys) if keys is not None else None
        ask = m.LeaseRows(stage, most, at_least, wait, env, step, payload, names, mapped, named)
        grant, data = await self._exchange(ask, None, wait)
        if not grant.rows:
            return None
        try:
            batch = await self._columns(stage, grant, data, ask.columns or ()) if payload else None
        except SchemaError:
            await self.release(grant.lease, reason="its columns could not be read")
            raise
        except trio.Cancelled:
            # Nobody has the lease to give it back.
            self._rpc.tell(m.Release(grant.lease, None, "nobody waited for its columns"))
            raise
        return Lease(grant.lease, stage, grant.rows, grant.seconds, grant.version, grant.version_step, batch)

    async def fetch(self, rows: Sequence[int], columns: Sequence[str]) -> pa.RecordBatch:
        """Columns of rows that another session leased without their payload, in the order of `rows`."""
        ask = m.Fetch(tuple(rows), tuple(columns), mapped=self._journal is not None)
        reply, data = await self._exchange(ask, None)
        return await self._columns("", reply, data, ask.columns)

    async def _columns(
        self, stage: str, reply: m.Grant | m.Columns, data: Any, names: tuple[str, ...]
    ) -> pa.RecordBatch:
        """The columns that came along with `reply`, or that it says where to read."""
        pieces = unpack(reply.parts, memoryview(data or b""))
        try:
            if self._journal is not None:
                pieces += [(part.stage, part.rows, self._journal.read(part)) for part in reply.mapped]
        except JournalError as error:
            log.warning("%s; columns travel from now on", error)
            self._journal = None
        if self._journal is None and reply.mapped:
            ask = m.Fetch(tuple(row.row for row in reply.rows), names, stage)
            fetched, data = await self._exchange(ask, None)
            pieces = unpack(fetched.parts, memoryview(data or b""))
        return assemble(reply.rows, pieces)

    async def peek(self, stage: str, rows: int = 10) -> tuple[RowKeys, ...]:
        """The rows that are ready for `stage`, in the order of hand-out, without leasing them."""
        reply: m.Columns = await self._ask(m.Peek(stage, rows))
        return reply.rows

    async def write(self, lease: Lease | int, batch: pa.RecordBatch) -> m.Receipt:
        """Fill the stage's columns of the rows that `batch` names in `row`; ends the lease on exactly those.

        Raises:
            LeaseExpired: somebody else has the rows now; nothing was written.
            SchemaError: the columns do not fit; the lease goes on.
        """
        receipt, _ = await self._exchange(m.WriteColumns(_id(lease)), encode(batch))
        return receipt  # type: ignore[no-any-return]

    async def extend(self, lease: Lease | int) -> tuple[int, ...]:
        """The lease's time starts anew. Returns the rows that it still holds: the others were written or dropped.

        Raises:
            LeaseExpired: it holds nothing any more.
        """
        held: m.Held = await self._ask(m.Extend(_id(lease)))
        return held.rows

    async def release(
        self, lease: Lease | int, rows: Sequence[int] | None = None, *, reason: str = "released"
    ) -> m.Receipt:
        """Give rows back unwritten (all of the lease by default); it does not count as a lost delivery."""
        receipt: m.Receipt = await self._ask(m.Release(_id(lease), _ids(rows), reason))
        return receipt

    async def drop(self, lease: Lease | int, rows: Sequence[int] | None = None, *, reason: str) -> m.Receipt:
        """End rows untrained, for a reason that is counted."""
        receipt: m.Receipt = await self._ask(m.Drop(_id(lease), _ids(rows), reason))
        return receipt

    async def end_rows(self, reason: str, split: str = "train") -> int:
        """End every row of `split` that has not ended; returns how many."""
        reply: m.Number = await self._ask(m.DropUnfinished(split, reason))
        return reply.value

    # -- versions and steps

    async def begin_version(self, step: int, parent: int | None) -> int:
        """A fresh version id for the weights after `step` steps. It exists once `commit_version` says so."""
        reply: m.Number = await self._ask(m.BeginVersion(step, parent))
        return reply.value

    async def commit_version(self, version: int, digest: str) -> None:
        """The version exists from here: every engine that is not fenced has proved it. Survives power loss."""
        await self._ask(m.CommitVersion(version, digest))

    async def versions(self) -> tuple[Version, ...]:
        """All versions that were ever begun, in order."""
        reply: m.Versions = await self._ask(m.ListVersions())
        return reply.versions

    async def commit(self, step: int, rows: Sequence[int]) -> m.Receipt:
        """These rows, leased for `step` by this session, were trained in it. Survives power loss."""
        receipt: m.Receipt = await self._ask(m.CommitStep(step, tuple(rows)))
        return receipt

    async def retire(self, through: int) -> None:
        """A durable checkpoint covers all steps up to `through`: their rows may go."""
        await self._ask(m.Retire(through))

    async def reconcile(self, step: int) -> int:
        """Go on from `step`: rows trained later are ready again; returns how many."""
        reply: m.Number = await self._ask(m.Reconcile(step))
        return reply.value

    async def leased(self, rows: Sequence[int] = (), *, most: int = 8) -> m.Leased:
        """Who holds which rows longest, `most` of each stage; who holds `rows`; and why a put waits, if one does."""
        reply: m.Leased = await self._ask(m.GetLeased(tuple(rows), most))
        return reply

    async def statistics(self) -> Statistics:
        """Counts of rows by state."""
        counts: m.Counts = await self._ask(m.GetStatistics())
        return counts.statistics

    async def journal_bytes(self) -> int:
        """Bytes that the journal's segments hold."""
        counts: m.Counts = await self._ask(m.GetStatistics())
        return counts.journal_bytes

    async def protocol_errors(self) -> dict[str, int]:
        """Messages that the broker dropped, by the connection they came from: damaged ones, ones of another key, copies
        of another session, life or queue. `total` counts those of all connections, also of long ago.

        Clients that go on after the broker was restarted have a few: what they said to the life before.
        """
        counts: m.Counts = await self._ask(m.GetStatistics())
        return {"total": counts.protocol_errors, **counts.strangers}


def _check_wait(wait: float) -> None:
    if not 0.0 <= wait < float("inf"):
        raise ValueError(f"wait: expected 0 or more seconds, got {wait}")


def _id(lease: Lease | int) -> int:
    return lease if isinstance(lease, int) else lease.id


def _ids(rows: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if rows is None else tuple(rows)
