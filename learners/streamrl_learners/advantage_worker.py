"""Fills the `advantage` column of whole groups. numpy only: it runs in any process."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from streamrl_queue.errors import LeaseExpired
from streamrl_queue.schema import advantage_batch

from .algorithms.advantages import group_advantages
from .algorithms.base import Advantage, Length
from .algorithms.lengths import length_penalty

if TYPE_CHECKING:
    from streamrl_queue import Lease, TransferQueue

log = logging.getLogger(__name__)

# Rows of one lease: a few steps' worth of small groups; one reply of a few kilobytes.
ROWS: Final = 256
# A long-poll ends after this many seconds without work, so that a heartbeat's activity stays true.
WAIT_SECONDS: Final = 30.0


async def run_advantage_worker(queue: TransferQueue, config: Advantage, length: Length | None = None) -> None:
    """Score groups until cancelled.

    `length` says what long rows lose of their reward before they are compared; the column `reward` stays as it is.

    Consumes groups whose rewards are all in. Produces their advantages. Waits for the queue. Unblocked by a group
    that gets ready, or by cancellation (the lease then ends with its deadline or its session).
    """
    queue.report("waits for scored groups")
    while True:
        lease = await queue.lease("advantage", rows=ROWS, wait=WAIT_SECONDS)
        if lease is None:
            continue
        try:
            await queue.write(lease, advantages_of(config, penalised(length, lease)))
        except LeaseExpired as error:
            log.warning("advantage worker: %s", error)
            await _give_back(queue, lease)


async def _give_back(queue: TransferQueue, lease: Lease) -> None:
    """Members of its groups have ended meanwhile: the others are compared without them, if they are still enough."""
    with suppress(LeaseExpired):  # all of it is somebody else's now
        await queue.release(lease, reason="members of its groups have ended")


def penalised(config: Length | None, lease: Lease) -> pa.RecordBatch:
    """The batch of `lease`, with the length penalty in its rewards."""
    batch = lease.batch
    assert batch is not None
    if config is None:
        return batch
    # Rows are told with their tokens, those of prompt and tools included.
    penalty = length_penalty(config, np.array([row.tokens for row in lease.rows]))
    at = batch.schema.get_field_index("reward")
    return batch.set_column(at, "reward", pa.array(batch.column("reward").to_numpy() + penalty))


def advantages_of(config: Advantage, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The advantage column for a batch with `row`, `group` and `reward`; groups are whole, in any order.

    A dropped or dead member is not in the batch and has no vote in its group's baseline.
    """
    groups = batch.column("group").to_numpy()
    rewards = batch.column("reward").to_numpy()
    advantages = np.zeros(len(rewards))
    for group in np.unique(groups):
        members = groups == group
        advantages[members] = group_advantages(config, rewards[members])
    return advantage_batch(batch.column("row").to_pylist(), advantages.tolist())
