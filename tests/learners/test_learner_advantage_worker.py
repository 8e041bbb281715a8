"""The advantage worker outlives the loss of its leases."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa
import pytest
import trio

from streamrl_learners.advantage_worker import run_advantage_worker
from streamrl_learners.algorithms.pieces import Grpo
from streamrl_queue import Lease, TransferQueue
from streamrl_queue.batches import RowKeys
from streamrl_queue.errors import LeaseExpired


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
