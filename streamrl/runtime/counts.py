"""The queue's statistics as plain numbers, for panels, tables and files."""

from __future__ import annotations

from typing import Any

from streamrl_queue import Statistics

STATES = ("waiting", "leased", "ready", "trained", "done")


def totals(counts: Statistics) -> dict[str, int]:
    """One number per state."""
    states = {state: int(getattr(counts, state)) for state in STATES}
    return states | {"dropped": sum(counts.dropped.values()), "dead": sum(counts.dead.values())}


def conservation(counts: Statistics) -> dict[str, Any]:
    """The conservation law: `tasks`, then the states that add up to it, dropped and dead by reason."""
    states = {state: int(getattr(counts, state)) for state in STATES}
    return {"tasks": counts.tasks, **states, "dropped": dict(counts.dropped), "dead": dict(counts.dead)}
