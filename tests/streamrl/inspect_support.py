"""Small journals for the tests of inspection, made by a real broker, without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import trio

from streamrl.config import resolve
from streamrl.runtime.rundir import RunDirectory, prepare
from streamrl_queue import (
    Broker,
    QueueConfig,
    Segment,
    Span,
    Task,
    Trajectory,
    TransferQueue,
    open_broker,
    training_flow,
)
from streamrl_queue.nursery import run as run_trio
from streamrl_queue.schema import advantage_batch, reward_batch, trajectory_batch

FLOW = training_flow(QueueConfig(max_deliveries=2), rows_per_step=4)

Play = Callable[[TransferQueue], Awaitable[None]]


def tasks(n: int, start: int = 0) -> list[Task]:
    return [Task(env="e", task={"i": i}, index=i, seed=i) for i in range(start, start + n)]


def trajectory(version: int = 1, length: int = 6) -> Trajectory:
    """Two given tokens, the rest sampled by `version`."""
    sampled = length - 2
    return Trajectory(
        tokens=np.arange(length, dtype=np.int32),
        mask=np.array([0, 0] + [1] * sampled, np.uint8),
        logprobs=np.array([np.nan, np.nan] + [-1.0] * sampled, np.float32),
        versions=(Span(2, version, version),),
        segments=(Segment(0, length),),
        turns=1,
        status="completed",
        sampling={"temperature": 1.0},
        outcome=1.0,
    )


@asynccontextmanager
async def serving(
    directory: Path, *, segment_bytes: int = 64 << 20, config: QueueConfig | None = None
) -> AsyncIterator[tuple[Broker, TransferQueue]]:
    """A broker on `directory`/journal and a client of it called `worker-0`."""
    flow = training_flow(config, rows_per_step=4) if config else FLOW
    bind = f"ipc://{directory}/q.sock"
    async with (
        open_broker(flow, directory / "journal", bind=bind, segment_bytes=segment_bytes) as broker,
        TransferQueue.connect(broker.address, name="worker-0", role="worker") as queue,
    ):
        yield broker, queue


def made(directory: Path, *plays: Play, segment_bytes: int = 64 << 20, config: QueueConfig | None = None) -> Path:
    """The journal of a broker that `plays` were played with; it has ended."""

    async def play() -> None:
        with trio.fail_after(30):
            async with serving(directory, segment_bytes=segment_bytes, config=config) as (_, queue):
                for one in plays:
                    await one(queue)

    run_trio(play)
    return directory / "journal"


async def publish(queue: TransferQueue, step: int = 0, parent: int | None = None) -> int:
    version = await queue.begin_version(step, parent)
    await queue.commit_version(version, f"digest-{version}")
    return version


async def roll_out(queue: TransferQueue, rows: int, version: int = 1) -> tuple[int, ...]:
    lease = await queue.lease("rollout", rows=rows, wait=1)
    assert lease is not None
    await queue.write(lease, trajectory_batch(lease.ids, [trajectory(version) for _ in lease.ids]))
    return lease.ids


async def score(queue: TransferQueue, rows: int) -> None:
    """Rewards 0, 1, 0, 1, … and the advantages of whole groups."""
    lease = await queue.lease("reward", rows=rows, wait=1)
    assert lease is not None
    rewards = [float(row % 2) for row in lease.ids]
    await queue.write(lease, reward_batch(lease.ids, rewards, [{"outcome": reward} for reward in rewards]))
    lease = await queue.lease("advantage", rows=rows, wait=1)
    assert lease is not None
    await queue.write(lease, advantage_batch(lease.ids, [reward - 0.5 for reward in rewards]))


async def train(queue: TransferQueue, step: int, rows: int = 4) -> tuple[int, ...]:
    lease = await queue.lease("learn", rows=rows, step=step, wait=1)
    assert lease is not None
    await queue.commit(step, lease.ids)
    return lease.ids


async def two_steps(queue: TransferQueue) -> None:
    """Two groups of four rows; each trains one step, and a checkpoint covers the first."""
    await publish(queue)
    await queue.put(tasks(2), members=4)
    for step in (1, 2):
        await roll_out(queue, 4)
        await score(queue, 4)
        await train(queue, step)
        await publish(queue, step, step)
    await queue.retire(1)


async def trouble(queue: TransferQueue) -> None:
    """One row that dies after two lost deliveries, one that is dropped, one that was given back and is leased."""
    await queue.put(tasks(3, start=100), split="eval")
    for _ in range(2):
        lease = await queue.lease("rollout", rows=1, wait=1)
        assert lease is not None
        await queue.end_session("nobody")
        await lose(queue)
    lease = await queue.lease("rollout", rows=1, wait=1)
    assert lease is not None
    await queue.drop(lease, reason="error_env")
    lease = await queue.lease("rollout", rows=1, wait=1)
    assert lease is not None
    await queue.release(lease, reason="the producer drains")
    await queue.lease("rollout", rows=1, wait=1)


async def lose(queue: TransferQueue) -> None:
    """Another process says that this one is gone: its leases end. The session opens again by itself."""
    async with TransferQueue.connect(queue.address, name="supervisor", role="supervisor") as other:
        await other.end_session("worker-0")


def run_directory(path: Path, *, max_deliveries: int = 2) -> Path:
    """Make a run of the directory, so that its flow is `FLOW`."""
    overrides = [f"queue.max_deliveries={max_deliveries}", "learner.rows_per_step=8", "model.max_positions=2048"]
    config = resolve({"env": "m:E", "name": path.name, "runs": str(path.parent)}, overrides)
    prepare(RunDirectory(path), config)
    return path
