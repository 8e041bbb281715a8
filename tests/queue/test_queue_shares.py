"""Who floods, is slow, waits or dies takes nothing from the others; parked and half-done rows over real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
import trio
from test_queue_broker import FLOW, pass_all, publish, queue_at, run, tasks, trajectory
from test_queue_stages import ARCHIVE, JUDGE, feedback_flow, with_stage

from streamrl_queue import TransferQueue, open_broker, schema, work_flow
from streamrl_queue.errors import ConfigError, LeaseExpired, SchemaError, UnknownName
from streamrl_queue.nursery import open_nursery

# How much longer a request may take beside somebody who misbehaves than alone; far less than being held up by it.
WORST: float = 20.0
LEAST_SECONDS: float = 0.02

RANK = """
import sys, trio
from streamrl_queue import TransferQueue

async def main(address):
    async with TransferQueue.connect(address, name="rank") as queue:
        lease = await queue.lease("learn", rows=8, at_least=8, step=1, wait=20, payload=False)
        await queue.fetch(lease.ids, ["tokens"])
        print("holds", len(lease.ids), flush=True)
        await trio.sleep_forever()

trio.run(main, sys.argv[1])
"""


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_learner_that_is_killed_between_its_lease_and_the_commit_loses_nothing(tmp_path: Path) -> None:
    """A process of its own is killed."""

    async def body(path: Path) -> None:
        async with queue_at(path) as (broker, queue):
            await queue.put(tasks(2), members=4)
            await publish(queue)
            await pass_all(queue)
            command = [sys.executable, "-c", RANK, broker.address]
            process = await trio.to_thread.run_sync(start, command)
            assert process.stdout is not None
            assert (await trio.to_thread.run_sync(process.stdout.readline)).strip() == "holds 8"
            assert (await queue.statistics()).leased == 8
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            lease = await queue.lease("learn", rows=8, at_least=8, step=1, wait=10)
            assert lease is not None
            assert len(lease.ids) == 8
            assert {row.attempt for row in lease.rows} == {2}
            await queue.commit(1, lease.ids)
            statistics = await queue.statistics()
            statistics.check()
            assert (statistics.trained, statistics.leased) == (8, 0)

    run(body, tmp_path)


async def seconds_of_work(queue: TransferQueue, name: str, rounds: int = 20) -> float:
    """The longest of some rounds of put, lease and write of one row of its own, but for the few in which this machine
    did something else.
    """
    seconds: list[float] = []
    for number in range(rounds):
        started = time.monotonic()
        batch = pa.RecordBatch.from_pydict({"env": [name], "x": [number]})
        await queue.put(batch)
        lease = await queue.lease("work", rows=1, wait=10, where={"env": name})
        assert lease is not None
        await queue.write(lease, pa.RecordBatch.from_pydict({"row": pa.array(lease.ids, pa.uint64())}))
        seconds.append(time.monotonic() - started)
    return sorted(seconds)[rounds * 3 // 4]


@pytest.mark.parametrize("who", ["flooding producer", "slow consumer", "waiting consumers"])
def test_nobody_is_held_up_by(who: str, tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        flow = msgspec.structs.replace(work_flow(), waiting_rows=4096)
        async with (
            open_broker(flow, path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as mine,
            TransferQueue.connect(broker.address) as other,
        ):
            alone = await seconds_of_work(mine, "alone")

            async def flood() -> None:
                while True:
                    await other.put(pa.RecordBatch.from_pydict({"env": ["flood"] * 64, "x": [0] * 64}))
                    lease = await other.lease("work", rows=64, where={"env": "flood"}, payload=False)
                    assert lease is not None
                    await other.drop(lease, reason="test")

            async def hold() -> None:
                await other.put(pa.RecordBatch.from_pydict({"env": ["slow"] * 64, "x": [0] * 64}))
                while lease := await other.lease("work", rows=8, where={"env": "slow"}, wait=10):
                    await other.extend(lease)

            async def wait() -> None:
                await other.lease("work", rows=8, where={"env": "nowhere"}, wait=20)

            async with open_nursery() as nursery:
                task = {"flooding producer": flood, "slow consumer": hold, "waiting consumers": wait}[who]
                for _ in range(8 if who == "waiting consumers" else 2):
                    nursery.start_soon(task)
                await other.statistics()
                beside = await seconds_of_work(mine, "beside")
                nursery.cancel_scope.cancel()
            assert beside < WORST * max(alone, LEAST_SECONDS)

    run(body, tmp_path)


def played(n: int, version: int = 1) -> pa.RecordBatch:
    """Tasks with their trajectories."""
    columns = schema.trajectory_batch(range(n), [trajectory(version)] * n)
    return pa.RecordBatch.from_arrays(
        [pa.array([b"{}"] * n, pa.large_binary()), *columns.columns[1:]], names=["task", *columns.schema.names[1:]]
    )


def test_rows_that_were_played_elsewhere_are_parked_until_somebody_names_their_key(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with (
            open_broker(feedback_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            await publish(queue)
            with pytest.raises(SchemaError, match="missing column tokens"):
                await queue.put(played(1).select(["task", "versions"]), filled=["rollout"])
            with pytest.raises(SchemaError, match="expected 2 lines for 1 keys, one row"):
                await queue.put(played(1), keys=["a"], members=2, filled=["rollout"])
            await queue.put(played(4), keys=["a", "b"], members=2, filled=["rollout"])
            statistics = await queue.statistics()
            assert (statistics.parked, statistics.stages["feedback"].parked) == (4, 4)
            assert [row.row for row in await queue.peek("feedback")] == [1, 2, 3, 4]
            with pytest.raises(UnknownName, match="name the keys"):
                await queue.lease("feedback", rows=4)
            with pytest.raises(ValueError, match="`rows`, the most to hand out, or the `keys`"):
                await queue.lease("feedback", rows=4, keys=["a"])
            lease = await queue.lease("feedback", keys=["b"])
            assert lease is not None
            assert lease.batch is not None
            assert lease.ids == (3, 4)
            assert lease.batch.column("tokens").to_pylist() == [[0, 1, 2, 3, 4]] * 2
            assert [row.tokens for row in lease.rows] == [5, 5]
            with pytest.raises(LeaseExpired, match="is held by"):
                await queue.lease("feedback", keys=["b"])
            assert await queue.extend(lease) == (3, 4)
            await queue.write(lease, schema.reward_batch(lease.ids, [1.0, 0.0], [{}, {}]).select(["row", "reward"]))
            batch = await queue.lease("learn", rows=4, step=1)
            assert batch is not None
            assert batch.ids == (3, 4)
            await queue.commit(1, batch.ids)
        async with open_broker(feedback_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker:
            statistics = broker.rows.statistics()
            statistics.check()
            assert (statistics.parked, statistics.trained) == (2, 2)

    run(body, tmp_path)


@pytest.mark.parametrize("segment_bytes", [1 << 13, 1 << 24], ids=["from a snapshot", "from the journal"])
def test_a_run_that_is_resumed_with_one_more_stage_goes_on(tmp_path: Path, segment_bytes: int) -> None:
    async def body(path: Path) -> None:
        bind = f"ipc://{path}/q.sock"
        async with (
            open_broker(FLOW, path / "j", bind=bind, segment_bytes=segment_bytes) as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            await publish(queue)
            await queue.put(tasks(6), members=4)
            await pass_all(queue)
        assert bool(list((path / "j").glob("*.snapshot"))) == (segment_bytes < 1 << 20)
        fewer = msgspec.structs.replace(FLOW, stages=FLOW.stages[:3] + FLOW.stages[4:])
        with pytest.raises(ConfigError, match="the journal has rows of stage learn"):
            async with open_broker(fewer, path / "j", bind=bind, segment_bytes=segment_bytes):
                pass
        more = with_stage(with_stage(FLOW, 2, JUDGE, learn=("verdict",)), 6, ARCHIVE)
        for _ in range(2):
            async with open_broker(more, path / "j", bind=bind, segment_bytes=segment_bytes) as broker:
                statistics = broker.rows.statistics()
                statistics.check()
                assert {name: count.ready for name, count in statistics.stages.items()} == {
                    "rollout": 0,
                    "reward": 0,
                    "judge": 24,
                    "advantage": 0,
                    "learn": 0,
                    "evaluate": 0,
                    "archive": 24,
                }

    run(body, tmp_path)
