"""What a system under test is, and which there are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from .payload import Batch

Role = Literal["producer", "reward", "learner"]


class Taken(NamedTuple):
    """Rows that a stage got. `data` has the columns it reads, ready to be viewed; `token` is the system's own."""

    uids: npt.NDArray[np.int64]
    data: Any
    token: Any = None


class Client(Protocol):
    """One role's connection. Whoever has no use for concurrency simply blocks."""

    # Puts that a producer keeps in flight, and takes that a consumer asks for before the last one is finished.
    in_flight: int
    ahead: int

    async def put(self, batch: Batch) -> None:
        """The rows are the system's when this returns, whatever that means there."""

    async def get(self, rows: int) -> Taken:
        """Up to `rows` rows, or one batch as it was put; waits for them."""

    async def finish(self, taken: Taken, reward: npt.NDArray[np.float64] | None) -> None:
        """The reward worker writes its column back; the learner is done with the rows."""

    def columns(self, taken: Taken) -> Mapping[str, Any]:
        """Column → one entry per row; asked of the learner, after the clock has stopped."""


class System(Protocol):
    """A module of this package. `variant` chooses among what it can do."""

    def serve(self, variant: str, where: Path) -> AbstractAsyncContextManager[str]:
        """Start what must run beside the roles, in a process of its own; tells the address."""

    def connect(self, variant: str, where: Path, address: str, role: Role) -> AbstractAsyncContextManager[Client]:
        """Start one role's connection; leaving the block stops it."""


class Entry(NamedTuple):
    """One line of the result. `environment` is None for what runs in the project's own."""

    title: str
    module: str
    variant: str = ""
    environment: str | None = None
    # Takes long to start.
    slow: bool = False
    # The process of the role `server` is not the system's own: it only starts what serves, if anything.
    wrapped: bool = False
    # Where it keeps its files.
    files: Literal["disk", "shm"] = "shm"
    # Environment variables of its processes; `{where}` is its directory.
    variables: Mapping[str, str] = {}


# Ray gives its workers a low priority, which would starve them here; its cluster is for who has the token.
RAY: Final[Mapping[str, str]] = {
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN_PATH": "{where}/token",
    "TQ_LOGGING_LEVEL": "ERROR",
}
SYSTEMS: Final[Mapping[str, Entry]] = {
    "floor": Entry("the floor: ZeroMQ + Arrow", "pipes", "arrow", wrapped=True),
    "pickled": Entry("PUSH/PULL of pickled batches", "pipes", "pickle", wrapped=True),
    "flight": Entry("Arrow Flight, whole batches", "flight"),
    "redis-hash": Entry("Redis, hash + stream", "redis", "hash", "redis", wrapped=True),
    "redis-blobs": Entry("Redis, stream of Arrow batches", "redis", "blobs", "redis", wrapped=True),
    "ray": Entry("Ray, object references", "ray", "", "ray", slow=True, variables=RAY),
    "transferqueue": Entry("TransferQueue 0.1.11", "transferqueue", "", "transferqueue", slow=True, variables=RAY),
    "streamrl": Entry("streamrl, flush, disk", "ours", "flush", files="disk"),
    "streamrl-mapped": Entry("streamrl, flush, disk, mapped", "ours", "flush mapped", files="disk"),
    "streamrl-tmpfs": Entry("streamrl, flush, tmpfs", "ours", "flush"),
    "streamrl-memory": Entry("streamrl, memory", "ours", "memory", files="disk"),
    "streamrl-fsync": Entry("streamrl, fsync, disk", "ours", "fsync", files="disk"),
}

# For streamrl's own figures: no bound on the rows that wait.
DEEP: Final = "streamrl-deep"
ENTRIES: Final[Mapping[str, Entry]] = {
    **SYSTEMS,
    DEEP: Entry("streamrl, flush, disk, any number of rows", "ours", "flush unbounded", files="disk"),
}


def load(entry: Entry) -> System:
    """The system's module; its packages must be there."""
    return cast(System, import_module(f"{__package__}.{entry.module}"))
