"""Figures that are streamrl's alone: latencies, puts beside waiting consumers, many rows, recovery, and the disk."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import trio

from streamrl_queue import Lease, TransferQueue

from .arrow import record_batch
from .measure import Deadlines, Place, place
from .payload import Payload
from .processes import Child, cpu_seconds
from .system import DEEP, ENTRIES

T = TypeVar("T")
LEASE: Final = 32
# Cycles of put, two leases and two writes for the CPU of an operation.
CYCLES: Final = 60
OPERATIONS: Final = 5
FILL_ROWS: Final = 1000
# One write of the disk's measurement: what a put of 64 rows is.
WRITE_BYTES: Final = 655_360
DEADLINE_SECONDS: Final = Deadlines().start
WAIT_SECONDS: Final = 60.0


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    repeats: int = 200
    live_rows: tuple[int, ...] = (1_000, 10_000, 100_000)
    recovery_bytes: int = 256 << 20
    disk_bytes: int = 64 << 20


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies in seconds; CPU seconds per operation, of the broker alone, by live rows."""

    ready_get: list[float]
    put_to_blocked: list[float]
    put_alone: list[float]
    put_beside_waiting: list[float]
    cpu_by_live_rows: dict[int, float]
    recovery_seconds: float
    recovery_bytes: int
    disk_bytes_per_second: float


class Broker:
    """A broker in a place of its own."""

    def __init__(self, here: Place) -> None:
        self._here = here
        self.process: Child
        self.address = ""
        self.start()

    def start(self) -> float:
        """Start it, on the journal that is there; returns the seconds until it serves."""
        began = time.monotonic()
        self.process = self._here.start("server")
        self.address = self.process.answer(began + DEADLINE_SECONDS)["address"]
        return time.monotonic() - began

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.leave()


def measure(python: Path, scratch: Path, scale: Scale) -> Own:
    """All figures, each of its kind on an empty broker."""

    def on_broker(function: Callable[[Broker, TransferQueue, Scale], Awaitable[T]]) -> T:
        async def run(broker: Broker) -> T:
            async with TransferQueue.connect(broker.address) as queue:
                return await function(broker, queue, scale)

        with place(DEEP, ENTRIES[DEEP], python, scratch) as here:
            return trio.run(run, Broker(here))

    recovery_seconds, recovery_bytes = on_broker(_recovery)
    return Own(
        **on_broker(_latencies),
        cpu_by_live_rows=on_broker(_cpu_by_live_rows),
        recovery_seconds=recovery_seconds,
        recovery_bytes=recovery_bytes,
        disk_bytes_per_second=synced_bandwidth(scratch, scale.disk_bytes),
    )


async def _latencies(broker: Broker, queue: TransferQueue, scale: Scale) -> dict[str, list[float]]:
    async with TransferQueue.connect(broker.address) as other:
        return {
            "ready_get": await _ready_gets(queue, scale.repeats),
            "put_to_blocked": await _puts_to_blocked(queue, other, scale.repeats),
            **await _puts_beside_waiting(queue, other, scale.repeats),
        }


async def _ready_gets(queue: TransferQueue, repeats: int) -> list[float]:
    """Leases of 32 whole rows that are there, until their columns can be read."""
    payload = Payload()
    seconds = []
    for number in range(repeats):
        await queue.put(record_batch(payload.batch(number * LEASE, LEASE)))
        await _reward(queue, await _lease(queue, "reward"))
        began = time.perf_counter()
        lease = await _lease(queue, "learner")
        seconds.append(time.perf_counter() - began)
        await queue.drop(lease, reason="measured")
    return seconds


async def _puts_to_blocked(queue: TransferQueue, other: TransferQueue, repeats: int) -> list[float]:
    """From the call of a put of 32 rows until a consumer that waited for them can read them."""
    payload = Payload()
    began = 0.0
    seconds = []

    async def consume() -> None:
        lease = await _lease(other, "reward")
        seconds.append(time.perf_counter() - began)
        await other.drop(lease, reason="measured")

    for number in range(repeats):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(consume)
            # Long enough for the broker to have the request.
            await trio.sleep(0.005)
            batch = record_batch(payload.batch(number * LEASE, LEASE))
            began = time.perf_counter()
            await queue.put(batch)
    return seconds


