"""PUSH and PULL from role to role over ZeroMQ: the least that anybody could do, and no guarantee at all.

`arrow` is the floor: Arrow streams that are never copied in Python; the reward worker passes the frame on and sends its
column beside it. `pickle` is what is written by hand: lists of arrays, pickled and unpickled whole by every role.
"""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from .arrow import columns_of, from_bytes, record_batch, to_bytes, uids_of
from .payload import Batch
from .system import Role, Taken


class Pipes:
    """The sockets of one role, blocking."""

    in_flight = 1
    ahead = 0

    def __init__(self, source: zmq.Socket[bytes] | None, target: zmq.Socket[bytes] | None) -> None:
        self._source = source
        self._target = target

    def _send(self, *frames: Any) -> None:
        assert self._target is not None
        self._target.send_multipart(frames, copy=False)

    def _receive(self) -> list[zmq.Frame]:
        assert self._source is not None
        return self._source.recv_multipart(copy=False)


class ArrowPipes(Pipes):
    """A message is the batch, and behind the reward worker its rewards."""

    async def put(self, batch: Batch) -> None:
        self._send(to_bytes(record_batch(batch)))

    async def get(self, rows: int) -> Taken:
        frame, *rewards = self._receive()
        batch = from_bytes(frame.buffer)
        return Taken(uids_of(batch), batch, (frame, [np.frombuffer(reward.buffer) for reward in rewards]))

    async def finish(self, taken: Taken, reward: npt.NDArray[np.float64] | None) -> None:
        if reward is not None:
            self._send(taken.token[0], reward)

    def columns(self, taken: Taken) -> Mapping[str, Any]:
        return columns_of(taken.data, taken.token[1][0])


class PicklePipes(Pipes):
    """A message is the pickled batch; the reward worker adds a column."""

    async def put(self, batch: Batch) -> None:
        self._send(pickle.dumps(batch, 5))

    async def get(self, rows: int) -> Taken:
        (frame,) = self._receive()
        batch = pickle.loads(frame.buffer)
        return Taken(np.array(batch["uid"], np.int64), batch)

    async def finish(self, taken: Taken, reward: npt.NDArray[np.float64] | None) -> None:
        if reward is not None:
            self._send(pickle.dumps({**taken.data, "reward": reward}, 5))

    def columns(self, taken: Taken) -> Mapping[str, Any]:
        columns: Mapping[str, Any] = taken.data
        return columns


@asynccontextmanager
async def serve(variant: str, where: Path) -> AsyncIterator[str]:
    """Nothing runs beside the roles."""
    yield f"ipc://{where}"


@asynccontextmanager
async def connect(variant: str, where: Path, address: str, role: Role) -> AsyncIterator[Pipes]:
    """Who receives binds."""
    with zmq.Context() as context:
        source = target = None
        if role != "producer":
            source = context.socket(zmq.PULL)
            source.rcvhwm = source.linger = 0
            source.bind(f"{address}/{role}")
        if role != "learner":
            target = context.socket(zmq.PUSH)
            target.sndhwm = target.linger = 0
            target.connect(f"{address}/{'reward' if role == 'producer' else 'learner'}")
        try:
            yield (ArrowPipes if variant == "arrow" else PicklePipes)(source, target)
        finally:
            for socket in (source, target):
                if socket is not None:
                    socket.close()
