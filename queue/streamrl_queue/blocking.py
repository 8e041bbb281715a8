"""The blocking twin of the client, for learners: the async client lives in a trio thread of its own.

Heartbeats go on while the caller computes. Any async function may be run in that thread through the portal.
"""

from __future__ import annotations

import queue as thread_queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import pyarrow as pa
import trio

from . import messages as m
from .batches import RowKeys
from .client import Lease, TransferQueue
from .errors import DeadlineExceeded, QueueError
from .nursery import open_nursery
from .nursery import run as run_trio
from .schema import Task
from .state import Statistics, Version

T = TypeVar("T")

START_SECONDS: Final = 60.0


class Portal:
    """Runs async functions in a trio thread. The first background task that fails fails every later call."""

    def __init__(self, token: trio.lowlevel.TrioToken, nursery: trio.Nursery) -> None:
        self._token = token
        self._nursery = nursery
        self._failure: BaseException | None = None
        self._closed = False

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The result of `await function(*args)` in the trio thread."""
        self.check()
        try:
            return trio.from_thread.run(function, *args, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            self.check()
            raise

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Run `function(*args)` in the background until the portal closes."""
        self.check()
        trio.from_thread.run_sync(self._nursery.start_soon, self._watch, function, args, trio_token=self._token)

    async def _watch(self, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        try:
            await function(*args)
        except BaseException as error:
            if self._failure is None and not isinstance(error, trio.Cancelled):
                self._failure = error
            raise

    def close(self) -> None:
        """The trio thread ends: whoever calls later is told so."""
        self._closed = True

    def fail(self, error: BaseException) -> None:
        """Remember the first failure of the trio thread."""
        self._failure = self._failure or error

    def check(self) -> None:
        """Raise the failure of a background task, if there was one.

        Raises:
            QueueError: the block that opened the queue has ended.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise QueueError("this queue's session was closed; use it inside `with BlockingTransferQueue.connect(…)`")


class BlockingTransferQueue:
    """The methods of `TransferQueue`, each waiting for its result. Open it with `connect`."""

    def __init__(self, aio: TransferQueue, portal: Portal) -> None:
        self.aio = aio
        self.portal = portal
        self.session = aio.session

    @classmethod
    @contextmanager
    def connect(cls, address: str, **options: Any) -> Iterator[BlockingTransferQueue]:
        """A session that lives as long as the block; options as for `TransferQueue.connect`."""
        opened: thread_queue.Queue[BlockingTransferQueue | BaseException] = thread_queue.Queue()
        closing = trio.Event()
        portals: list[Portal] = []

        async def main() -> None:
            async with TransferQueue.connect(address, **options) as aio, open_nursery() as nursery:
                portal = Portal(trio.lowlevel.current_trio_token(), nursery)
                portals.append(portal)
                opened.put(cls(aio, portal))
                await closing.wait()
                nursery.cancel_scope.cancel()

        def run() -> None:
            try:
                run_trio(main)
            # The edge of the thread: whatever ended it is raised in the caller's thread.
            except BaseException as error:
                for portal in portals:
                    portal.fail(error)
                opened.put(error)

        thread = threading.Thread(target=run, name="streamrl-queue", daemon=True)
        thread.start()
        try:
            first = opened.get(timeout=START_SECONDS)
        except thread_queue.Empty:
            raise DeadlineExceeded.waiting("a session", f"the queue at {address}", START_SECONDS) from None
        if isinstance(first, BaseException):
            raise first
        try:
            yield first
        finally:
            try:
                trio.from_thread.run_sync(closing.set, trio_token=first.portal._token)
            except trio.RunFinishedError:
                first.portal.check()
            first.portal.close()
            thread.join(timeout=5.0)

    def _call(self, method: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        async def run() -> T:
            return await method(*args, **options)

        return self.portal.call(run)

    def report(self, activity: str | None = None, **gauges: float) -> None:
        """Say what this process does or waits for, and show numbers."""
        self.aio.report(activity, **gauges)

    def members(self, role: str | None = None, *, after: int = -1, wait: float = 0.0) -> m.Membership:
        """Who is at the queue."""
        return self._call(self.aio.members, role, after=after, wait=wait)

    def put(self, batch: pa.RecordBatch | Sequence[Task], **options: Any) -> m.Receipt:
        """Every line becomes one group of rows."""
        return self._call(self.aio.put, batch, **options)

    def lease(
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
        """Hold up to `rows` rows that are ready for `stage`, or those that are parked there under `keys`."""
        return self._call(
            self.aio.lease,
            stage,
            rows=rows,
            at_least=at_least,
            wait=wait,
            where=where,
            step=step,
            payload=payload,
            columns=columns,
            keys=keys,
        )

    def fetch(self, rows: Sequence[int], columns: Sequence[str]) -> pa.RecordBatch:
        """Columns of rows that were leased without their payload."""
        return self._call(self.aio.fetch, rows, columns)

    def peek(self, stage: str, rows: int = 10) -> tuple[RowKeys, ...]:
        """The rows that are ready for `stage`, in the order of hand-out, without leasing them."""
        return self._call(self.aio.peek, stage, rows)

    def write(self, lease: Lease | int, batch: pa.RecordBatch) -> m.Receipt:
        """Fill the stage's columns and end the lease on those rows."""
        return self._call(self.aio.write, lease, batch)

    def extend(self, lease: Lease | int) -> tuple[int, ...]:
        """The lease's time starts anew; returns the rows that it still holds."""
        return self._call(self.aio.extend, lease)

    def release(self, lease: Lease | int, rows: Sequence[int] | None = None, *, reason: str = "released") -> m.Receipt:
        """Give rows back unwritten."""
        return self._call(self.aio.release, lease, rows, reason=reason)

    def drop(self, lease: Lease | int, rows: Sequence[int] | None = None, *, reason: str) -> m.Receipt:
        """End rows untrained, for a reason that is counted."""
        return self._call(self.aio.drop, lease, rows, reason=reason)

    def begin_version(self, step: int, parent: int | None) -> int:
        """A fresh version id."""
        return self._call(self.aio.begin_version, step, parent)

    def commit_version(self, version: int, digest: str) -> None:
        """The version exists from here."""
        self._call(self.aio.commit_version, version, digest)

    def versions(self) -> tuple[Version, ...]:
        """All versions that were ever begun."""
        return self._call(self.aio.versions)

    def commit(self, step: int, rows: Sequence[int]) -> m.Receipt:
        """These rows were trained in this step."""
        return self._call(self.aio.commit, step, rows)

    def retire(self, through: int) -> None:
        """A durable checkpoint covers all steps up to `through`."""
        self._call(self.aio.retire, through)

    def reconcile(self, step: int) -> int:
        """Go on from `step`."""
        return self._call(self.aio.reconcile, step)

    def statistics(self) -> Statistics:
        """Counts of rows by state."""
        return self._call(self.aio.statistics)

    def journal_bytes(self) -> int:
        """Bytes that the journal's segments hold."""
        return self._call(self.aio.journal_bytes)
