"""TransferQueue 0.1.11 with SimpleStorage: a controller and two storage units, actors of Ray.

Polled as its users must: without its polling mode one early consumer stops everybody for seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import transfer_queue
import trio
from omegaconf import OmegaConf
from tensordict import TensorDict

from .payload import COLUMNS, RAGGED, REWARD_READS, SCALARS, Batch
from .ray import cluster, joined
from .system import Role, Taken

POLL_SECONDS: Final = 0.001
PARTITION: Final = "rows"
CONFIG: Final = {
    "controller": {"polling_mode": True},
    "backend": {"SimpleStorage": {"num_data_storage_units": 2}},
}


class Transfer:
    """One role's client, blocking."""

    in_flight = 1
    ahead = 0

    def __init__(self, client: Any, role: Role) -> None:
        self._client = client
        self._role = role
        self._reads = list(REWARD_READS if role == "reward" else (*COLUMNS, "reward"))

    async def put(self, batch: Batch) -> None:
        columns: dict[str, Any] = {}
        for name in RAGGED:
            rows = [torch.from_numpy(array) for array in batch[name]]
            columns[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        for name in SCALARS:
            columns[name] = torch.tensor(batch[name], dtype=torch.int64)
        self._client.put(TensorDict(columns, batch_size=len(batch["uid"])), partition_id=PARTITION)

    async def get(self, rows: int) -> Taken:
        while True:
            meta = self._client.get_meta(
                data_fields=self._reads,
                batch_size=rows,
                partition_id=PARTITION,
                mode="fetch",
                task_name=self._role,
            )
            if meta.size:
                break
            await trio.sleep(POLL_SECONDS)
        data = self._client.get_data(meta)
        return Taken(data["uid"].numpy().reshape(-1), data, meta)

    async def finish(self, taken: Taken, reward: npt.NDArray[np.float64] | None) -> None:
        if reward is None:
            self._client.clear_samples(taken.token)
        else:
            column = TensorDict({"reward": torch.from_numpy(reward)}, batch_size=len(reward))
            self._client.put(column, metadata=taken.token)

    def columns(self, taken: Taken) -> Mapping[str, Any]:
        ragged = {name: [row.numpy() for row in taken.data[name].unbind()] for name in RAGGED}
        return ragged | {name: taken.data[name].numpy().reshape(-1) for name in (*SCALARS, "reward")}


@asynccontextmanager
async def serve(variant: str, where: Path) -> AsyncIterator[str]:
    with cluster(where) as address:
        transfer_queue.init(OmegaConf.create(CONFIG))
        try:
            yield address
        finally:
            transfer_queue.close()


@asynccontextmanager
async def connect(variant: str, where: Path, address: str, role: Role) -> AsyncIterator[Transfer]:
    with joined(address):
        torch.set_num_threads(1)
        transfer_queue.init()
        yield Transfer(transfer_queue.get_client(), role)
