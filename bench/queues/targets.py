"""What streamrl's queue is meant to reach, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from .alone import Own
from .results import Results, quantile

OURS: Final = "streamrl"
MAPPED: Final = "streamrl-mapped"
# Short measurements on a shared machine move by so much.
FLAT: Final = 1.5


class Line(NamedTuple):
    """One target. `measured` is None when this run has not measured it."""

    what: str
    target: str
    measured: float | None
    unit: str
    reached: Callable[[float], bool]


def at_least(limit: float) -> Callable[[float], bool]:
    return lambda value: value >= limit


def at_most(limit: float) -> Callable[[float], bool]:
    return lambda value: value <= limit


def lines(results: Results) -> Iterator[Line]:
    """All targets in the order of the table in the README."""
    yield from _pipeline(results)
    yield from _one_row(results)
    if results.own is not None:
        yield from _latencies(results.own)
    yield from _journal(results)
    yield Line("start-up of a broker", "≤ 1 s", results.start_seconds(OURS), "s", at_most(1.0))
    yield Line("memory of an empty broker", "≤ 100 MB", results.resident_megabytes(OURS), "MB", at_most(100.0))


def _pipeline(results: Results) -> Iterator[Line]:
    for peer, times in (("transferqueue", 30.0), ("redis-blobs", 2.0), ("flight", 1.0)):
        ratio = results.ratio(OURS, peer)
        yield Line(f"pipeline against {peer}", f"≥ {times:g} ×", ratio, "×", at_least(times))
    ours = results.pipeline(OURS)
    yield Line("pipeline, CPU per row", "≤ 80 µs", ours.cost if ours else None, "µs", at_most(80.0))
    mapped = results.pipeline(MAPPED)
    yield Line("pipeline over mapped memory", "≥ 2 × ZeroMQ", results.ratio(MAPPED, OURS), "×", at_least(2.0))
    yield Line("the same, CPU per row", "≤ 35 µs", mapped.cost if mapped else None, "µs", at_most(35.0))


def _one_row(results: Results) -> Iterator[Line]:
    for peer, times in (("transferqueue", 100.0), ("redis-hash", 2.0)):
        ratio = results.ratio(OURS, peer, "put 1")
        yield Line(f"put of one row against {peer}", f"≥ {times:g} ×", ratio, "×", at_least(times))
    ratio = results.ratio(OURS, "transferqueue", "put 1, several in flight", "put 1")
    yield Line("the same, several in flight", "≥ 300 ×", ratio, "×", at_least(300.0))


def _latencies(own: Own) -> Iterator[Line]:
    for what, values, share, limit in (
        ("ready get(32), p50", own.ready_get, 0.5, 0.5),
        ("ready get(32), p99", own.ready_get, 0.99, 3.0),
        ("put to a blocked consumer, p50", own.put_to_blocked, 0.5, 1.0),
    ):
        yield Line(what, f"≤ {limit:g} ms", quantile(values, share) * 1e3, "ms", at_most(limit))
    beside = quantile(own.put_beside_waiting, 0.99) / quantile(own.put_alone, 0.99)
    yield Line("p99 of a put beside consumers that wait in vain", "≤ 3 × alone", beside, "×", at_most(3.0))
    costs = list(own.cpu_by_live_rows.values())
    yield Line("CPU of an operation, most live rows ÷ fewest", "flat", costs[-1] / costs[0], "×", at_most(FLAT))


def _journal(results: Results) -> Iterator[Line]:
    ratio = results.ratio("streamrl-memory", OURS)
    slower = None if ratio is None else (ratio - 1) * 100
    yield Line("journal in the page cache, slower than in memory", "≤ 15 %", slower, "%", at_most(15.0))
    synced, own = results.pipeline("streamrl-fsync"), results.own
    share = synced.megabytes * 1e6 / own.disk_bytes_per_second if synced and own else None
    yield Line("fsync, of the disk's synced bandwidth", "≥ 0.9", share, "", at_least(0.9))


def recovery_seconds_per_gigabyte(results: Results) -> float | None:
    """Seconds for 10^9 bytes of live rows, beyond those that an empty broker takes to start."""
    own, empty = results.own, results.start_seconds(OURS)
    return (own.recovery_seconds - empty) / own.recovery_bytes * 1e9 if own and empty else None
