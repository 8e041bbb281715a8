"""What survives a step, and in which order: commit, checkpoint, marker, retire.

A crash between any two of these is healed by `resume`: the newest sound checkpoint says which steps count, and the
queue makes all rows ready again that were trained after it. Rows are retired through the oldest checkpoint that is
kept, so that a run can go on from each of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from streamrl_queue.errors import LeaseExpired

from .checkpoint import Checkpoints
from .model import Policy
from .ranks import Ranks

if TYPE_CHECKING:
    from streamrl_queue import BlockingTransferQueue


log: Final = logging.getLogger(__name__)

ADVICE: Final = "raise queue.budget_mebibytes, or lower learner.checkpoint_every or learner.keep_checkpoints"


class Ledger:
    """Commits, checkpoints and retires on behalf of all ranks; the leader speaks to the queue."""

    def __init__(
        self,
        queue: BlockingTransferQueue,
        checkpoints: Checkpoints,
        policy: Policy,
        adamw: torch.optim.Optimizer,
        ranks: Ranks,
        *,
        every: int,
    ) -> None:
        """`every`: steps between two checkpoints; 0 means only those that are asked for."""
        self._queue = queue
        self._checkpoints = checkpoints
        self._policy = policy
        self._adamw = adamw
        self._ranks = ranks
        self._every = every
        self._saved = 0
        # The step through which rows were retired last, as far as this process knows.
        self._retired = 0

    def resume(self) -> int:
        """Go back to the newest sound checkpoint, or to the start; the step that was reached. Collective."""
        step = self._checkpoints.newest() or 0
        if step:
            self._checkpoints.load(step, self._policy, self._adamw)
        if self._ranks.leads:
            self._queue.reconcile(step)
        self._saved = step
        return step

    def commit(self, step: int, rows: Sequence[int]) -> None:
        """These rows were trained in `step`.

        Raises:
            LeaseExpired: when the queue gave them away meanwhile; the weights hold them already, so this step can
                neither be counted nor repeated, and only a checkpoint leads on.
        """
        if not self._ranks.leads:
            return
        try:
            self._queue.commit(step, rows)
        except LeaseExpired as error:
            raise LeaseExpired(
                f"step {step}: the queue gave the step's rows away, because learner-0 was silent for longer than "
                "queue.session_seconds (its process stood still, or its machine had no time for it); go on from the "
                f"last checkpoint with --resume, and raise queue.session_seconds when it happens again ({error})"
            ) from error

    def checkpoint_if_due(self, step: int) -> None:
        """`checkpoint`, every so many steps. Collective."""
        if self._every and step % self._every == 0:
            self.checkpoint(step)

    def checkpoint(self, step: int) -> None:
        """Write a checkpoint unless `step` has one; once durable, retire what no kept one needs. Collective."""
        if step == self._saved:
            return
        oldest = self._checkpoints.save(step, self._policy, self._adamw)
        self._saved = step
        if self._ranks.leads:
            self._retire(oldest)

    def make_room(self, step: int) -> None:
        """Let trained rows go, for the journal has no room for others: a checkpoint of `step`, which is the last
        committed one; when that is there, an older checkpoint goes instead, and takes its rows with it. Collective.

        Called again and again, it ends with one checkpoint and none of the rows up to `step`.
        """
        if step != self._saved:
            log.warning("step %d: a checkpoint ahead of its time, so that its rows can go; %s", step, ADVICE)
            self.checkpoint(step)
            return
        oldest = self._checkpoints.forget_oldest()
        if self._ranks.leads and oldest is not None and oldest > self._retired:
            log.warning("step %d: checkpoints older than step %d had to go, with their rows; %s", step, oldest, ADVICE)
            self._retire(oldest)

    def _retire(self, through: int) -> None:
        self._queue.retire(through)
        self._retired = through
