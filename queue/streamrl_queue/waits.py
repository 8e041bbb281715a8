"""What a process waits for or works on, as it tells with its heartbeat.

    with queue.waiting("plays", row=6501) as wait:
        wait.at("tool `search`")        # from now on it is at this
        wait.at("turn 3", on="engine")  # and here somebody else must act

Each entry lives as long as its block. What still holds on to a block that was left (a thread that nobody could stop)
tells nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import nsmallest
from typing import Final

import msgspec

# Entries that leave with a heartbeat: those that last longest.
MOST_TOLD: Final = 8
# Code of users may name what they do; a heartbeat is no place for a page of it.
MOST_CHARACTERS: Final = 200


class Waiting(msgspec.Struct, frozen=True):
    """One thing that a process waits for or works on.

    `since` is in seconds since the epoch. `row` is the row that it is about (0: none). `on` names who must act before
    it ends: a process, all of a role, or a stage of the queue; empty when that is the process itself.
    """

    what: str
    since: float
    row: int = 0
    on: str = ""


class Wait:
    """An open entry; `at` says where it has come to. Any thread may call it."""

    __slots__ = ("_told", "_wall")

    def __init__(self, told: Waiting, wall: Callable[[], float]) -> None:
        self._told = told
        self._wall = wall

    def __repr__(self) -> str:
        return f"<Wait {self._told.what}>"

    @property
    def told(self) -> Waiting:
        """The entry as it stands."""
        return self._told

    def at(self, what: str, on: str = "") -> None:
        """Something else is awaited from now on, by `on` if somebody else must act."""
        self._told = Waiting(what[:MOST_CHARACTERS], self._wall(), self._told.row, on)


class Waits:
    """The open entries of one process."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._open: dict[int, Wait] = {}

    @contextmanager
    def waiting(self, what: str, *, row: int = 0, on: str = "") -> Iterator[Wait]:
        """An entry for as long as the block."""
        wait = Wait(Waiting(what[:MOST_CHARACTERS], self._wall(), row, on), self._wall)
        self._open[id(wait)] = wait
        try:
            yield wait
        finally:
            del self._open[id(wait)]

    def longest(self) -> tuple[Waiting, ...]:
        """The entries that last longest, the longest first."""
        # One call copies them: other threads open and close entries meanwhile.
        return tuple(nsmallest(MOST_TOLD, [wait.told for wait in list(self._open.values())], key=lambda w: w.since))
