"""The learner's loop: the algorithm, on one page.

rows ──► stream ──► micro-batches ──► gradients ──► step ──► commit ──► checkpoint, retire ──► publish
│
engines ◄────── broadcast, verify, commit the version: in the trio thread, during the next step ─┘
"""

from __future__ import annotations

from typing import NamedTuple

from .ledger import Ledger
from .model import Policy
from .objective import Objective
from .optimise import Optimiser, Progress
from .publisher import Publisher
from .report import Reporter
from .stream import Stream


class Training(NamedTuple):
    """What the loop works with. `policy` may be sharded; then every rank runs the loop, in step."""

    policy: Policy
    stream: Stream
    objective: Objective
    optimiser: Optimiser
    ledger: Ledger
    publisher: Publisher
    reporter: Reporter
    progress: Progress


def train(run: Training, first: int, last: int) -> int:
    """Train the steps `first` to `last`; the last step that was finished.

    Consumes rows that are ready to learn. Produces commits, checkpoints and versions, one dict of metrics a step.
    Waits for rows, and for the publish of the step before. Unblocked by the queue, by a stop request (the partial
    step is given back and not trained), or by the deadlines of both.

    Raises:
        NoProgress, NotFinite, DeadlineExceeded, WeightError: each names the step.
    """
    for step in range(first, last + 1):
        for micro in run.stream.micro_batches(step):  # taken as they become ready
            loss = run.objective.loss(run.policy, micro)  # packed by token budget
            loss.backward()  # type: ignore[no-untyped-call]
        if run.stream.stopped:
            return step - 1
        report = run.optimiser.step(step)  # token-mean is exact: sums are divided here
        run.ledger.commit(step, run.stream.rows(step))
        run.ledger.checkpoint_if_due(step)  # and retire rows that no kept one needs
        run.publisher.publish(run.policy, step)  # gather now; broadcast, verify, commit overlap the next step
        run.reporter.step(step, report, idle_seconds=run.stream.idle_seconds)
        run.progress.note(step, report)
    return last
