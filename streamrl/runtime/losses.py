"""Why rows were lost: counts by reason with the last error of each, from the journal; calls that failed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from streamrl_queue import Statistics
from streamrl_queue.config import Flow
from streamrl_queue.errors import StreamRLError

from ..inspect.lives import Life, Lives
from ..inspect.reading import fold
from .counts import CallErrors

REASONS: Final = 3
"""Reasons that are named, the commonest first."""
MOST_CHARACTERS: Final = 300
"""Of one error in a message."""


class Losses(msgspec.Struct, frozen=True):
    """Rows of one split that ended untrained, of all that ended; the reasons, and the last error under each."""

    lost: int
    ended: int
    reasons: Counter[str]
    errors: dict[str, str]

    def named(self) -> str:
        """The commonest reasons: `126 error_env, 3 group_too_small`."""
        parts = [f"{count} {reason}" for reason, count in self.reasons.most_common(REASONS)]
        others = self.lost - sum(count for _, count in self.reasons.most_common(REASONS))
        return ", ".join([*parts, f"{others} for other reasons"] if others else parts)

    def errors_told(self) -> str:
        """One line for each of the commonest reasons that an error is known of."""
        named = [reason for reason, _ in self.reasons.most_common(REASONS) if reason in self.errors]
        return "".join(f"\n    {reason}: {self.errors[reason]}" for reason in named)

    def __str__(self) -> str:
        text = f"{self.lost} of the {self.ended} training rows that have ended were lost ({self.named()})"
        told = self.errors_told()
        return f"{text}; the last error of each kind:{told}" if told else text


def losses_of(counts: Statistics) -> tuple[int, int]:
    """Training rows that ended untrained, and training rows that ended at all."""
    train = counts.by_split.get("train", {})
    lost = train.get("dropped", 0) + train.get("dead", 0)
    return lost, lost + train.get("trained", 0)


def lives_in(journal: Path, flow: Flow) -> Lives | None:
    """Every row's life as far as it is needed here; None when the journal cannot be read.

    One in memory lies elsewhere, and is gone with its broker. A damaged one must not hide why the run ended.
    """
    try:
        return fold(journal, flow, columns=("status", "error", "metrics"))
    except StreamRLError:
        return None


def losses_in(lives: Lives, *, split: str = "train", rows: Iterable[int] | None = None) -> Losses:
    """The losses among all rows of `split`, or among `rows`."""
    chosen = lives.rows if rows is None else [row for row in rows if row in lives.rows]
    ended = [life for life in map(lives.rows.__getitem__, chosen) if life.split == split and life.end]
    lost = [life for life in _in_order(ended) if life.end in ("dropped", "dead")]
    reasons = Counter(life.reason or "unknown" for life in lost)
    errors = {life.reason or "unknown": life.columns["error"] for life in lost if life.columns.get("error")}
    return Losses(len(lost), len(ended), reasons, {reason: last_line(text) for reason, text in errors.items()})


def calls_in(lives: Lives) -> CallErrors:
    """The calls that failed in episodes whose columns the journal still has."""
    played = [life for life in _in_order(lives.rows.values()) if "metrics" in life.columns]
    # The error of a completed episode is one that did not end it.
    completed = [life for life in played if life.columns.get("status") == "completed"]
    told = [life.columns["error"] for life in completed if life.columns.get("error")]
    metrics = [life.columns["metrics"] or {} for life in played]
    tool, parse = ([int(m.get(f"{kind}_errors", 0)) for m in metrics] for kind in ("tool", "parse"))
    return CallErrors(
        episodes=len(played),
        tool_errors=sum(tool),
        tool_error_episodes=sum(n > 0 for n in tool),
        parse_errors=sum(parse),
        parse_error_episodes=sum(n > 0 for n in parse),
        last_tool_error=last_line(told[-1]) if told else None,
    )


def _in_order(lives: Iterable[Life]) -> list[Life]:
    """By the time of the last thing that happened."""
    return sorted(lives, key=lambda life: life.moments[-1].at)


def account(counts: Statistics, losses: Losses | None, calls: CallErrors) -> str:
    """What may lie behind a run that comes to nothing: lost rows with their reasons, and calls that failed."""
    told = [str(losses)] if losses and losses.lost else []
    lost, ended = losses_of(counts)
    if losses is None and lost:
        every = Counter(counts.dropped) + Counter(counts.dead)
        named = ", ".join(f"{count} {reason}" for reason, count in every.most_common(REASONS))
        text = f"{lost} of the {ended} training rows that have ended were lost"
        told = [f"{text} (those of evaluations counted too: {named}; there is no journal to tell the errors)"]
    return "\n".join([*told, *(f"{kind}: {said}" for kind, said in calls.told().items())])


def last_line(text: str) -> str:
    """What a traceback comes to: its last line, without the module of the error's class."""
    lines = [line for line in text.splitlines() if line.strip()]
    line = re.sub(r"^(\w+\.)+(?=\w+(:|$))", "", lines[-1].strip()) if lines else ""
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 1]}…"
