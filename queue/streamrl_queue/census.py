"""How many rows are in which state, and how those that are gone have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .config import Flow
from .state import Row, StageCount


class Census:
    """Counts that follow the rows: whoever changes a row says so, with `recount`."""

    def __init__(self) -> None:
        # Split and state → rows, those that are gone included.
        self.states: Counter[tuple[str, str]] = Counter()
        # How and why rows ended that were not trained.
        self.ends: Counter[tuple[str, str]] = Counter()
        # Stage → ready, leased, written.
        self.stages: dict[str, Counter[str]] = {}
        # Rows that wait for their first stage, which a put may not outrun.
        self.unstarted = 0
        self._parking: frozenset[str] = frozenset()

    def configure(self, flow: Flow) -> None:
        """Rows pass the stages of `flow`."""
        self._parking = frozenset(stage.name for stage in flow.stages if stage.parks)
        for stage in flow.stages:
            self.stages.setdefault(stage.name, Counter())

    def state_of(self, row: Row) -> str:
        """The one state that the row is in."""
        if row.step is not None:
            return "trained"
        if row.leases:
            return "leased"
        if row.ready:
            if self._parking and row.ready.keys() <= self._parking:
                return "parked"
            if row.group.admitted or not row.bound:
                return "ready"
        return "waiting"

    def count(self, row: Row) -> None:
        """A row that was not counted before."""
        state = row.state = self.state_of(row)
        self.states[row.split, state] += 1
        row.unstarted = len(row.places) == 1 and (state == "waiting" or state == "ready")
        self.unstarted += row.unstarted

    def count_alike(self, rows: Sequence[Row]) -> None:
        """Rows that stand alike: those of one put."""
        first = rows[0]
        self.count(first)
        state, unstarted = first.state, first.unstarted
        for row in rows[1:]:
            row.state, row.unstarted = state, unstarted
        self.states[first.split, state] += len(rows) - 1
        self.unstarted += unstarted * (len(rows) - 1)

    def uncount(self, row: Row) -> None:
        """The row is gone."""
        self.states[row.split, row.state] -= 1
        self.unstarted -= row.unstarted

    def recount(self, rows: Iterable[Row]) -> None:
        """Something about these rows has changed."""
        states, state_of = self.states, self.state_of
        for row in rows:
            state = state_of(row)
            if state != row.state:
                states[row.split, row.state] -= 1
                states[row.split, state] += 1
                row.state = state
            unstarted = len(row.places) == 1 and (state == "waiting" or state == "ready")
            if unstarted is not row.unstarted:
                self.unstarted += unstarted - row.unstarted
                row.unstarted = unstarted

    def end(self, row: Row, how: str, reason: str) -> None:
        """The row is gone, and was not trained."""
        self.uncount(row)
        self.ends[how, reason] += 1
        self.states[row.split, how] += 1

    def totals(self) -> tuple[Counter[str], dict[str, dict[str, int]]]:
        """Rows by state, and by split and state."""
        totals: Counter[str] = Counter()
        by_split: dict[str, dict[str, int]] = {}
        for (split, state), n in sorted(self.states.items()):
            if n:
                totals[state] += n
                by_split.setdefault(split, {})[state] = n
        return totals, by_split

    def reasons(self, how: str) -> dict[str, int]:
        """Why rows ended that way, and how many."""
        return {reason: n for (of, reason), n in self.ends.items() if of == how}

    def stage(self, name: str, *, parks: bool) -> StageCount:
        """The rows of one stage."""
        counts = self.stages[name]
        ready, parked = (0, counts["ready"]) if parks else (counts["ready"], 0)
        return StageCount(ready, counts["leased"], counts["written"], parked)