async def _puts_beside_waiting(queue: TransferQueue, other: TransferQueue, repeats: int) -> dict[str, list[float]]:
    """Puts of one row, in turns alone and while consumers wait at both stages for more rows than there will be."""
    payload = Payload()
    alone: list[float] = []
    beside: list[float] = []
    for seconds in (alone, beside) * 4:
        async with trio.open_nursery() as nursery:
            for stage in ("reward", "learner") if seconds is beside else ():
                nursery.start_soon(_wait_in_vain, other, stage)
            await trio.sleep(0.02)
            for number in range(repeats):
                batch = record_batch(payload.batch(number, 1))
                began = time.perf_counter()
                await queue.put(batch)
                seconds.append(time.perf_counter() - began)
            nursery.cancel_scope.cancel()
    await queue.end_rows("measured")
    return {"put_alone": alone, "put_beside_waiting": beside}


async def _wait_in_vain(queue: TransferQueue, stage: str) -> None:
    await queue.lease(stage, rows=1 << 20, at_least=1 << 20, wait=WAIT_SECONDS)


async def _cpu_by_live_rows(broker: Broker, queue: TransferQueue, scale: Scale) -> dict[int, float]:
    """The broker's CPU for one operation on small rows, with so many others waiting at the first stage."""
    found = {}
    live = 0
    for rows in scale.live_rows:
        while live < rows:
            count = min(FILL_ROWS, rows - live)
            await queue.put(_small(count))
            live += count
        before = cpu_seconds(broker.process.pid)
        for _ in range(CYCLES):
            await queue.put(_small(LEASE))
            await _reward(queue, await _lease(queue, "reward", "uid"))
            lease = await _lease(queue, "learner", "uid")
            await queue.write(lease, pa.record_batch({"row": pa.array(lease.ids, pa.uint64())}))
        found[rows] = (cpu_seconds(broker.process.pid) - before) / (CYCLES * OPERATIONS)
    return found


async def _recovery(broker: Broker, queue: TransferQueue, scale: Scale) -> tuple[float, int]:
    """Seconds until a broker that was killed serves again, on how many bytes of live rows."""
    payload = Payload()
    size = rows = 0
    while size < scale.recovery_bytes:
        for _ in range(8):
            await queue.put(record_batch(payload.batch(rows, 64)))
            rows += 64
        size = await queue.journal_bytes()
    broker.kill()
    return await trio.to_thread.run_sync(broker.start), size


def _small(rows: int) -> pa.RecordBatch:
    return pa.record_batch({"uid": pa.array(np.arange(rows))})


async def _lease(queue: TransferQueue, stage: str, *columns: str) -> Lease:
    lease = await queue.lease(stage, rows=LEASE, at_least=LEASE, wait=WAIT_SECONDS, columns=columns or None)
    assert lease is not None, f"no rows at {stage} within {WAIT_SECONDS:.0f} s"
    return lease


async def _reward(queue: TransferQueue, lease: Lease) -> None:
    ids = pa.array(lease.ids, pa.uint64())
    await queue.write(lease, pa.record_batch({"row": ids, "reward": pa.array(np.zeros(len(ids)))}))


def synced_bandwidth(directory: Path, size: int) -> float:
    """Bytes per second of writes that are each synced, as large as a put of 64 rows."""
    path = directory / "disk"
    data = np.random.default_rng(0).bytes(WRITE_BYTES)
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        began = time.perf_counter()
        for _ in range(size // WRITE_BYTES):
            os.write(file, data)
            os.fdatasync(file)
        return size // WRITE_BYTES * WRITE_BYTES / (time.perf_counter() - began)
    finally:
        os.close(file)
        path.unlink()
