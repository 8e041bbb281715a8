"""Greedy evaluation through the same queue, producers and engines that training uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa

from streamrl_queue import Lease, TransferQueue
from streamrl_queue.errors import DeadlineExceeded
from streamrl_queue.held import on_held
from streamrl_queue.schema import KEY_COLUMNS

from .summary import Evaluation
from .tasks import TaskSource


async def evaluate(
    queue: TransferQueue, tasks: TaskSource, *, rows: int, seconds: float, put: Callable[[Sequence[int]], None]
) -> Evaluation:
    """Play the first `rows` tasks once each and average their rewards.

    Rows that died or were dropped are counted as `failed`, not as reward 0. `put` is told which rows these are.

    Consumes rows of stage `evaluate`, produces one Evaluation. Waits for producers and scorers; unblocked by a
    row that ends, or after `seconds` without one.

    Raises:
        DeadlineExceeded: no row ended for `seconds`.
    """
    lost = await _lost(queue)
    step = (await queue.statistics()).version_step or 0
    receipt = await queue.put(list(tasks.take(0, rows)), split="eval")
    put(receipt.rows)
    wanted = set(receipt.rows)
    rewards: list[float] = []
    failed, moved = 0, time.monotonic()
    while len(rewards) + failed < rows:
        lease = await queue.lease("evaluate", rows=rows, wait=1.0)
        if lease is not None:
            assert lease.batch is not None
            found = dict(zip(lease.ids, lease.batch.column("reward").to_pylist(), strict=True))
            # What the lease no longer holds has ended, or comes again and counts then.
            counted = await on_held(queue, lease, lease.ids, partial(_count, queue, lease))
            rewards += [found[row] for row in counted if row in wanted]
        now_failed = await _lost(queue) - lost
        if lease is not None or now_failed > failed:
            failed, moved = now_failed, time.monotonic()
        elif time.monotonic() - moved > seconds:
            missing = rows - len(rewards) - failed
            raise DeadlineExceeded.waiting(f"{missing} of {rows} evaluation rows", "producers and scorers", seconds)
    reward = sum(rewards) / len(rewards) if rewards else None
    return Evaluation(step=step, reward=reward, rows=len(rewards), failed=failed)


async def _count(queue: TransferQueue, lease: Lease, rows: Sequence[int]) -> None:
    await queue.write(lease, pa.RecordBatch.from_pydict({"row": pa.array(rows, KEY_COLUMNS.field("row").type)}))


async def _lost(queue: TransferQueue) -> int:
    counts = (await queue.statistics()).by_split.get("eval", {})
    return counts.get("dropped", 0) + counts.get("dead", 0)
