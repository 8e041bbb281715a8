"""The advantage worker outlives the loss of its leases."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import trio

from streamrl_learners.advantage_worker import run_advantage_worker
from streamrl_learners.algorithms.pieces import Grpo, ReinforcePlusPlus, SoftOverlong
from streamrl_queue import Lease, QueueConfig, Task, TransferQueue, open_broker, training_flow
from streamrl_queue.batches import RowKeys
from streamrl_queue.errors import LeaseExpired
from streamrl_queue.nursery import run
from streamrl_queue.schema import Segment, Span, Trajectory, reward_batch, trajectory_batch


class SlowQueue:
    """Hands out two groups; a row of the first has ended before its advantages are written, or all of it has."""

    def __init__(self, *, gone: bool) -> None:
        self.written: list[int] = []
        self.released: list[int] = []
        self._gone = gone
        self._lease = 0

    def report(self, activity: str | None = None, **gauges: float) -> None:
        pass

    async def lease(self, stage: str, **options: Any) -> Lease:
        self._lease += 1
        if self._lease > 2:
            await trio.sleep_forever()
        ids = [2 * self._lease, 2 * self._lease + 1]
        keys = tuple(RowKeys(row, self._lease, i, 1, "train", 3) for i, row in enumerate(ids))
        batch = pa.RecordBatch.from_pydict({"row": ids, "group": [self._lease] * 2, "reward": [0.0, 1.0]})
        return Lease(self._lease, stage, keys, 60.0, 1, 0, batch)

    async def write(self, lease: Lease, batch: pa.RecordBatch) -> None:
        if lease.id == 1:
            raise LeaseExpired("lease 1 is over")
        self.written += batch.column("row").to_pylist()

    async def release(self, lease: Lease, *, reason: str) -> None:
        if self._gone:
            raise LeaseExpired("lease 1 is over")
        self.released.append(lease.id)


def work(queue: SlowQueue) -> None:
    async def body() -> None:
        with trio.move_on_after(0.2):
            await run_advantage_worker(cast(TransferQueue, queue), Grpo())

    trio.run(body)


def test_a_lease_that_ran_out_costs_the_worker_nothing_but_its_work(caplog: pytest.LogCaptureFixture) -> None:
    queue = SlowQueue(gone=True)
    work(queue)
    assert queue.written == [4, 5]
    assert "lease 1 is over" in caplog.text


def test_groups_whose_members_ended_meanwhile_are_given_back_at_once_to_be_compared_without_them() -> None:
    queue = SlowQueue(gone=False)
    work(queue)
    assert (queue.released, queue.written) == ([1], [4, 5])


def trajectory(tokens: int, version: int) -> Trajectory:
    return Trajectory(
        tokens=np.zeros(tokens, np.int32),
        mask=np.array([0] + [1] * (tokens - 1), np.uint8),
        logprobs=np.array([np.nan] + [-1.0] * (tokens - 1), np.float32),
        versions=(Span(1, version, version),),
        segments=(Segment(0, tokens),),
        turns=1,
        status="completed",
        sampling={"temperature": 1.0},
    )


def test_rows_alone_in_their_groups_get_their_reward_less_what_their_length_costs(tmp_path: Path) -> None:
    """At a real queue, which tells with a lease how long its rows are."""
    length = SoftOverlong(max_tokens=20, buffer_tokens=10, scale=0.5)
    found: dict[int, tuple[float, float]] = {}

    async def body() -> None:
        flow = training_flow(QueueConfig(), rows_per_step=3, min_group_members=1)
        async with (
            open_broker(flow, tmp_path) as broker,
            TransferQueue.connect(broker.address) as queue,
            trio.open_nursery() as nursery,
        ):
            version = await queue.begin_version(0, None)
            await queue.commit_version(version, "digest")
            nursery.start_soon(run_advantage_worker, queue, ReinforcePlusPlus(), length)
            await queue.put([Task(env="e", task={}, index=i) for i in range(3)])
            rolled = await queue.lease("rollout", rows=3, at_least=3, wait=10)
            assert rolled is not None
            lengths = dict(zip(rolled.ids, (10, 15, 30), strict=True))
            await queue.write(
                rolled, trajectory_batch(rolled.ids, [trajectory(lengths[i], version) for i in rolled.ids])
            )
            scored = await queue.lease("reward", rows=3, at_least=3, wait=10)
            assert scored is not None
            await queue.write(scored, reward_batch(scored.ids, [1.0] * 3, [{}] * 3))
            learned = await queue.lease("learn", rows=3, at_least=3, wait=10, step=1)
            assert learned is not None
            assert learned.batch is not None
            for row, reward, advantage in zip(
                *(learned.batch.column(name).to_pylist() for name in ("row", "reward", "advantage")), strict=True
            ):
                found[lengths[row]] = (reward, advantage)
            nursery.cancel_scope.cancel()

    run(body)
    assert found == {10: (1.0, 1.0), 15: (1.0, 0.75), 30: (1.0, 0.5)}
