"""The staleness bound, as arithmetic.

Let η be `max_staleness` and B the rows of a step. The lag of a row is the number of steps that the learner has
taken when it trains the row, minus the step of the version that sampled the row's oldest token. A row that was born
under step b must be trained in step b + η + 1 at the latest: that is its deadline.

*Admission.* A group may start only while

    admitted − lost < trained(v) + (η + 1)·B

where v is the committed version, `trained(v)` the rows trained in steps up to step(v), and `lost` the admitted
rows that were dropped or died. A row of an admitted group may start (again, after a producer died or the learner
went back to a checkpoint) only while

    trained + on their way < trained(v) + (η + 1)·B

So when a row is born under b = step(v), it and the rows on their way fit into the places of the steps that are left
until its deadline.

*Hand-out.* Rows finish out of order. If the learner always took what is ready, a straggler would be overtaken until
it is stale. So a row may overtake others with earlier deadlines only if these still fit: for every deadline D before
its own, the rows due by D that the learner does not have yet, and it, must fit into the places left in the steps up
to D. With this, nothing that was started becomes stale, in whatever order it finishes.

*Rows from outside.* Rows that are put with their rollout done (`put(filled=…)`) were never admitted and no place is
kept for them. From the moment when such a row is ready to be trained it counts as admitted, so fewer groups start and
places become free. It may take one while all rows that were started still fit, those with later deadlines too. One
that finds none in time is stale and goes by `on_stale`; one of which nothing was sampled has no lag.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config import Admission


def may_admit(bound: Admission, *, admitted: int, lost: int, trained: int) -> bool:
    """Whether one more group may start."""
    return admitted - lost < trained + (bound.max_staleness + 1) * bound.rows_per_step


def may_start(bound: Admission, *, started: int, trained: int) -> bool:
    """Whether one more row of an admitted group may start.

    Args:
        bound: the staleness bound.
        started: rows that were trained or are on their way.
        trained: rows trained in steps up to that of the committed version.
    """
    return started < trained + (bound.max_staleness + 1) * bound.rows_per_step


def deadline(bound: Admission, born: int) -> int:
    """The last step that may train a row born under step `born`."""
    return born + bound.max_staleness + 1


def is_stale(bound: Admission, *, born: int, step: int) -> bool:
    """Whether training it in step `step` would pass the bound. A row that was never born has no lag."""
    return born >= 0 and step - 1 - born > bound.max_staleness


def may_train(
    bound: Admission, *, born: int, step: int, handed: int, on_their_way: Mapping[int, int], outside: bool = False
) -> bool:
    """Whether a ready row may take one of the places of step `step`.

    Args:
        bound: the staleness bound.
        born: the step it was born under.
        step: the step that is being assembled.
        handed: rows already handed out for this step.
        on_their_way: step of birth → rows that the learner does not have yet.
        outside: the row was never admitted, so no place was kept for it.
    """
    if handed >= bound.rows_per_step:
        return False
    if bound.on_stale != "wait":
        return True
    due = 0
    for other in sorted(other for other, rows in on_their_way.items() if rows and (outside or other < born)):
        due += on_their_way[other]
        steps_left = max(deadline(bound, other) - step + 1, 1)
        if due + 1 > steps_left * bound.rows_per_step - handed:
            return False
    return True
