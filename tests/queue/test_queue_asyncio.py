"""The asyncio form of the client, against brokers in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest
import trio
from queue_process import BrokerProcess, running

import streamrl_queue.client
from streamrl_queue import AsyncioTransferQueue, BlockingTransferQueue, Lease, Task, TransferQueue
from streamrl_queue.errors import DeadlineExceeded, QueueError, UnknownName
from streamrl_queue.portal import Call, ConnectOptions
from streamrl_queue.schema import Segment, Span, Trajectory, advantage_batch, reward_batch, trajectory_batch

T = TypeVar("T")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with running(tmp_path) as process:
        yield process


def run(main: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(60):
            return await main

    return asyncio.run(limited())


def tasks(count: int, first: int = 0) -> list[Task]:
    return [Task(env="e", task={"n": n}, index=n) for n in range(first, first + count)]


def trajectories(lease: Lease) -> pa.RecordBatch:
    one = Trajectory(
        tokens=np.array([1, 2, 3], np.int32),
        mask=np.array([0, 1, 1], np.uint8),
        logprobs=np.array([np.nan, -0.5, -0.5], np.float32),
        versions=(Span(1, lease.version, lease.version),),
        segments=(Segment(0, 3),),
        turns=1,
        status="completed",
        sampling={"temperature": 1.0},
    )
    return trajectory_batch(lease.ids, [one] * len(lease.ids))


async def held(lease: Coroutine[Any, Any, Lease | None]) -> Lease:
    found = await lease
    assert found is not None
    return found


def public_coroutines(kind: type) -> set[str]:
    return {name for name, method in vars(kind).items() if callable(method) and not name.startswith("_")} - {
        "report",
        "waiting",
    }


@pytest.mark.parametrize("twin", [AsyncioTransferQueue, BlockingTransferQueue])
def test_each_form_has_every_operation_of_the_trio_client_with_its_arguments(twin: type) -> None:
    operations = public_coroutines(TransferQueue)
    assert public_coroutines(twin) == operations
    for name in operations:
        assert inspect.signature(getattr(twin, name)) == inspect.signature(getattr(TransferQueue, name))


def test_each_form_connects_with_the_options_of_the_trio_client() -> None:
    known = set(inspect.signature(TransferQueue.connect).parameters) - {"address"}
    assert set(ConnectOptions.__annotations__) == known


def test_rows_pass_all_stages_and_are_committed_through_it(broker: BrokerProcess) -> None:
    async def main() -> None:
        async with AsyncioTransferQueue.connect(broker.address, name="loop") as queue:
            await queue.commit_version(await queue.begin_version(0, None), "digest")
            await queue.put(tasks(2), members=4)
            lease = await held(queue.lease("rollout", rows=8))
            await queue.write(lease, trajectories(lease))
            lease = await held(queue.lease("reward", rows=8))
            await queue.write(lease, reward_batch(lease.ids, [1.0] * 8, [{}] * 8))
            lease = await held(queue.lease("advantage", rows=8))
            await queue.write(lease, advantage_batch(lease.ids, [0.5] * 8))
            lease = await held(queue.lease("learn", rows=8, at_least=8, wait=5, step=1))
            await queue.commit(1, lease.ids)
            assert (await queue.statistics()).trained == 8
            with pytest.raises(UnknownName, match="nothing"):
                await queue.lease("nothing", rows=1)

    run(main())


def test_a_lease_that_is_cancelled_while_it_waits_leaves_nothing_leased(broker: BrokerProcess) -> None:
    async def main() -> None:
        async with AsyncioTransferQueue.connect(broker.address) as queue:
            await queue.commit_version(await queue.begin_version(0, None), "digest")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await queue.lease("rollout", rows=4, at_least=4, wait=30)
            await queue.put(tasks(1), members=4)
            assert len((await held(queue.lease("rollout", rows=4, at_least=4, wait=20))).ids) == 4

    run(main())


def test_rows_that_are_granted_as_their_task_is_cancelled_go_back(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment: the trio thread has the rows, the loop has not yet been told."""

    async def main() -> None:
        async with AsyncioTransferQueue.connect(broker.address) as queue:
            await queue.commit_version(await queue.begin_version(0, None), "digest")
            await queue.put(tasks(1), members=4)
            calls: list[Call[Any]] = []
            submit = queue.portal.submit
            monkeypatch.setattr(queue.portal, "submit", lambda *args: calls.append(submit(*args)) or calls[-1])
            waiting = asyncio.create_task(queue.lease("rollout", rows=4))
            await asyncio.sleep(0)
            # The loop is busy while the rows arrive.
            assert calls[0].result(20) is not None
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert len((await held(queue.lease("rollout", rows=4, at_least=4, wait=20))).ids) == 4

    run(main())


def test_an_operation_outlives_a_broker_that_is_killed_and_comes_back(broker: BrokerProcess) -> None:
    async def main() -> None:
        async with AsyncioTransferQueue.connect(broker.address) as queue:
            await queue.put(tasks(1), members=4)
            broker.kill()
            waiting = asyncio.create_task(queue.put(tasks(1, first=1), members=4))
            await asyncio.to_thread(broker.start)
            assert len((await waiting).rows) == 4
            assert (await queue.statistics()).waiting == 8

    run(main())


