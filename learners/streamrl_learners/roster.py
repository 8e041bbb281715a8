"""The engines that are in the run right now, as the queue's membership tells. trio."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

if TYPE_CHECKING:
    from streamrl_queue import Member, TransferQueue

# A long-poll for the next epoch ends after this many seconds; only a broken broker makes that matter.
POLL_SECONDS: Final = 30.0


class Engine(NamedTuple):
    """One engine process: its session in the queue, its name, and where it listens."""

    session: str
    name: str
    endpoint: str


class Roster:
    """Follows the membership epochs."""

    def __init__(self, queue: TransferQueue) -> None:
        self._queue = queue
        self._changed = trio.Event()
        self.engines: tuple[Engine, ...] = ()

    async def follow(self) -> None:
        """Consumes membership epochs. Produces `engines`. Waits for the queue. Unblocked by the next epoch."""
        epoch = -1
        while True:
            membership = await self._queue.members("engine", after=epoch, wait=POLL_SECONDS)
            epoch = membership.epoch
            self.update(membership.members)

    def update(self, members: Iterable[Member]) -> None:
        """Take over a membership and wake who waits for a change."""
        self.engines = tuple(Engine(m.session, m.name, m.endpoint) for m in members if m.endpoint)
        self.wake()

    def wake(self) -> None:
        """Make everybody who waits in `changed` look again."""
        self._changed.set()
        self._changed = trio.Event()

    async def changed(self) -> None:
        """Return at the next change."""
        await self._changed.wait()

    async def until_gone(self, engine: Engine) -> None:
        """Return when `engine` is no member any more."""
        while engine in self.engines:
            await self.changed()
