"""Arrow Flight: a small server that keeps tables and hands out whole batches, first in first out.

The reward worker puts its column with the batch's number; the server sets it beside the others. No acknowledgement of
rows, no lease, no batches other than those that were put.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as fl

from .arrow import columns_of, record_batch, uids_of
from .payload import REWARD_READS, Batch
from .system import Role, Taken


class Server(fl.FlightServerBase):  # type: ignore[misc]
    """Batches by number, and which of them wait for whom."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._batches: dict[int, pa.Table] = {}
        self._waiting: dict[str, deque[int]] = {"reward": deque(), "learner": deque()}
        self._changed = threading.Condition()
        self._number = 0

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        table = reader.read_all()
        with self._changed:
            if descriptor.command:
                number, stage = int(descriptor.command), "learner"
                table = self._batches[number].append_column("reward", table.column(0))
            else:
                self._number += 1
                number, stage = self._number, "reward"
            self._batches[number] = table
            self._waiting[stage].append(number)
            self._changed.notify_all()

    def do_get(self, context: Any, ticket: Any) -> Any:
        role = ticket.ticket.decode()
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[role])
            number = self._waiting[role].popleft()
            table = self._batches.pop(number) if role == "learner" else self._batches[number].select(REWARD_READS)
        return fl.RecordBatchStream(table.replace_schema_metadata({"number": str(number)}))


class Connection:
    """One role's client, blocking."""

    in_flight = 1
    ahead = 0

    def __init__(self, client: Any, role: Role) -> None:
        self._client = client
        self._role = role

    def _put(self, command: bytes, batch: pa.RecordBatch) -> None:
        writer, _ = self._client.do_put(fl.FlightDescriptor.for_command(command), batch.schema)
        writer.write_batch(batch)
        writer.close()

    async def put(self, batch: Batch) -> None:
        self._put(b"", record_batch(batch))

    async def get(self, rows: int) -> Taken:
        chunk = self._client.do_get(fl.Ticket(self._role.encode())).read_chunk()
        return Taken(uids_of(chunk.data), chunk.data, chunk.data.schema.metadata[b"number"])

    async def finish(self, taken: Taken, reward: npt.NDArray[np.float64] | None) -> None:
        if reward is not None:
            self._put(taken.token, pa.RecordBatch.from_arrays([pa.array(reward)], names=["reward"]))

    def columns(self, taken: Taken) -> Mapping[str, Any]:
        return columns_of(taken.data)


@asynccontextmanager
async def serve(variant: str, where: Path) -> AsyncIterator[str]:
    with Server("grpc://127.0.0.1:0") as server:
        yield f"grpc://127.0.0.1:{server.port}"


@asynccontextmanager
async def connect(variant: str, where: Path, address: str, role: Role) -> AsyncIterator[Connection]:
    with fl.connect(address) as client:
        yield Connection(client, role)
