"""The blocking form of the client, for code without an event loop."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from .client import TransferQueue
from .portal import CLOSE_SECONDS, ConnectOptions, SessionThread, SessionTwin, log

P = ParamSpec("P")
T = TypeVar("T")


def _waits(
    method: Callable[Concatenate[TransferQueue, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SessionTwin, P], T]:
    """The method, run in the trio thread while the caller waits."""

    @functools.wraps(method)
    def call(self: SessionTwin, /, *args: P.args, **options: P.kwargs) -> T:
        run = functools.partial(method, self.aio, *args, **options)
        return self.portal.wait(self.portal.submit(run), self.give_back)

    return call


class BlockingTransferQueue(SessionTwin):
    """The methods of `TransferQueue`, each waiting for its result. Open it with `connect`.

    Heartbeats go on while the caller computes. Threads may share it. Any async function may be run in the session's
    thread through `portal`. A wait that is interrupted (Ctrl-C) cancels its operation and leaves nothing leased.
    """

    @classmethod
    @contextmanager
    def connect(cls, address: str, **options: Unpack[ConnectOptions]) -> Iterator[Self]:
        """A session that lives as long as the block; options as for `TransferQueue.connect`.

        Raises:
            DeadlineExceeded: nobody answers at `address` (or the key is another one: such messages are dropped).
        """
        thread = SessionThread(TransferQueue.connect(address, **options))
        try:
            yield cls._of(thread.opened.result())
        finally:
            thread.close()
            try:
                thread.ended.result(CLOSE_SECONDS)
            except concurrent.futures.TimeoutError:
                log.warning("the session at %s has not ended within %s s; going on without it", address, CLOSE_SECONDS)

    announce = _waits(TransferQueue.announce)
    members = _waits(TransferQueue.members)
    fence = _waits(TransferQueue.fence)
    end_session = _waits(TransferQueue.end_session)
    release_absent = _waits(TransferQueue.release_absent)
    put = _waits(TransferQueue.put)
    lease = _waits(TransferQueue.lease)
    fetch = _waits(TransferQueue.fetch)
    peek = _waits(TransferQueue.peek)
    write = _waits(TransferQueue.write)
    extend = _waits(TransferQueue.extend)
    release = _waits(TransferQueue.release)
    drop = _waits(TransferQueue.drop)
    end_rows = _waits(TransferQueue.end_rows)
    begin_version = _waits(TransferQueue.begin_version)
    commit_version = _waits(TransferQueue.commit_version)
    versions = _waits(TransferQueue.versions)
    commit = _waits(TransferQueue.commit)
    retire = _waits(TransferQueue.retire)
    reconcile = _waits(TransferQueue.reconcile)
    leased = _waits(TransferQueue.leased)
    statistics = _waits(TransferQueue.statistics)
    journal_bytes = _waits(TransferQueue.journal_bytes)
    protocol_errors = _waits(TransferQueue.protocol_errors)
