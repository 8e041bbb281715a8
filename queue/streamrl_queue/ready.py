"""Rows that are ready for a stage, in the order in which the stage hands them out.

Priority goes first, always. Among rows of one priority, by `Stage.order`:

    admission     in the order in which they were put
    freshest      the row of the latest birth (the step of the oldest version that sampled it), then the newest
    ready_first   in the order in which they became ready; what comes back goes to the end
    balanced      a lease's mean length is near that of the rows in front: the oldest row first, then those of the
                  `WINDOW` oldest that make up for its length

A stage that trains hands out the earliest birth before anything else, priority included, when its order is
`admission` or when `on_stale` is `wait`: places in the steps to come are kept for rows in the order of birth (see
`admission.py`), and once the row in front may not have a place, none behind it may. `freshest` contradicts that, so
`Flow` refuses it there.

A stage has one heap for each environment and each way in which admission treats rows, so that nobody waits behind a
row that may not start yet and is itself free to. A lease costs the same whether a thousand or a million rows are ready.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from .config import Flow, Stage
from .state import Line, Rank, Row

# Rows among which a `balanced` stage chooses: enough to find the lengths that make up for those of long rows.
WINDOW: Final = 64
# A heap that is smaller is not worth tidying.
FEW: Final = 64


class ReadyQueue:
    """The ready rows of one stage.

    An entry holds while `row.ready` has this very entry; what moved on is skipped when it comes up, and cleared away
    before it outnumbers the rest. Taking rows changes nothing that lasts: those that were not granted are put back
    before the next look.
    """

    def __init__(self, stage: Stage, flow: Flow, rows: Mapping[int, Row]) -> None:
        self.name = stage.name
        # Key of a heap → the entries.
        self.lines: dict[Line, list[Rank]] = {}
        self.rank = _ranker(stage, flow)
        self._rows = rows
        self._balanced = stage.order == "balanced"
        self._limits: dict[Line, int] = {}
        self._taken: list[tuple[Line, Rank]] = []

    def push(self, line: Line, entry: Rank) -> None:
        """The row of `entry` queues in `line`."""
        heap = self.lines.get(line)
        if heap is None:
            heap = self.lines[line] = []
            self._limits[line] = FEW
        heapq.heappush(heap, entry)
        if len(heap) > self._limits[line]:
            heap[:] = [entry for entry in heap if self.holds(entry) is not None]
            heapq.heapify(heap)
            self._limits[line] = max(FEW, 2 * len(heap))

    def holds(self, entry: Rank) -> Row | None:
        """The row of `entry`, if it is still ready by it."""
        row = self._rows.get(entry[3])
        return row if row is not None and row.ready.get(self.name) is entry else None

    def take(self, env: str | None, may_take: Callable[[Row], bool], tokens: Callable[[Row], int]) -> Iterator[Row]:
        """The rows to hand out, one after another, until the caller has enough.

        Args:
            env: only rows of this environment.
            may_take: whether a row may be handed out after those that were taken; no row behind it is when not.
            tokens: the length of what is handed out with a row.
        """
        self._restore()
        lines = [line for line in self.lines if env is None or line[0] == env]
        if len(lines) == 1 and not self._balanced:
            return self._pass_one(lines[0], may_take)
        source = _Merged(self, lines, self._taken)
        return self._balance(source, may_take, tokens) if self._balanced else self._pass_on(source, may_take)

    def _restore(self) -> None:
        taken, self._taken = self._taken, []
        for line, entry in taken:
            if self.holds(entry) is not None:
                heapq.heappush(self.lines[line], entry)

    def _pass_one(self, line: Line, may_take: Callable[[Row], bool]) -> Iterator[Row]:
        heap, taken, rows, name = self.lines[line], self._taken, self._rows, self.name
        while heap:
            entry = heapq.heappop(heap)
            row = rows.get(entry[3])
            if row is not None and row.ready.get(name) is entry:
                taken.append((line, entry))
                if not may_take(row):
                    return
                yield row

    @staticmethod
    def _pass_on(source: _Merged, may_take: Callable[[Row], bool]) -> Iterator[Row]:
        while (found := source.next()) is not None:
            row, line = found
            if may_take(row):
                yield row
            else:
                source.close(line)

    @staticmethod
    def _balance(source: _Merged, may_take: Callable[[Row], bool], tokens: Callable[[Row], int]) -> Iterator[Row]:
        """Rows of equal rank but for their age, such that after each the mean length is near that of the window."""
        window: list[tuple[int, int, Row, Line]] = []
        taken = total = 0
        mean = 0.0
        while True:
            while len(window) < WINDOW and (found := source.next(window[0][2] if window else None)) is not None:
                row, line = found
                bisect.insort(window, (tokens(row), row.id, row, line))
            if not window:
                return
            if not taken:
                mean = sum(item[0] for item in window) / len(window)
            at = _nearest(window, mean * (taken + 1) - total) if taken else _oldest(window)
            length, _, row, line = window.pop(at)
            if may_take(row):
                taken, total = taken + 1, total + length
                yield row
            else:
                source.close(line)
                window = [item for item in window if item[3] != line]

    def peek(self) -> Iterator[Row]:
        """The rows in the order of hand-out (of a balanced stage: by age), without taking one out."""
        self._restore()
        for entry in heapq.merge(*(_ascending(heap) for heap in self.lines.values())):
            if (row := self.holds(entry)) is not None:
                yield row

    def ready(self) -> Iterator[Row]:
        """All rows that are ready, in no order."""
        self._restore()
        return (row for heap in self.lines.values() for entry in heap if (row := self.holds(entry)) is not None)


class _Merged:
    """The rows of several heaps in one order. What comes out is noted in `taken`."""

    def __init__(self, queue: ReadyQueue, lines: list[Line], taken: list[tuple[Line, Rank]]) -> None:
        self._queue = queue
        self._taken = taken
        self._fronts: list[tuple[Rank, Line, Row]] = []
        self._last: Line | None = None
        self._closed: set[Line] = set()
        for line in lines:
            self._open(line)

    def _open(self, line: Line) -> None:
        """Clear entries at the front of a heap that no longer hold; the first that does stands for the heap."""
        heap, holds = self._queue.lines[line], self._queue.holds
        while heap:
            if (row := holds(heap[0])) is not None:
                heapq.heappush(self._fronts, (heap[0], line, row))
                return
            heapq.heappop(heap)

    def next(self, like: Row | None = None) -> tuple[Row, Line] | None:
        """The next row and its heap; with `like`, only if nothing but age is between the two."""
        if self._last is not None:
            self._open(self._last)
            self._last = None
        while self._fronts:
            entry, line, row = self._fronts[0]
            if like is not None and entry[:2] != like.ready[self._queue.name][:2]:
                return None
            heapq.heappop(self._fronts)
            if line in self._closed:
                continue
            heapq.heappop(self._queue.lines[line])
            self._taken.append((line, entry))
            self._last = line
            return row, line
        return None

    def close(self, line: Line) -> None:
        """Nothing more of this heap."""
        self._closed.add(line)
        if self._last == line:
            self._last = None


def _ranker(stage: Stage, flow: Flow) -> Callable[[Row, int, int], Rank]:
    """From a row, the earliest birth of those handed out with it, and a number that grows, to its rank.

    The smallest goes first; the last part names the row.
    """
    wait = flow.admission is not None and flow.admission.on_stale == "wait"
    by_birth = stage.trains and (wait or stage.order == "admission")
    match stage.order:
        case "freshest":
            return lambda row, born, number: (-row.priority, -born, -row.id, row.id)
        case "ready_first" if by_birth:
            return lambda row, born, number: (born, -row.priority, number, row.id)
        case "ready_first":
            return lambda row, born, number: (0, -row.priority, number, row.id)
        case _ if by_birth:
            return lambda row, born, number: (born, -row.priority, 0, row.id)
    return lambda row, born, number: (0, -row.priority, 0, row.id)


def _nearest(window: list[tuple[int, int, Row, Line]], length: float) -> int:
    """The place of the length nearest to `length`; of two, the shorter."""
    at = bisect.bisect_left(window, length, key=lambda item: item[0])
    if at == len(window) or (at and length - window[at - 1][0] <= window[at][0] - length):
        at = bisect.bisect_left(window, window[at - 1][0], key=lambda item: item[0])
    return at


def _oldest(window: list[tuple[int, int, Row, Line]]) -> int:
    return min(range(len(window)), key=lambda at: window[at][1])


def _ascending(heap: list[Rank]) -> Iterator[Rank]:
    """The smallest entries of a heap first, as many as are asked for, without taking one out."""
    front = [(heap[0], 0)] if heap else []
    while front:
        rank, place = heapq.heappop(front)
        yield rank
        for child in (2 * place + 1, 2 * place + 2):
            if child < len(heap):
                heapq.heappush(front, (heap[child], child))
