"""Requests that come again: by a sender who lost the reply, who gets it again, or as a copy from the past. Pure.

Every message names the requests of its session that still await replies (`Envelope.asking`). An id that is not among
them is never asked again, so whatever comes with it, however late, concerns nobody. This outlives the session: a copy
may arrive after the session was lost and opened again.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Final, NamedTuple

import msgspec

from .recent import remember
from .transport import Buffer

# Replies kept per session. Clients name the requests that still await replies, so only one with that many in flight
# ever has more.
MOST_REPLIES: Final = 1024
# Sessions that are remembered, those heard of last. Live ones are heard of every second.
MOST_SESSIONS: Final = 1 << 14


Reply = tuple[msgspec.Struct, Buffer | None]


class _Asking(NamedTuple):
    """Of the ids below `below`, only those in `open` may still be asked."""

    below: int
    open: frozenset[int]


_NOTHING: Final = _Asking(0, frozenset())


class Replays:
    """What each session says that it awaits, and what it was replied."""

    def __init__(self) -> None:
        self._asking: OrderedDict[str, _Asking] = OrderedDict()
        self.replies: defaultdict[str, OrderedDict[int, Reply]] = defaultdict(OrderedDict)

    def note(self, session: str, asking: tuple[int, ...]) -> None:
        """What a message says; messages may come in any order, for an id that is over stays so."""
        if not asking:
            return
        known = self._asking.get(session, _NOTHING)
        below, named = asking[0], frozenset(asking[1:])
        still = {id for id in known.open if id >= below or id in named} | {id for id in named if id >= known.below}
        remember(self._asking, session, _Asking(max(below, known.below), frozenset(still)), MOST_SESSIONS)
        if (replies := self.replies.get(session)) is not None:
            for id in [id for id in replies if self.is_over(session, id)]:
                del replies[id]

    def is_over(self, session: str, id: int) -> bool:
        """Whether nobody awaits a reply to this request any more."""
        known = self._asking.get(session, _NOTHING)
        return id < known.below and id not in known.open

    def keep(self, session: str, id: int, reply: Reply) -> None:
        """The reply to a request, in case that it gets lost."""
        remember(self.replies[session], id, reply, MOST_REPLIES)

    def reply(self, session: str, id: int) -> Reply | None:
        """What this request was replied before; None when it was not."""
        return self.replies[session].get(id) if session in self.replies else None

    def end(self, session: str) -> None:
        """The session is over; what it was replied is asked for no more."""
        self.replies.pop(session, None)
