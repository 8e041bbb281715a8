"""The staleness bound, as arithmetic.

Let η be `max_staleness` and B the rows of a step. The lag of a row is the number of steps that the learner has
taken when it trains the row, minus the step of the version that sampled the row's oldest token.

*Admission.* A group may start only while

    admitted − lost < trained(v) + (η + 1)·B

where v is the committed version, `trained(v)` the rows trained in steps up to step(v), and `lost` the admitted
rows that were dropped or died. A row admitted under this has fewer than (η + 1)·B untrained rows before it as of
v; every step takes B of them; so, taken in admission order, it is trained in step step(v) + η + 1 at the latest,
when the learner has taken step(v) + η steps: its lag is at most η.

*Hand-out.* Rows finish out of order, and a straggler could be overtaken for ever. A row born under step b must be
trained by step b + η + 1. When step n is assembled, rows with b + η + 1 ≤ n are urgent: of the step's B places,
as many are kept free as urgent rows are still on their way, and only the rest may go to younger rows.
"""

from __future__ import annotations

from .config import Admission


def may_admit(bound: Admission, *, admitted: int, lost: int, trained: int) -> bool:
    """Whether one more group may start."""
    return admitted - lost < trained + (bound.max_staleness + 1) * bound.rows_per_step


def is_urgent(bound: Admission, *, born: int, step: int) -> bool:
    """Whether a row born under step `born` must not miss step `step`."""
    return born + bound.max_staleness + 1 <= step


def is_stale(bound: Admission, *, born: int, step: int) -> bool:
    """Whether training it in step `step` would pass the bound."""
    return step - 1 - born > bound.max_staleness


def may_overtake(bound: Admission, *, handed: int, urgent: int) -> bool:
    """Whether a row that is not urgent may take one of the step's places.

    Args:
        bound: the staleness bound.
        handed: rows already handed out for this step.
        urgent: urgent rows not handed out yet, wherever they are.
    """
    if bound.on_stale != "wait":
        urgent = 0
    return handed + urgent < bound.rows_per_step
