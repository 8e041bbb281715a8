"""The tables that a run prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .results import Results, quantile
from .system import ENTRIES
from .targets import OURS, lines, recovery_seconds_per_gigabyte


def show(results: Results, sizes: Sequence[int], console: Console) -> None:
    """Everything, the targets last."""
    console.print(_pipelines(results))
    for operation in ("put", "get"):
        console.print(_phases(results, operation, sizes))
    for line in _own(results):
        console.print(line, highlight=False)
    for name, why in results.skipped.items():
        console.print(f"skipped: {name}: {why}", highlight=False, markup=False)
    console.print(_targets(results))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _number(value: float | None, unit: str = "") -> str:
    if not value:
        return "–" if value is None else "0"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{' ' if unit else ''}{unit}"


def _pipelines(results: Results) -> Table:
    columns = ("rows/s", "MB/s", "CPU µs/row", "streamrl: rows/s", "CPU", "start s", "MB", "CPU µs/row of")
    table = _table("pipeline: put 64 → reward 32 → learn 32, all at once", "", *columns)
    for name in results.measured():
        found = results.pipeline(name)
        assert found is not None
        roles = sorted(found.cost_by_role.items(), key=lambda item: -item[1])
        table.add_row(
            ENTRIES[name].title,
            _number(found.rate),
            _number(found.megabytes),
            _number(found.cost),
            _number(results.ratio(OURS, name), "×"),
            _number(results.cheaper(OURS, name), "×"),
            _number(results.start_seconds(name)),
            _number(results.resident_megabytes(name)),
            ", ".join(f"{role} {cost:.0f}" for role, cost in roles if cost >= 0.5),
        )
    return table


def _phases(results: Results, operation: str, sizes: Sequence[int]) -> Table:
    what = {"put": "put, one operation after the other", "get": "get and finish, likewise, after the puts"}[operation]
    columns = [f"{size}: {column}" for size in sizes for column in ("rows/s", "CPU µs/row", "p50 / p99 ms")]
    table = _table(f"{what}, by rows of an operation", "", *columns)
    for name in results.measured():
        for suffix in ("", ", several in flight"):
            found = [results.phase(name, f"{operation} {size}{suffix}") for size in sizes]
            if any(found):
                cells = [
                    cell
                    for one in found
                    for cell in (
                        _number(one.rate if one else None),
                        _number(one.cost if one else None),
                        f"{one.p50 * 1e3:.2f} / {one.p99 * 1e3:.2f}" if one else "–",
                    )
                ]
                table.add_row(f"{ENTRIES[name].title}{suffix}", *cells)
    return table


def _own(results: Results) -> Iterator[str]:
    own = results.own
    if own is None:
        return
    for what, seconds in (
        ("ready get(32)", own.ready_get),
        ("put of 32 to a blocked consumer", own.put_to_blocked),
        ("put of one row, alone", own.put_alone),
        ("the same beside consumers that wait in vain", own.put_beside_waiting),
    ):
        yield f"{what}: p50 {quantile(seconds, 0.5) * 1e3:.2f} ms, p99 {quantile(seconds, 0.99) * 1e3:.2f} ms"
    costs = ", ".join(f"{cost * 1e6:,.0f} µs at {rows:,}" for rows, cost in own.cpu_by_live_rows.items())
    yield f"CPU of the broker for an operation by live rows: {costs}"
    yield f"the disk, writes of 640 KiB each synced: {own.disk_bytes_per_second / 1e6:,.0f} MB/s"
    slope = _number(recovery_seconds_per_gigabyte(results))
    yield (
        f"recovery after kill -9: {own.recovery_seconds:.2f} s on {own.recovery_bytes / 1e6:,.0f} MB of live rows, "
        f"{slope} s per GB beyond an empty start"
    )


def _targets(results: Results) -> Table:
    table = _table("targets", "", "target", "measured", "")
    for line in lines(results):
        reached = "not measured" if line.measured is None else "reached" if line.reached(line.measured) else "missed"
        table.add_row(line.what, line.target, _number(line.measured, line.unit), reached)
    return table
