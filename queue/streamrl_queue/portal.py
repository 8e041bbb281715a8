"""A trio thread behind code that is not trio: what the blocking and the asyncio form of the client share.

    caller's thread                        trio thread
    submit(function) ──► Call ───────────► one task in the session's nursery
    waits, or awaits ◄── Call's result ◄── its outcome

The session and its heartbeat live in the trio thread, whatever the caller's thread computes meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, Generic, Self, TypedDict, TypeVar

import trio

from .client import Lease, TransferQueue
from .errors import QueueError, StreamRLError
from .nursery import open_nursery
from .nursery import run as run_trio
from .transport import Transport
from .waits import Wait

log = logging.getLogger(__name__)

T = TypeVar("T")

# A session says goodbye within a second; a thread that takes longer is left alone.
CLOSE_SECONDS: Final = 5.0


class Call(concurrent.futures.Future[T]):
    """An async function that runs in the trio thread, and its outcome. Give it up with `Portal.abandon`."""

    def __init__(self) -> None:
        super().__init__()
        self.scope = trio.CancelScope()
        # It ends in the trio thread alone, so that what it brought is never lost between two threads.
        self.set_running_or_notify_cancel()


class Portal:
    """Runs async functions in a trio thread. The first background task that fails fails every later call."""

    def __init__(self, token: trio.lowlevel.TrioToken, nursery: trio.Nursery) -> None:
        self._token = token
        self._nursery = nursery
        self._lock = threading.Lock()
        self._calls: set[Call[Any]] = set()
        self._failure: BaseException | None = None
        self._open = True
        self._ended = False

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[Self]:
        """A portal into the running trio thread. What still runs at the end of the block is cancelled."""
        async with open_nursery() as nursery:
            portal = cls(trio.lowlevel.current_trio_token(), nursery)
            try:
                yield portal
            finally:
                portal._open = False
                nursery.cancel_scope.cancel()

    def submit(self, function: Callable[..., Awaitable[T]], *args: Any) -> Call[T]:
        """`await function(*args)` begins in the trio thread; from any thread.

        Raises:
            QueueError: the block that opened the queue has ended.
        """
        call: Call[T] = Call()
        with self._lock:
            self.check()
            self._calls.add(call)
        self._start(self._run, call, function, args)
        return call

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The result of `await function(*args)` in the trio thread; an interrupted wait cancels it."""
        return self.wait(self.submit(function, *args))

    def wait(self, call: Call[T], undo: Callable[[T], Awaitable[Any]] | None = None) -> T:
        """The result of `call`; an interrupted wait abandons it."""
        try:
            return call.result()
        except BaseException as error:
            if not (call.done() and call.exception() is error):
                self.abandon(call, undo)
            raise

    def abandon(self, call: Call[T], undo: Callable[[T], Awaitable[Any]] | None = None) -> None:
        """Nobody waits for `call` any more: it is cancelled. If it succeeds all the same, `undo` gets its result."""

        def take_back(_: object) -> None:
            if undo is not None and call.exception() is None:
                self._start(_try, undo, call.result())

        self._in_trio(call.scope.cancel)
        call.add_done_callback(take_back)

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Run `function(*args)` in the background until the portal closes; its error ends the session."""
        with self._lock:
            self.check()
        self._start(self._watch, function, args)

    def check(self) -> None:
        """Raise the failure of a background task, if there was one.

        Raises:
            QueueError: the block that opened the queue has ended.
        """
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise _closed()

    def end(self, failure: BaseException | None) -> None:
        """The trio thread has ended: whoever waits, or calls later, is told so."""
        with self._lock:
            self._failure = self._failure or failure
            self._ended = True
            left, self._calls = self._calls, set()
        for call in left:
            call.set_exception(self._failure or _closed())

    def _in_trio(self, function: Callable[..., Any], *args: Any) -> None:
        # A thread that has ended runs nothing; `end` answers for it.
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function, *args)

    def _start(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        def start() -> None:
            if self._open:
                self._nursery.start_soon(function, *args)

        self._in_trio(start)

    async def _run(self, call: Call[T], function: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> None:
        """Its own error is the caller's. When the session ends around it, the caller is told why by `end`."""
        outcome: Callable[[], None] = partial(call.set_exception, concurrent.futures.CancelledError())
        with call.scope:
            try:
                outcome = partial(call.set_result, await function(*args))
            except trio.Cancelled:
                raise
            # The edge of the thread: the error is raised where the caller waits.
            except BaseException as error:
                outcome = partial(call.set_exception, error)
        self._calls.discard(call)
        outcome()

    async def _watch(self, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        try:
            await function(*args)
        except BaseException as error:
            if self._failure is None and not isinstance(error, trio.Cancelled):
                self._failure = error
            raise


async def _try(function: Callable[[T], Awaitable[Any]], value: T) -> None:
    try:
        await function(value)
    except StreamRLError as error:
        log.warning("what an abandoned call brought could not be given back: %s", error)


def _closed() -> QueueError:
    return QueueError("this queue's session was closed; use it inside the `with` block that connected it")


C = TypeVar("C")


class SessionThread(Generic[C]):
    """A trio thread that holds an async context open until `close`.

    `opened` brings what the context gave, and the portal; `ended` is done when nothing of it runs any more. Errors of
    either part arrive there as themselves.
    """

    def __init__(self, context: AbstractAsyncContextManager[C]) -> None:
        self.opened: concurrent.futures.Future[tuple[C, Portal]] = concurrent.futures.Future()
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Nobody cancels them but this thread.
        self.opened.set_running_or_notify_cancel()
        self.ended.set_running_or_notify_cancel()
        self._context = context
        self._closing = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._close: Callable[[], Any] = self._scope.cancel
        threading.Thread(target=self._run, name="streamrl-queue", daemon=True).start()

    def close(self) -> None:
        """Let the context end, or not open at all; from any thread, without waiting."""
        self._closing = True
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(lambda: self._close())

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        # One of the two sees what the other has set.
        if self._closing:
            self._scope.cancel()
        with self._scope:
            async with self._context as value, Portal.open() as portal:
                closing = trio.Event()
                self._close, self._portal = closing.set, portal
                self.opened.set_result((value, portal))
                await closing.wait()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            run_trio(self._main)
        # The edge of the thread: whatever ended it is raised where the caller waits.
        except BaseException as error:
            failure = error
        if self.opened.done():
            self._portal.end(failure)
        else:
            self.opened.set_exception(failure or _closed())
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)


