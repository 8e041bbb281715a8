"""Which requests are over for their senders: one that comes again is a copy on its way from the past. Pure.

Every message names the requests of its session that still await replies (`Envelope.asking`). An id that is not among
them is never asked again, so whatever comes with it, however late, concerns nobody. This outlives the session: a copy
may arrive after the session was lost and opened again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

# Sessions that are remembered, those heard of last. Live ones are heard of every second.
MOST_SESSIONS: Final = 1 << 14


class _Asking(NamedTuple):
    """Of the ids below `below`, only those in `open` may still be asked."""

    below: int
    open: frozenset[int]


_NOTHING: Final = _Asking(0, frozenset())


class Replays:
    """What each session says that it awaits."""

    def __init__(self) -> None:
        self._asking: OrderedDict[str, _Asking] = OrderedDict()

    def note(self, session: str, asking: tuple[int, ...]) -> None:
        """What a message says; messages may come in any order, for an id that is over stays so."""
        if not asking:
            return
        known = self._asking.get(session, _NOTHING)
        below, named = asking[0], frozenset(asking[1:])
        still = {id for id in known.open if id >= below or id in named} | {id for id in named if id >= known.below}
        self._asking[session] = _Asking(max(below, known.below), frozenset(still))
        self._asking.move_to_end(session)
        if len(self._asking) > MOST_SESSIONS:
            self._asking.popitem(last=False)

    def is_over(self, session: str, id: int) -> bool:
        """Whether nobody awaits a reply to this request any more."""
        known = self._asking.get(session, _NOTHING)
        return id < known.below and id not in known.open
