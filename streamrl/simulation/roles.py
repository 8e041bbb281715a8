"""The processes of a simulated run. Each coroutine here is the `main` of one; it dies with its node."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import trio

from streamrl_agents.rewards import Scorer, run_reward_worker
from streamrl_learners.advantage_worker import run_advantage_worker
from streamrl_learners.algorithms.pieces import Grpo
from streamrl_producers.config import RolloutConfig
from streamrl_producers.producer import run_producer
from streamrl_queue import TransferQueue
from streamrl_queue.errors import LeaseExpired, QueueFull
from streamrl_queue.nursery import open_nursery
from streamrl_queue.rpc import RpcServer

from .learner import SimLearner
from .network import Node
from .workload import AGENT, EngineRequest, TimedEngine, sample_task

if TYPE_CHECKING:
    from .world import World

ADDRESS: Final = "sim://broker"
FEED_SECONDS: Final = 0.5
EVALUATE_SECONDS: Final = 5.0


@asynccontextmanager
async def connected(world: World, node: Node, role: str, endpoint: str | None = None) -> AsyncIterator[TransferQueue]:
    """The node's session at the broker."""
    async with TransferQueue.connect(
        ADDRESS,
        role=role,
        name=node.name,
        endpoint=endpoint,
        transport=world.network.transport(node),
        session=f"{node.name}.{node.incarnation}",
        wall=world.wall,
    ) as queue:
        yield queue


async def engine(world: World, node: Node) -> None:
    """Serves generations that only take time."""
    s = world.scenario
    made = TimedEngine(world.rng(node), s.seed, s.token_seconds, s.poison_share)
    transport = world.network.transport(node)
    async with (
        RpcServer.bind(f"sim://{node.name}:0", EngineRequest, made.handle, transport=transport) as server,
        connected(world, node, "engine", server.address) as queue,
    ):
        made.queue = queue
        await made.announce()


async def producer(world: World, node: Node) -> None:
    """Plays episodes on the engines of the simulated network."""
    s, rng = world.scenario, world.rng(node)
    config = RolloutConfig(
        concurrency=s.concurrency,
        max_turn_tokens=rng.choice((256, 1024)),
        max_tokens=4096,
        turn_seconds=20.0,
        episode_seconds=60.0,
        slice_tokens=rng.choice((64, 512)),
    )
    transport = world.network.transport(node)
    async with connected(world, node, "producer") as queue:
        await run_producer(queue, agent=AGENT, template=world.template, config=config, transport=transport)


async def scorer(world: World, node: Node) -> None:
    """Rewards, advantages, evaluation."""
    async with connected(world, node, "scorer") as queue, open_nursery() as nursery:
        nursery.start_soon(run_reward_worker, queue, Scorer())
        nursery.start_soon(run_advantage_worker, queue, Grpo())
        nursery.start_soon(_evaluate, queue)


async def _evaluate(queue: TransferQueue) -> None:
    """Consumes scored eval rows; produces their end; waits for the queue; unblocked by such rows."""
    while True:
        lease = await queue.lease("evaluate", rows=16, wait=EVALUATE_SECONDS)
        if lease is not None:
            ids = pa.array(lease.ids, pa.uint64())
            # When it has run out, the rows come again.
            with suppress(LeaseExpired):
                await queue.write(lease, pa.RecordBatch.from_arrays([ids], names=["row"]))


async def learner(world: World, node: Node) -> None:
    """Trains, checkpoints, publishes."""
    async with connected(world, node, "learner") as queue:
        made = SimLearner(
            queue,
            world.network.transport(node),
            world.scenario,
            world.checkpoints,
            world.rng(node),
            again=node.incarnation > 1,
        )
        await made.run()


async def coordinator(world: World, node: Node) -> None:
    """Feeds tasks while the faults last, then waits until all rows have ended."""
    async with connected(world, node, "coordinator") as queue, open_nursery() as nursery:
        world.coordinator = queue
        await _feed(world, queue, world.rng(node))
        world.checkpoints.last_tasks = True
        await world.calm.wait()
        while not await _all_ended(world, queue):
            await trio.sleep(FEED_SECONDS)
        nursery.cancel_scope.cancel()
    world.done.set()


async def _feed(world: World, queue: TransferQueue, rng: random.Random) -> None:
    """Keeps about two steps of tasks waiting; sometimes puts a task again, sometimes one of evaluation."""
    s = world.scenario
    fed = {"train": 0, "eval": 0}
    while trio.current_time() < s.seconds:
        counts = (await queue.statistics()).by_split.get("train", {})
        ahead = 2 * s.rows_per_step + s.group_size - counts.get("waiting", 0)
        groups = min(ahead, s.waiting_rows) // s.group_size
        split = "eval" if rng.random() < 0.1 else "train"
        n = rng.randint(1, 3) if split == "eval" else groups
        if n > 0:
            start = fed[split] - (rng.randint(0, min(2, fed[split])) if rng.random() < 0.1 else 0)
            tasks = [sample_task(s.seed, split, i, s.failing_share) for i in range(start, start + n)]
            try:
                members = s.group_size if split == "train" else 1
                await queue.put(tasks, members=members, split=split, priority=rng.choice((0, 0, 0, 1)), wait=5.0)
                fed[split] = start + n
            except QueueFull:
                continue
        await trio.sleep(FEED_SECONDS)


async def _all_ended(world: World, queue: TransferQueue) -> bool:
    statistics = await queue.statistics()
    return statistics.unfinished == 0 and world.checkpoints.finished
