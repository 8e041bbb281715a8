"""Micro-batches for a PyTorch training loop, straight from a stage that trains.

queue ── lease(step) ──► tensors, pinned ──► the loop: backward, …, optimizer.step()
  ▲        one batch ahead, in the trio thread         │
  └── commit(step) … checkpointed(step) ◄──────────────┘
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Self

import trio

from . import messages as m
from .blocking import BlockingTransferQueue
from .client import Lease
from .errors import ConfigError, DeadlineExceeded, LeaseExpired, SchemaError, StepConflict
from .portal import Call
from .tensors import Batch, Layout, collate, import_torch

Ahead = tuple[Lease, Batch]


class StreamingBatches:
    """Iterates over the micro-batches of one optimizer step after another, as rows get ready.

        with StreamingBatches(queue, "learn", rows_per_step=64, rows_per_batch=16) as batches:
            for batch in batches:
                loss(model, batch.to(device)).backward()
                if batch.ends_step:
                    optimizer.step()
                    optimizer.zero_grad()
                    batches.commit(batch.step)

    While the loop trains on a batch, the next one is leased and made into tensors, pinned where CUDA is there. The
    queue lets rows be leased for the step after the last committed one only: the next step's first batch is fetched
    from `commit` on.

    Exactness: `commit(step)` says that the step's rows were trained; `checkpointed(step)`, that a checkpoint on disk
    covers them. Whoever starts again from a checkpoint passes its step as `after`: rows of all later steps, committed
    or not, come again, and no others. Rows that are held at the end of the block, or of the queue's session, go back.

    For one process: a step's rows are committed by the session that leased them.
    """

    def __init__(
        self,
        queue: BlockingTransferQueue,
        stage: str,
        *,
        rows_per_step: int,
        rows_per_batch: int | None = None,
        columns: Sequence[str] | None = None,
        layout: Layout = "padded",
        padding: Mapping[str, float] | None = None,
        pin: bool | None = None,
        after: int = 0,
        wait_seconds: float = 300.0,
        linger_seconds: float = 2.0,
    ) -> None:
        """Goes on after optimizer step `after`: rows that were trained in later ones are ready again.

        Args:
            queue: an open session.
            stage: a stage that `trains`.
            rows_per_step: rows of one optimizer step.
            rows_per_batch: the most rows of one batch; by default all of a step. (A stage of groups hands out whole
                groups: then a batch, and a step, may have more.)
            columns: which ones to bring; by default those that the stage reads. The key columns always come along.
            layout: lists as `padded` tensors with masks, or `ragged` ones with offsets.
            padding: by column, what fills up its padded lists; 0 by default.
            pin: whether tensors lie in page-locked memory; by default where CUDA is there.
            after: how many steps the weights that you start from have taken.
            wait_seconds: how long to wait for a batch.
            linger_seconds: a batch that is not whole after so long is handed out smaller, with the rows there are.

        Raises:
            ConfigError: a number that cannot work, or torch is not installed.
            StepConflict: fewer steps are committed than `after`, or rows of later ones were given up (`checkpointed`).
            UnknownName: no stage of this queue trains.
        """
        rows_per_batch = rows_per_batch or rows_per_step
        if not 1 <= rows_per_batch <= rows_per_step:
            raise ConfigError(f"rows_per_batch: expected 1 to rows_per_step={rows_per_step}, got {rows_per_batch}")
        if not (wait_seconds > 0 and linger_seconds > 0):
            raise ConfigError(
                f"wait_seconds, linger_seconds: expected more than 0, got {wait_seconds} and {linger_seconds}"
            )
        torch = import_torch()
        self.queue = queue
        self.stage = stage
        # The step that is being assembled.
        self.step = after + 1
        self._rows_per_step = rows_per_step
        self._rows_per_batch = rows_per_batch
        self._columns = columns
        self._layout = layout
        self._padding = padding
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._wait_seconds = wait_seconds
        self._linger_seconds = linger_seconds
        self._held: list[Lease] = []
        self._ahead: Call[Ahead] | None = None
        queue.reconcile(after)

    def __repr__(self) -> str:
        return f"<StreamingBatches of {self.stage}, step {self.step}: {self._taken} of {self._rows_per_step} rows>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    @property
    def rows(self) -> tuple[int, ...]:
        """The ids of the rows of this step that were handed out so far."""
        return tuple(row for lease in self._held for row in lease.ids)

    @property
    def _taken(self) -> int:
        return sum(len(lease.rows) for lease in self._held)

    def __next__(self) -> Batch:
        """The step's next rows.

        Raises:
            StepConflict: the step is whole; commit it first.
            DeadlineExceeded: no row got ready; says how many of the step are there. It may be asked again.
            SchemaError: rows that do not fit into tensors; they went back.
        """
        if self._taken >= self._rows_per_step:
            raise StepConflict(f"step {self.step} is whole; after optimizer.step(), call commit({self.step})")
        call = self._ahead = self._ahead or self._fetch_ahead()
        progress = f"rows of step {self.step} ({self._taken} of {self._rows_per_step} are there)"
        self.queue.report(f"waits for {progress}")
        concurrent.futures.wait([call], timeout=self._wait_seconds)
        if not call.done():
            raise DeadlineExceeded.waiting(progress, f"the queue's stage {self.stage}", self._wait_seconds)
        self._ahead = None
        lease, batch = call.result()
        self._held.append(lease)
        ends = self._taken >= self._rows_per_step
        if not ends:
            self._ahead = self._fetch_ahead()
        self.queue.report(f"trains step {self.step}")
        return replace(batch, rows=lease.ids, step=self.step, ends_step=ends)

    def commit(self, step: int) -> m.Receipt:
        """The rows that were handed out for `step` were trained in it. Call it after `optimizer.step()`.

        A step may be committed before it is whole, for instance when no more rows come. Survives power loss.

        Raises:
            StepConflict: another step is being assembled.
            LeaseExpired: this process was silent for too long and its rows were given to somebody else; go back to the
                checkpoint, for the weights have seen rows that will come again.
        """
        if step != self.step:
            raise StepConflict(f"commit: expected step {self.step}, which is being assembled, got {step}")
        self._drop_ahead()
        receipt = self.queue.commit(step, self.rows)
        self._held = []
        self.step += 1
        self._ahead = self._fetch_ahead()
        return receipt

    def checkpointed(self, step: int) -> None:
        """A checkpoint that survives a crash covers all steps up to `step`: their rows never come again and may leave
        the disk. Until then the queue keeps them.

        Raises:
            StepConflict: `step` is not committed.
        """
        self.queue.retire(step)

    def close(self) -> None:
        """Give back the rows of the step that is not committed; iterating goes on with that step's first batch."""
        self._drop_ahead()
        held, self._held = self._held, []
        for lease in held:
            # Somebody else has them already.
            with suppress(LeaseExpired):
                self.queue.release(lease, reason=f"step {self.step} was not finished")

    def _fetch_ahead(self) -> Call[Ahead]:
        rows = min(self._rows_per_batch, self._rows_per_step - self._taken)
        return self.queue.portal.submit(self._fetch, self.step, rows)

    def _drop_ahead(self) -> None:
        call, self._ahead = self._ahead, None
        if call is None:
            return
        self.queue.portal.abandon(call)
        concurrent.futures.wait([call])
        if call.exception() is None:
            lease, _ = call.result()
            self.queue.release(lease, reason=f"step {self.step} ended without them")

    async def _fetch(self, step: int, rows: int) -> Ahead:
        """Consumes rows that are ready; produces tensors; waits for rows, and is unblocked by them or `abandon`."""
        lease: Lease | None = None
        while lease is None:
            lease = await self.queue.aio.lease(
                self.stage, rows=rows, at_least=rows, wait=self._linger_seconds, step=step, columns=self._columns
            )
        # Shielded: who abandons this is to get the lease, and gives it back.
        with trio.CancelScope(shield=True):
            try:
                batch = await trio.to_thread.run_sync(self._tensors, lease)
            except SchemaError:
                await self.queue.aio.release(lease, reason="its columns do not fit into tensors")
                raise
        return lease, batch

    def _tensors(self, lease: Lease) -> Batch:
        batch = collate(lease.batch, self._layout, self._padding)
        return batch.pin_memory() if self._pin else batch
