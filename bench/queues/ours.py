"""streamrl's queue: a real broker, leases, digests of every message, the journal.

The variant is its durability, and words: `unbounded` when nothing bounds the rows that wait, `mapped` when columns are
read in place instead of over ZeroMQ.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamrl_queue import Flow, Stage, TransferQueue, open_broker
from streamrl_queue.config import Durability

from .arrow import columns_of, record_batch, uids_of
from .payload import COLUMNS, REWARD_READS, Batch
from .system import Role, Taken

WAIT_SECONDS: Final = 30.0
# As in a run's configuration: a producer does not run ahead without end.
WAITING_ROWS: Final = 4096
STAGES: Final = (
    Stage(name="reward", reads=REWARD_READS, writes=("reward",)),
    Stage(name="learner", reads=(*COLUMNS, "reward"), after=("reward",)),
)


class Session:
    """One role's session. The learner ends rows by writing `row` alone."""

    in_flight = 4
    ahead = 1

    def __init__(self, queue: TransferQueue, role: Role) -> None:
        self._queue = queue
        self._role = role

    async def put(self, batch: Batch) -> None:
        await self._queue.put(record_batch(batch), wait=WAIT_SECONDS)

    async def get(self, rows: int) -> Taken:
        while True:
            lease = await self._queue.lease(self._role, rows=rows, at_least=rows, wait=WAIT_SECONDS)
            if lease is not None and lease.batch is not None:
                return Taken(uids_of(lease.batch), lease.batch, lease)

    async def finish(self, taken: Taken, reward: npt.NDArray[np.float64] | None) -> None:
        columns = {"row": taken.data.column("row")}
        if reward is not None:
            columns["reward"] = pa.array(reward)
        await self._queue.write(taken.token, pa.RecordBatch.from_arrays([*columns.values()], names=[*columns]))

    def columns(self, taken: Taken) -> Mapping[str, Any]:
        return columns_of(taken.data)


@asynccontextmanager
async def serve(variant: str, where: Path) -> AsyncIterator[str]:
    """One broker, its journal and its socket under `where`."""
    logging.basicConfig(level=logging.WARNING)
    durability, *options = variant.split()
    flow = Flow(stages=STAGES) if "unbounded" in options else Flow(stages=STAGES, waiting_rows=WAITING_ROWS)
    bind = f"ipc://{where}/queue"
    async with open_broker(flow, where / "journal", bind=bind, durability=cast(Durability, durability)) as broker:
        yield broker.address


@asynccontextmanager
async def connect(variant: str, where: Path, address: str, role: Role) -> AsyncIterator[Session]:
    async with TransferQueue.connect(address, role=role, mapped="mapped" in variant.split()) as queue:
        yield Session(queue, role)