class ConnectOptions(TypedDict, total=False):
    """Options of `TransferQueue.connect`, which says what they mean."""

    key: bytes | None
    role: str
    name: str | None
    endpoint: str | None
    deadline: float
    transport: Transport
    session: str | None
    wall: Callable[[], float]
    mapped: bool


class SessionTwin:
    """A session of the queue, seen from outside its trio thread: `aio` is the client there, `portal` the way to it."""

    def __init__(self, aio: TransferQueue, portal: Portal) -> None:
        self.aio = aio
        self.portal = portal
        self.session = aio.session
        self.address = aio.address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.aio!r}>"

    @classmethod
    def _of(cls, opened: tuple[TransferQueue, Portal]) -> Self:
        return cls(*opened)

    def report(self, activity: str | None = None, **gauges: float) -> None:
        """Say what this process does or waits for, and show numbers; both go out with the next heartbeat."""
        self.aio.report(activity, **gauges)

    def waiting(self, what: str, *, row: int = 0, on: str = "") -> AbstractContextManager[Wait]:
        """Say for as long as the block what this process waits for or works on; see `TransferQueue.waiting`."""
        return self.aio.waiting(what, row=row, on=on)

    async def give_back(self, result: object) -> None:
        """In the trio thread: rows that were leased for somebody who has stopped waiting go back."""
        if isinstance(result, Lease):
            await self.aio.release(result, reason="nobody waited for them any more")
