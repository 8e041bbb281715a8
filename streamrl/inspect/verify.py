"""`streamrl queue verify`: is a journal whole, and do its rows add up?

Three readings must agree: the broker's own fold from the first event, the snapshots that it wrote on the way, and
the lives of `lives.py`, which know each row by itself.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console

from streamrl_queue import Statistics, audit, snapshot
from streamrl_queue.audit import Entry
from streamrl_queue.config import Flow
from streamrl_queue.rows import Rows

from ..runtime.counts import conservation
from ..runtime.summary import conservation_table
from .lives import Lives
from .printing import print_json, print_table, size
from .target import find


class Report(msgspec.Struct, kw_only=True):
    """What a check of a journal found. `damage` and `faults` are sentences; both empty means whole."""

    journal: str
    files: dict[str, int]
    stored_bytes: int
    events: dict[str, int]
    statistics: Statistics | None
    damage: list[str]
    faults: list[str]
    # An unfinished record at the very end: what a killed broker leaves behind, and no damage.
    notes: list[str]

    @property
    def whole(self) -> bool:
        return not self.damage and not self.faults


def verify(name: str, *, as_json: bool) -> int:
    """Check every record and the folded state; returns 1 when something is damaged."""
    target = find(name)
    found = examine(target.require_journal("verify"), target.flow())
    if as_json:
        print_json(msgspec.to_builtins(found) | {"whole": found.whole})
    else:
        _print(found)
    return 0 if found.whole else 1


def examine(journal: Path, flow: Flow | None) -> Report:
    """Read the whole journal once. Its broker may be running."""
    files = Counter(path.suffix.removeprefix(".") for path in journal.iterdir() if path.stem.isdigit())
    states = {found[0]: found[1] for found in audit.snapshots(journal) if not isinstance(found, audit.Damage)}
    report = Report(
        journal=str(journal),
        files=dict(sorted(files.items())),
        stored_bytes=audit.stored_bytes(journal),
        events={},
        statistics=None,
        damage=[
            *_missing(journal),
            *(str(found) for found in audit.snapshots(journal) if isinstance(found, audit.Damage)),
        ],
        faults=[],
        notes=[],
    )
    lives = Lives(flow)
    rows = Rows(flow) if flow is not None else None
    last = 0
    for found in audit.scan(journal):
        if isinstance(found, audit.Damage):
            (report.notes if found.kind == "tail" else report.damage).append(str(found))
            if found.event is None:
                continue
        assert found.event is not None
        number = found.record >> 32
        if number != last and rows is not None and flow is not None and number in states:
            report.faults += _disagree(f"snapshot {number}", snapshot.load(states[number], now=0.0), rows)
        last = number
        lives.apply(found.event, record=found.record)
        rows = _apply(rows, found, report)
    report.events = dict(sorted(lives.events.items()))
    if rows is None:
        why = "its stages are not those that we know" if flow is None else "an event of it is lost"
        report.notes.append(f"conservation was not checked: {why}")
        return report
    report.statistics = rows.statistics()
    report.faults += _unsound(rows, lives)
    return report


def _missing(journal: Path) -> list[str]:
    """Segments of which neither the file nor its ledger is there, although later ones are."""
    numbers = audit.numbers(journal)
    gone = sorted(set(range(1, max(numbers, default=0))) - numbers)
    return [f"{journal / f'{number:08d}.segment'} is missing: what happened in it is lost" for number in gone]


def _apply(rows: Rows | None, found: Entry | audit.Damage, report: Report) -> Rows | None:
    """Fold one more event; None once an event does not fit what went before."""
    if rows is None or found.event is None:
        return None
    try:
        rows.apply(found.event, record=found.record)
    except (KeyError, StopIteration) as error:
        event = type(found.event).__name__
        place = f"segment {found.record >> 32}, byte {found.record & 0xFFFFFFFF}: {event}"
        report.faults.append(f"{place} names {error or 'a group'}, which is not there: events before are lost")
        return None
    return rows


def _disagree(name: str, one: Rows, other: Rows) -> list[str]:
    """Where the counts of two states differ."""
    ours, theirs = (msgspec.to_builtins(rows.statistics()) for rows in (other, one))
    return [
        f"{name} has {field} {theirs[field]!r}, the events before it make {ours[field]!r}"
        for field in ours
        if ours[field] != theirs[field]
    ]


def _unsound(rows: Rows, lives: Lives) -> list[str]:
    """Whether tasks are conserved, and each row is where its own life says."""
    counts, faults = rows.statistics(), []
    try:
        counts.check()
    except AssertionError as error:
        faults.append(str(error))
    own, theirs = _settled(lives.by_split()), _settled(counts.by_split)
    if own != theirs:
        faults.append(f"the rows' own lives make {own}, the queue's counts {theirs}")
    twice = Counter(row for step in lives.steps if step.given_back is None for row in step.rows)
    faults += [f"row {row} was trained in {n} steps" for row, n in twice.items() if n > 1]
    return faults


def _settled(by_split: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Counts by state, with what waits, is parked or ready as one: which of them is a matter of the moment."""
    out, idle = {}, ("waiting", "ready", "parked")
    for split, states in sorted(by_split.items()):
        moving = {s: n for s, n in sorted(states.items()) if s not in idle}
        out[split] = moving | {"open": sum(states.get(state, 0) for state in idle)}
    return out


def _print(report: Report) -> None:
    console = Console()
    files = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in report.files.items())
    console.print(f"{report.journal}: {files}, {size(report.stored_bytes)}", highlight=False, soft_wrap=True)
    print_table(console, ["event", "records"], list(report.events.items()))
    if report.statistics is not None:
        console.print(conservation_table(conservation(report.statistics)))
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    for line in (*report.damage, *report.faults):
        console.print(f"damaged: {line}", style="bold red", highlight=False, soft_wrap=True)
    if report.whole:
        checked = "every record is whole" + (", the rows add up" if report.statistics is not None else "")
        console.print(checked, style="green", highlight=False)
