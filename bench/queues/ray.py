"""Ray: batches lie in its object store, references to them go through `ray.util.queue`, an actor.

The reward worker stores its column as an object of its own and passes both references on.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import ray
from ray.util.queue import Queue

from .payload import Batch
from .system import Role, Taken

STAGES: Final = ("reward", "learner")
# More than there are here: the roles and the queue's actors must all be scheduled.
CPUS: Final = 8
STORE_BYTES: Final = 2 << 30


class References:
    """One role: two queues, of which it reads one and fills the other."""

    in_flight = 1
    ahead = 0

    def __init__(self, role: Role) -> None:
        self._source = role
        self._queues = {stage: _queue(stage) for stage in STAGES}

    async def put(self, batch: Batch) -> None:
        self._queues["reward"].put([ray.put(batch)])

    async def get(self, rows: int) -> Taken:
        references = self._queues[self._source].get()
        batch, *reward = ray.get(references)
        return Taken(np.array(batch["uid"], np.int64), (batch, reward), references)

    async def finish(self, taken: Taken, reward: npt.NDArray[np.float64] | None) -> None:
        if reward is not None:
            self._queues["learner"].put([*taken.token, ray.put(reward)])

    def columns(self, taken: Taken) -> Mapping[str, Any]:
        batch, (reward,) = taken.data
        return {**batch, "reward": reward}


def _queue(name: str) -> Any:
    """The queue whose actor is called so; its class can only make a fresh one."""
    queue = Queue.__new__(Queue)
    queue.maxsize = 0
    queue.actor = ray.get_actor(name)
    return queue


@contextmanager
def cluster(where: Path) -> Iterator[str]:
    """A cluster of this machine alone, for who has its token; tells its address."""
    token = where / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    context = ray.init(
        _node_ip_address="127.0.0.1",
        _temp_dir=str(where),
        num_cpus=CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=STORE_BYTES,
        namespace="bench",
    )
    try:
        yield context.address_info["address"]
    finally:
        ray.shutdown()


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Take part in the cluster."""
    ray.init(address=address, namespace="bench", log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


@asynccontextmanager
async def serve(variant: str, where: Path) -> AsyncIterator[str]:
    with cluster(where) as address:
        queues = [Queue(actor_options={"num_cpus": 0, "name": stage}) for stage in STAGES]
        for queue in queues:
            queue.size()
        yield address


@asynccontextmanager
async def connect(variant: str, where: Path, address: str, role: Role) -> AsyncIterator[References]:
    with joined(address):
        yield References(role)