def test_a_broker_that_stays_away_is_named_when_the_deadline_is_over(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with AsyncioTransferQueue.connect(broker.address) as queue:
            broker.kill()
            monkeypatch.setattr(streamrl_queue.client, "PATIENCE_SECONDS", 0.3)
            with pytest.raises(DeadlineExceeded, match=f"LeaseRows from the queue at {broker.address}"):
                await queue.lease("rollout", rows=1)

    # Its heartbeat has met the same fate, or will: the block ends with that error, or with none.
    with contextlib.suppress(DeadlineExceeded):
        run(main())


def test_an_address_where_nobody_answers_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncioTransferQueue.connect(f"ipc://{tmp_path}/nobody", deadline=0.2):
            raise AssertionError("connected to nobody")

    with pytest.raises(DeadlineExceeded, match=r"from the queue at ipc://.*/nobody"):
        run(main())


def test_connecting_can_be_cancelled_and_leaves_no_thread(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with (
                asyncio.timeout(0.05) as limit,
                AsyncioTransferQueue.connect(f"ipc://{tmp_path}/nobody", deadline=10_000),
            ):
                raise AssertionError("connected to nobody")
        assert limit.expired()

    run(main())
    for thread in threading.enumerate():
        if thread.name == "streamrl-queue":
            thread.join(20)
            assert not thread.is_alive()


def test_an_error_in_the_background_reaches_whoever_waits_under_its_own_name(broker: BrokerProcess) -> None:
    async def fails() -> None:
        raise UnknownName("of a background task")

    async def main() -> None:
        async with AsyncioTransferQueue.connect(broker.address) as queue:
            waiting = asyncio.create_task(queue.lease("rollout", rows=1, wait=30))
            await queue.statistics()
            queue.portal.start_soon(fails)
            with pytest.raises(UnknownName, match="of a background task"):
                await waiting
            with pytest.raises(UnknownName, match="of a background task"):
                await queue.statistics()

    with pytest.raises(UnknownName, match="of a background task"):
        run(main())


def test_after_its_block_it_says_that_it_was_closed(broker: BrokerProcess) -> None:
    async def main() -> None:
        async with AsyncioTransferQueue.connect(broker.address) as queue:
            waiting = asyncio.create_task(queue.lease("rollout", rows=1, wait=30))
            await queue.statistics()
        for call in (waiting, queue.statistics()):
            with pytest.raises(QueueError, match="session was closed"):
                await call

    run(main())


def test_two_loops_in_two_threads_work_at_once_also_on_one_session(broker: BrokerProcess) -> None:
    async def put(queue: AsyncioTransferQueue, first: int) -> None:
        for n in range(10):
            await queue.put(tasks(1, first=first + n))

    async def own(first: int) -> None:
        async with AsyncioTransferQueue.connect(broker.address, name=f"loop-{first}") as queue:
            await put(queue, first)

    async def main() -> None:
        async with AsyncioTransferQueue.connect(broker.address) as shared, asyncio.TaskGroup() as group:
            group.create_task(put(shared, 0))
            group.create_task(asyncio.to_thread(run, put(shared, 10)))
            group.create_task(asyncio.to_thread(run, own(20)))
            group.create_task(own(30))
        async with AsyncioTransferQueue.connect(broker.address) as queue:
            assert (await queue.statistics()).waiting == 40

    run(main())


def test_a_session_whose_loop_has_ended_is_closed_and_holds_nothing(broker: BrokerProcess) -> None:
    connected: list[AsyncioTransferQueue] = []

    async def abandoned() -> None:
        async with AsyncioTransferQueue.connect(broker.address) as queue:
            await queue.commit_version(await queue.begin_version(0, None), "digest")
            await queue.put(tasks(1), members=4)
            await held(queue.lease("rollout", rows=4))
            connected.append(queue)
            await queue.lease("rollout", rows=1, wait=60)

    loop = asyncio.new_event_loop()
    left = abandoned()
    task = loop.create_task(left)

    async def until_connected() -> None:
        while not connected:
            await asyncio.sleep(0.01)

    loop.run_until_complete(until_connected())
    loop.close()
    left.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]

    async def main() -> None:
        with trio.fail_after(30):
            async with TransferQueue.connect(broker.address) as queue:
                lease = await queue.lease("rollout", rows=4, at_least=4, wait=20)
                assert lease is not None
                assert len(lease.ids) == 4

    trio.run(main)


def test_a_busy_loop_does_not_cost_the_session(broker: BrokerProcess) -> None:
    """The broker gives a session up after two seconds without a sign of life; nothing here waits for wall time."""

    async def main() -> None:
        async with AsyncioTransferQueue.connect(broker.address, name="busy") as queue:
            beats: list[int] = []
            beaten = threading.Event()
            ask = queue.aio._ask

            async def counted(request: Any, wait: float = 0.0) -> Any:
                reply = await ask(request, wait)
                beats.append(1)
                if len(beats) >= 2:
                    beaten.set()
                return reply

            queue.aio._ask = counted  # type: ignore[method-assign]
            # Blocks the loop itself.
            assert beaten.wait(30)
            assert "busy" in {member.name for member in (await queue.members()).members}

    run(main())
