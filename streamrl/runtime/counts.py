"""The queue's statistics as plain numbers, for panels, tables and files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from streamrl_queue import Statistics

STATES = ("waiting", "leased", "ready", "parked", "trained", "done")


def totals(counts: Statistics) -> dict[str, int]:
    """One number per state."""
    states = {state: int(getattr(counts, state)) for state in STATES}
    return states | {"dropped": sum(counts.dropped.values()), "dead": sum(counts.dead.values())}


def conservation(counts: Statistics) -> dict[str, Any]:
    """The conservation law: `tasks`, then the states that add up to it, dropped and dead by reason."""
    states = {state: int(getattr(counts, state)) for state in STATES}
    return {"tasks": counts.tasks, **states, "dropped": dict(counts.dropped), "dead": dict(counts.dead)}


class CallErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of the model that failed in `episodes` episodes: the tool raised, or it was no call that a tool takes.

    The model was told, and the episodes went on; in `…_error_episodes` of them it happened.
    """

    episodes: int = 0
    tool_errors: int = 0
    tool_error_episodes: int = 0
    parse_errors: int = 0
    parse_error_episodes: int = 0
    last_tool_error: str | None = None

    def told(self) -> dict[str, str]:
        """What to say of each kind that happened."""
        out = {}
        if self.tool_errors:
            last = f"; the last: {self.last_tool_error}" if self.last_tool_error else ""
            out["tool errors"] = self._of(self.tool_errors, self.tool_error_episodes) + last
        if self.parse_errors:
            out["parse errors"] = self._of(self.parse_errors, self.parse_error_episodes)
        return out

    def _of(self, errors: int, episodes: int) -> str:
        return f"{errors} in {episodes} of {self.episodes} episodes"


NO_CALL_ERRORS = CallErrors()


def call_errors(producers: Iterable[Mapping[str, float]]) -> CallErrors:
    """The sum over the gauges of all sessions that played."""
    total: Counter[str] = Counter()
    for gauges in producers:
        total.update({name: int(n) for name, n in gauges.items()})
    return CallErrors(
        episodes=total["episodes"],
        tool_errors=total["tool_errors"],
        tool_error_episodes=total["tool_error_episodes"],
        parse_errors=total["parse_errors"],
        parse_error_episodes=total["parse_error_episodes"],
    )
