"""The conservation law of a run, read off its journal alone: what was fed, what became of it, in which history."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from streamrl_queue import audit, events


class Ledger(NamedTuple):
    """Row → step that trained it in the surviving history; row → why it ended otherwise; keys that were fed."""

    trained: dict[int, int]
    ended: dict[int, str]
    keys: dict[str, tuple[int, ...]]
    undone: int


def ledger(journal: Path) -> Ledger:
    """Fold the journal into what became of every train row; raises AssertionError where the law is broken."""
    trained: dict[int, int] = {}
    ended: dict[int, str] = {}
    keys: dict[str, tuple[int, ...]] = {}
    undone = 0
    for event, _, _ in audit.events(journal):
        match event:
            case events.Put(split="train"):
                for number, key in enumerate(event.keys):
                    first = event.first_row + number * event.members
                    assert key not in keys, f"{key} was fed twice"
                    keys[key] = tuple(range(first, first + event.members))
            case events.Committed():
                for row in event.rows:
                    assert row not in trained, f"row {row} was trained in step {trained[row]} and {event.step}"
                    assert row not in ended, f"row {row} had ended as {ended[row]} before step {event.step}"
                    trained[row] = event.step
            case events.Reconciled():
                gone = [row for row, step in trained.items() if step > event.step]
                undone += len(gone)
                for row in gone:
                    del trained[row]
            case events.Dropped():
                for row in event.rows:
                    assert row not in trained, f"row {row} was dropped after it was trained"
                    ended[row] = event.reason
            case _:
                pass
    return Ledger(trained, ended, keys, undone)


def check_finished(journal: Path, *, steps: int, rows_per_step: int) -> Ledger:
    """The law at the end of a run that trained all its steps."""
    found = ledger(journal)
    per_step = Counter(found.trained.values())
    assert per_step == dict.fromkeys(range(1, steps + 1), rows_per_step), f"rows per step: {sorted(per_step.items())}"
    indices = sorted(int(key.rpartition("/")[2]) for key in found.keys)
    assert indices == list(range(len(indices))), "tasks were skipped"
    lost = [row for rows in found.keys.values() for row in rows if row not in found.trained and row not in found.ended]
    assert not lost, f"rows {lost[:10]} are neither trained nor ended with a reason"
    return found
