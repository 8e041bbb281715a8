"""What a run found: medians over rounds, latencies of all rounds together, ratios round by round."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from .alone import Own
from .measure import Figures, Visit
from .system import SYSTEMS


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one measurement; latencies in seconds, `cost` in CPU microseconds per row."""

    rate: float
    megabytes: float
    cost: float
    cost_by_role: dict[str, float]
    p50: float
    p99: float


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All visits by system, in order of rounds; who was left out and why."""

    visits: dict[str, list[Visit]] = {}
    skipped: dict[str, str] = {}
    own: Own | None = None

    def pipeline(self, name: str) -> Summary | None:
        """The whole pipeline's medians; None when the system was not measured."""
        return _summary([visit.pipeline for visit in self.visits.get(name, [])])

    def phase(self, name: str, phase: str) -> Summary | None:
        """One phase's medians, `put 64` for example."""
        return _summary([v.phases[phase] for v in self.visits.get(name, []) if phase in v.phases])

    def ratio(self, ours: str, theirs: str, phase: str | None = None, their_phase: str | None = None) -> float | None:
        """How many times the rows per second of another system: the median of the rounds that both took part in."""
        pairs = list(zip(self.visits.get(ours, []), self.visits.get(theirs, []), strict=False))
        if phase is None:
            return _median([a.pipeline.rate / b.pipeline.rate for a, b in pairs])
        found = [(a.phases.get(phase), b.phases.get(their_phase or phase)) for a, b in pairs]
        return _median([a.rate / b.rate for a, b in found if a and b])

    def cheaper(self, ours: str, theirs: str) -> float | None:
        """How many times less CPU per row in the pipeline."""
        pairs = zip(self.visits.get(ours, []), self.visits.get(theirs, []), strict=False)
        return _median([b.pipeline.cost / a.pipeline.cost for a, b in pairs])

    def start_seconds(self, name: str) -> float | None:
        return _median([visit.start_seconds for visit in self.visits.get(name, [])])

    def resident_megabytes(self, name: str) -> float | None:
        return _median([visit.resident_bytes / 1e6 for visit in self.visits.get(name, [])])

    def measured(self) -> list[str]:
        """The systems that were measured, in the order of the list."""
        return [name for name in SYSTEMS if self.visits.get(name)]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _summary(figures: Sequence[Figures]) -> Summary | None:
    if not figures:
        return None
    latencies = [seconds for one in figures for seconds in one.latencies]
    roles = {role for one in figures for role in one.cpu_by_role}
    shares = {role: [one.cpu_by_role.get(role, 0.0) / one.rows * 1e6 for one in figures] for role in roles}
    return Summary(
        rate=median(one.rate for one in figures),
        megabytes=median(one.megabytes for one in figures),
        cost=median(one.cost for one in figures),
        cost_by_role={role: median(costs) for role, costs in shares.items()},
        p50=quantile(latencies, 0.5),
        p99=quantile(latencies, 0.99),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the others do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")
