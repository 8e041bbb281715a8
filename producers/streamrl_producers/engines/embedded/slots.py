"""Which slot of the KV cache belongs to whom. Pure.

A slot is *busy* while its request runs, *idle* while it keeps the prefix of a session between two turns, else *free*.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class Taken(NamedTuple):
    """A slot for a request; `kept` says that it still holds the session's prefix."""

    slot: int
    kept: bool


class SlotPool:
    """Free and idle slots. An idle slot is taken from the session that was idle the longest, when none is free."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))  # lowest slot on top
        self._idle: OrderedDict[str, int] = OrderedDict()

    def __repr__(self) -> str:
        return f"SlotPool(free={len(self._free)}, idle={len(self._idle)})"

    @property
    def available(self) -> int:
        """Slots that a request could take now."""
        return len(self._free) + len(self._idle)

    def take(self, session: str) -> Taken:
        """A slot for a request of `session`: its own idle one, else a free one, else the least recently used."""
        if session in self._idle:
            return Taken(self._idle.pop(session), kept=True)
        if self._free:
            return Taken(self._free.pop(), kept=False)
        return Taken(self._idle.popitem(last=False)[1], kept=False)

    def keep(self, session: str, slot: int) -> None:
        """The request in `slot` ended: keep its prefix for the session's next turn (the session `""` has none)."""
        if not session:
            self._free.append(slot)
            return
        older = self._idle.pop(session, None)
        if older is not None:
            self._free.append(older)
        self._idle[session] = slot

    def forget(self) -> None:
        """Forget every idle prefix."""
        self._free += self._idle.values()
        self._idle.clear()
