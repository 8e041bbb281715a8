"""The asyncio form of the client, for programs whose event loop is asyncio's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from .client import TransferQueue
from .portal import CLOSE_SECONDS, ConnectOptions, SessionThread, SessionTwin, log

P = ParamSpec("P")
T = TypeVar("T")


def _awaits(
    method: Callable[Concatenate[TransferQueue, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SessionTwin, P], Coroutine[Any, Any, T]]:
    """The method, run in the trio thread while the caller's task awaits it."""

    @functools.wraps(method)
    async def call(self: SessionTwin, /, *args: P.args, **options: P.kwargs) -> T:
        submitted = self.portal.submit(functools.partial(method, self.aio, *args, **options))
        try:
            return await asyncio.wrap_future(submitted)
        # Also when the loop ends and closes its coroutines.
        except (asyncio.CancelledError, GeneratorExit):
            self.portal.abandon(submitted, self.give_back)
            raise

    return call


class AsyncioTransferQueue(SessionTwin):
    """The methods of `TransferQueue` for asyncio: same names, arguments and errors. Open it with `connect`.

        async with AsyncioTransferQueue.connect("tcp://127.0.0.1:7001") as queue:
            lease = await queue.lease("work", rows=4, wait=5)

    The session lives in a thread of its own: its heartbeat goes on while the loop is busy. Tasks, and loops in other
    threads, may share it. A task that is cancelled (`asyncio.timeout`, a task group) cancels its operation; rows that
    were leased in that moment go back.
    """

    @classmethod
    @asynccontextmanager
    async def connect(cls, address: str, **options: Unpack[ConnectOptions]) -> AsyncIterator[Self]:
        """A session that lives as long as the block; options as for `TransferQueue.connect`.

        Raises:
            DeadlineExceeded: nobody answers at `address` (or the key is another one: such messages are dropped).
        """
        thread = SessionThread(TransferQueue.connect(address, **options))
        loop_ended = False
        try:
            yield cls._of(await asyncio.wrap_future(thread.opened))
        except GeneratorExit:
            loop_ended = True
            raise
        finally:
            thread.close()
            # In a loop that has ended nobody can await: the session ends by itself.
            if not loop_ended:
                await _ended(thread, address)

    announce = _awaits(TransferQueue.announce)
    members = _awaits(TransferQueue.members)
    fence = _awaits(TransferQueue.fence)
    end_session = _awaits(TransferQueue.end_session)
    release_absent = _awaits(TransferQueue.release_absent)
    put = _awaits(TransferQueue.put)
    lease = _awaits(TransferQueue.lease)
    fetch = _awaits(TransferQueue.fetch)
    peek = _awaits(TransferQueue.peek)
    write = _awaits(TransferQueue.write)
    extend = _awaits(TransferQueue.extend)
    release = _awaits(TransferQueue.release)
    drop = _awaits(TransferQueue.drop)
    end_rows = _awaits(TransferQueue.end_rows)
    begin_version = _awaits(TransferQueue.begin_version)
    commit_version = _awaits(TransferQueue.commit_version)
    versions = _awaits(TransferQueue.versions)
    commit = _awaits(TransferQueue.commit)
    retire = _awaits(TransferQueue.retire)
    reconcile = _awaits(TransferQueue.reconcile)
    leased = _awaits(TransferQueue.leased)
    statistics = _awaits(TransferQueue.statistics)
    journal_bytes = _awaits(TransferQueue.journal_bytes)
    protocol_errors = _awaits(TransferQueue.protocol_errors)


async def _ended(thread: SessionThread[TransferQueue], address: str) -> None:
    ended = asyncio.wrap_future(thread.ended)
    await asyncio.wait([ended], timeout=CLOSE_SECONDS)
    if ended.done():
        ended.result()
    else:
        log.warning("the session at %s has not ended within %s s; going on without it", address, CLOSE_SECONDS)
