"""Why rows were lost: counts by reason, and the last error that an environment raised, from the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from streamrl_queue import Statistics
from streamrl_queue.batches import decode
from streamrl_queue.errors import NoProgress
from streamrl_queue.events import Written
from streamrl_queue.journal import read

from .supervisor import TAIL_LINES

REASONS: Final = 3


def losses_of(counts: Statistics) -> tuple[int, int]:
    """Training rows that ended untrained, and training rows that ended at all."""
    train = counts.by_split.get("train", {})
    lost = train.get("dropped", 0) + train.get("dead", 0)
    return lost, lost + train.get("trained", 0)


def too_many(counts: Statistics, journal: Path) -> NoProgress:
    """Says that the run loses its rows, with the commonest reasons and the last error of an episode."""
    lost, ended = losses_of(counts)
    reasons = sorted({**counts.dropped, **counts.dead}.items(), key=lambda item: -item[1])[:REASONS]
    named = ", ".join(f"{count} {reason}" for reason, count in reasons)
    error = last_error(journal)
    tail = "".join(f"\n    {line}" for line in error.splitlines()[-TAIL_LINES:]) if error else ""
    text = f"{lost} of the {ended} training rows that have ended were lost ({named})"
    return NoProgress(f"{text}; the last error of an episode:{tail}" if tail else text)


def last_error(journal: Path) -> str | None:
    """The `error` of the trajectory that was written last with one."""
    found = None
    for event, _, payload in read(journal):
        if isinstance(event, Written) and event.stage == "rollout" and payload is not None:
            for error in decode(payload, "journal").column("error").to_pylist():
                found = error or found
    return found
