"""Small puts of one process leave together, and yet each caller sees its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
import trio
import trio.testing

from streamrl_queue import Broker, TransferQueue, audit, open_broker, work_flow
from streamrl_queue import events as e
from streamrl_queue.errors import QueueFull, SchemaError
from streamrl_queue.messages import Receipt
from streamrl_queue.nursery import open_nursery


@asynccontextmanager
async def begun(path: Path, waiting_rows: int = 4096) -> AsyncIterator[tuple[Broker, TransferQueue]]:
    flow = msgspec.structs.replace(work_flow(), waiting_rows=waiting_rows)
    async with (
        open_broker(flow, path / "j", bind=f"ipc://{path}/q.sock") as broker,
        TransferQueue.connect(broker.address) as queue,
    ):
        yield broker, queue


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        with trio.fail_after(30):
            await test()

    trio.run(within)


def lines(*values: object) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"x": list(values)})


def puts(path: Path) -> list[e.Put]:
    return [event for event, _, _ in audit.events(path / "j") if isinstance(event, e.Put)]


async def all_at_once(queue: TransferQueue, count: int) -> dict[int, Receipt]:
    """One put of one line each, as from so many episodes."""
    receipts: dict[int, Receipt] = {}

    async def put(value: int) -> None:
        receipts[value] = await queue.put(lines(value))

    async with open_nursery() as nursery:
        for value in range(count):
            nursery.start_soon(put, value)
    return receipts


def test_puts_at_the_same_time_cost_a_message_or_two_and_everybody_gets_its_own_rows(tmp_path: Path) -> None:
    async def test() -> None:
        async with begun(tmp_path) as (_, queue):
            receipts = await all_at_once(queue, 100)
            lease = await queue.lease("work", rows=100, at_least=100, wait=10.0)
            assert lease is not None
            assert lease.batch is not None
            told = {value: receipt.rows for value, receipt in receipts.items()}
            held = dict(zip(lease.batch.column("x").to_pylist(), lease.ids, strict=True))
            assert told == {value: (row,) for value, row in held.items()}
            assert all(receipt.duplicates == 0 for receipt in receipts.values())

    run(test)
    assert len(puts(tmp_path)) == 2, "the first left alone, the others behind it together"


def test_a_put_after_the_other_is_not_held_up(tmp_path: Path) -> None:
    async def test() -> None:
        async with begun(tmp_path) as (_, queue):
            for value in range(3):
                await queue.put(lines(value))

    run(test)
    assert [len(put.keys) for put in puts(tmp_path)] == [1, 1, 1]


def test_what_is_wrong_with_one_is_told_to_its_caller_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with begun(tmp_path) as (_, queue):
            failed: list[int] = []
            stored: list[int] = []

            async def put(number: int, env: str | None) -> None:
                batch = pa.RecordBatch.from_arrays([pa.array([env], pa.string())], names=["env"])
                try:
                    receipt = await queue.put(batch)
                except SchemaError:
                    failed.append(number)
                else:
                    stored.extend(receipt.rows)

            async with open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(put, number, None if number == 7 else "e")
            assert failed == [7]
            assert len(set(stored)) == 19
            assert (await queue.statistics()).tasks == 19

    run(test)


def test_a_repeated_key_is_told_to_who_repeated_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with begun(tmp_path) as (_, queue):
            before = await queue.put(lines(0), keys=["old"])
            receipts: dict[str, Receipt] = {}

            async def put(name: str, keys: list[str]) -> None:
                receipts[name] = await queue.put(lines(*range(len(keys))), keys=keys, members=2)

            async with open_nursery() as nursery:
                nursery.start_soon(put, "first", ["a"])
                nursery.start_soon(put, "new", ["b", "c"])
                nursery.start_soon(put, "again", ["d", "b"])
            duplicates = {name: receipt.duplicates for name, receipt in receipts.items()}
            assert duplicates["first"] == 0
            assert duplicates["new"] + duplicates["again"] == 1, "whichever came second"
            assert all(len(receipt.rows) == 2 * (1 if name == "first" else 2) for name, receipt in receipts.items())
            b = receipts["new"].rows[:2]
            assert receipts["again"].rows[2:] == b
            assert (await queue.put(lines(0), keys=["old"])).rows == before.rows

    run(test)


def test_where_there_is_no_room_for_all_those_that_fit_are_stored(tmp_path: Path) -> None:
    async def test() -> None:
        async with begun(tmp_path, waiting_rows=5) as (_, queue):
            outcomes: list[bool] = []

            async def put(value: int) -> None:
                try:
                    await queue.put(lines(value, value), wait=0.3)
                except QueueFull:
                    outcomes.append(False)
                else:
                    outcomes.append(True)

            async with open_nursery() as nursery:
                for value in range(4):
                    nursery.start_soon(put, value)
            assert sorted(outcomes) == [False, False, True, True]

    run(test)


def test_each_waits_for_room_no_longer_than_it_said(tmp_path: Path) -> None:
    async def test() -> None:
        async with begun(tmp_path, waiting_rows=1) as (broker, queue):
            await queue.put(lines(0))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(queue.put, lines(1))
                while not broker._waiting:
                    await trio.sleep(0.01)
                with pytest.raises(QueueFull):
                    await queue.put(lines(2), wait=0.1)
                nursery.cancel_scope.cancel()

    run(test)


def test_the_end_of_one_caller_is_not_the_others(tmp_path: Path) -> None:
    """The put that all wait for is given up while it waits for room; and so is one of those behind it."""

    async def test() -> None:
        async with begun(tmp_path, waiting_rows=2) as (broker, queue):
            await queue.put(lines(0, 0))
            scopes = [trio.CancelScope() for _ in range(4)]
            stored: list[int] = []

            async def put(value: int) -> None:
                with scopes[value]:
                    await queue.put(lines(value))
                    stored.append(value)

            async with open_nursery() as nursery:
                nursery.start_soon(put, 0)
                while not broker._waiting:
                    await trio.sleep(0.01)
                for value in (1, 2, 3):
                    nursery.start_soon(put, value)
                await trio.testing.wait_all_tasks_blocked()
                scopes[2].cancel()
                scopes[0].cancel()
                while [len(asked.request.keys) for asked in broker._waiting] != [2]:
                    await trio.sleep(0.01)
                lease = await queue.lease("work", rows=2)
                assert lease is not None
                await queue.drop(lease, reason="done with")
            assert sorted(stored) == [1, 3]
            assert (await queue.statistics()).tasks == 4

    run(test)


def test_different_columns_never_leave_together(tmp_path: Path) -> None:
    async def test() -> None:
        async with begun(tmp_path) as (_, queue), open_nursery() as nursery:
            for value in range(10):
                nursery.start_soon(queue.put, lines(value))
                nursery.start_soon(queue.put, lines(str(value)))
                nursery.start_soon(queue.put, pa.RecordBatch.from_pydict({"y": [value]}))

    run(test)
    assert sum(len(put.keys) for put in puts(tmp_path)) == 30
