"""What processes tell of their waiting, and who holds which rows."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
from test_queue_broker import pass_all, publish, tasks, trajectory

from streamrl_queue import Broker, QueueConfig, TransferQueue, messages, open_broker, training_flow
from streamrl_queue.nursery import run as run_trio
from streamrl_queue.schema import trajectory_batch
from streamrl_queue.waits import MOST_TOLD, Waiting, Waits


@asynccontextmanager
async def serving(path: Path, config: QueueConfig | None = None) -> AsyncIterator[tuple[Broker, TransferQueue]]:
    flow = training_flow(config or QueueConfig(), rows_per_step=4)
    async with (
        open_broker(flow, path / "journal", bind=f"ipc://{path}/q") as broker,
        TransferQueue.connect(broker.address, name="worker-0", role="worker") as queue,
    ):
        yield broker, queue


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_an_entry_lasts_as_long_as_its_block_and_says_where_it_has_come_to() -> None:
    waits = Waits(Clock())
    with waits.waiting("plays", row=7) as wait:
        assert waits.longest() == (Waiting("plays", 1.0, 7),)
        wait.at("turn 2", on="engine")
        assert waits.longest() == (Waiting("turn 2", 2.0, 7, "engine"),)
    wait.at("too late")
    assert waits.longest() == ()


def test_the_entries_that_last_longest_are_told() -> None:
    waits, entered = Waits(Clock()), []
    for row in range(1, 3 * MOST_TOLD):
        manager = waits.waiting("plays", row=row)
        entered.append((manager, manager.__enter__()))
    entered[0][1].at("turn 2")  # the first to come is now the last
    assert [w.row for w in waits.longest()] == list(range(2, MOST_TOLD + 2))


def test_threads_may_open_entries_while_others_are_told() -> None:
    waits, over = Waits(Clock()), threading.Event()

    def work() -> None:
        while not over.is_set():
            with waits.waiting("plays"):
                pass

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(2000):
        assert len(waits.longest()) <= len(threads)
    over.set()
    for thread in threads:
        thread.join()


async def told(queue: TransferQueue, name: str) -> tuple[Waiting, ...]:
    """The waits of a member, once a heartbeat has brought some."""
    with trio.fail_after(10):
        while True:
            members = (await queue.members()).members
            if waits := next(m.waits for m in members if m.name == name):
                return waits
            await trio.lowlevel.checkpoint()


def test_members_show_what_each_process_waits_for(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (_, queue):
            with queue.waiting("tool `search`", row=3) as wait:
                wait.at("turn 2", on="engine")
                (seen,) = await told(queue, "worker-0")
            assert (seen.what, seen.row, seen.on) == ("turn 2", 3, "engine")

    run_trio(body)


def test_the_rows_held_longest_are_told_with_holder_group_and_members(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (broker, queue):
            await publish(queue)
            await queue.put(tasks(3), members=2)
            done, *_ = [await queue.lease("rollout", rows=2, wait=1) for _ in range(3)]
            assert done is not None
            await queue.write(done, trajectory_batch(done.ids[:1], [trajectory()]))
            leased = await queue.leased(most=3)
            assert [(r.row, r.group, r.member, r.behind) for r in leased.rows] == [
                (2, 1, 1, 1),
                (3, 2, 0, 2),
                (4, 2, 1, 2),
            ]
            assert {(r.stage, r.holder, r.members) for r in leased.rows} == {("rollout", "worker-0", 2)}
            assert all(r.since is not None for r in leased.rows)
            assert leased.full == ""
            assert [r.row for r in (await queue.leased([6, 1, 99], most=1)).rows] == [2, 6]
            assert broker.rows.statistics().leased == 5

    run_trio(body)


def test_rows_in_the_learners_hands_hold_nobody_up(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (broker, queue):
            await publish(queue)
            await queue.put(tasks(1), members=2)
            await pass_all(queue)
            assert await queue.lease("learn", rows=4, step=1, wait=1)
            assert (await queue.leased([1, 2])).rows == ()
            assert broker.rows.statistics().leased == 2

    run_trio(body)


def test_a_put_that_waits_is_told_with_its_reason(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path, QueueConfig(waiting_rows=4)) as (broker, queue):
            await queue.put(tasks(4))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(queue.put, tasks(1, start=9))
                with trio.fail_after(10):
                    while not any(isinstance(w, messages.PutTasks) for w in broker.waiting):
                        await trio.lowlevel.checkpoint()
                assert (await queue.leased()).full == "4 of 4 rows wait to be rolled out (queue.waiting_rows)"
                nursery.cancel_scope.cancel()

    run_trio(body)


def test_a_heartbeat_without_waits_is_still_understood() -> None:
    body = msgspec.msgpack.encode({"type": "Heartbeat", "activity": "works", "since": 1.0, "gauges": {}})
    assert msgspec.msgpack.decode(body, type=messages.Request) == messages.Heartbeat("works", 1.0, {})


@pytest.mark.parametrize("most", [0, -1])
def test_no_rows_cannot_be_asked_for(tmp_path: Path, most: int) -> None:
    body = msgspec.msgpack.encode({"type": "GetLeased", "rows": [], "most": most})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=messages.Request)
