"""Columns read in place: the same as those that travel, checked by their reader, valid as long as somebody looks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import trio

from streamrl_queue import Broker, Flow, Stage, TransferQueue, messages, open_broker
from streamrl_queue.errors import JournalError, SchemaError
from streamrl_queue.nursery import run as run_trio
from streamrl_queue.schema import arrays

FLOW = Flow(
    stages=(
        Stage(name="score", reads=("ids", "text"), writes=("points",)),
        Stage(name="use", reads=("ids", "weights", "text", "points")),
    )
)


def batch(n: int, start: int = 0) -> pa.RecordBatch:
    rng = np.random.default_rng(start)
    lengths = rng.integers(1, 400, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = pa.LargeListArray.from_arrays(offsets, pa.array(rng.integers(0, 1000, offsets[-1]), pa.int32()))
    weights = pa.LargeListArray.from_arrays(offsets, pa.array(rng.standard_normal(offsets[-1]), pa.float32()))
    return pa.RecordBatch.from_pydict({"ids": ids, "weights": weights, "text": [f"row {start + i}" for i in range(n)]})


def points(rows: pa.RecordBatch) -> pa.RecordBatch:
    lengths = [float(len(ids)) for ids in arrays(rows.column("ids"))]
    return pa.RecordBatch.from_pydict({"row": rows.column("row"), "points": lengths})


@asynccontextmanager
async def both(path: Path, segment_bytes: int = 64 << 20) -> AsyncIterator[SimpleNamespace]:
    """A broker, a client that reads in place, and one to which columns travel."""
    async with (
        open_broker(FLOW, path / "journal", bind=f"ipc://{path}/q", segment_bytes=segment_bytes) as broker,
        TransferQueue.connect(broker.address, name="near") as near,
        TransferQueue.connect(broker.address, name="far", mapped=False) as far,
    ):
        yield SimpleNamespace(broker=broker, near=near, far=far)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(30.0):
            await test()

    run_trio(bounded)


def maps(queue: TransferQueue) -> bool:
    return queue._journal is not None


def test_rows_read_in_place_equal_those_that_travel(tmp_path: Path) -> None:
    async def test() -> None:
        async with both(tmp_path) as q:
            assert maps(q.near)
            assert not maps(q.far)
            await q.near.put(batch(7))
            await q.far.put(batch(9, start=7))
            lease = await q.near.lease("score", rows=5)
            await q.near.write(lease, points(lease.batch))
            lease = await q.far.lease("score", rows=11)
            await q.far.write(lease, points(lease.batch))
            order = [12, 3, 7, 1, 16, 4]
            here = await q.near.fetch(order, ["text", "points", "ids"])
            there = await q.far.fetch(order, ["text", "points", "ids"])
            assert here.equals(there)
            assert here.column("text").to_pylist() == [f"row {row - 1}" for row in order]
            lease = await q.near.lease("use", rows=16)
            expected = pa.concat_batches([batch(7), batch(9, start=7)])
            assert lease.batch.select(["ids", "weights", "text"]).equals(expected)

    run(test)


def test_what_a_reader_holds_stays_whole_after_its_segment_is_deleted(tmp_path: Path) -> None:
    async def test() -> None:
        async with both(tmp_path, segment_bytes=1 << 14) as q:
            await q.near.put(batch(4))
            held = (await q.near.fetch([1, 2, 3, 4], ["ids", "weights", "text"])).select(["ids", "weights", "text"])
            for start in range(4, 64, 4):
                await q.near.put(batch(4, start=start))
                for stage in ("score", "use"):
                    lease = await q.near.lease(stage, rows=4)
                    done = points(lease.batch) if stage == "score" else lease.batch.select(["row"])
                    await q.near.write(lease, done)
            await q.near.statistics()
            assert not (tmp_path / "journal" / "00000001.segment").exists()
            assert held.equals(batch(4))

    run(test)


def damage(broker: Broker, path: Path) -> None:
    """Flip a bit of the first row's columns on the disk."""
    start, length, _ = broker.store.journal.place(broker.rows.rows[1].places[""].record)
    segment = path / "journal" / "00000001.segment"
    with segment.open("r+b") as file:
        file.seek(start + length // 2)
        byte = file.read(1)[0]
        file.seek(start + length // 2)
        file.write(bytes([byte ^ 1]))


def test_a_reader_refuses_columns_that_are_not_what_was_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with both(tmp_path) as q:
            await q.near.put(batch(3))
            await q.far.fetch([1], ["text"])
            damage(q.broker, tmp_path)
            with pytest.raises(JournalError, match=r"00000001\.segment, byte \d+ are damaged; their rows were dropped"):
                await q.near.fetch([1], ["text"])
            assert "is not what the broker means; columns travel from now on" in caplog.text
            assert (await q.near.statistics()).dropped == {"journal_damage": 3}

    run(test)


def test_columns_travel_when_the_files_cannot_be_read_from_here(tmp_path: Path) -> None:
    async def test() -> None:
        async with both(tmp_path) as q:
            await q.near.put(batch(3))
            (tmp_path / "journal").rename(tmp_path / "elsewhere")
            lease = await q.near.lease("score", rows=3)
            assert not maps(q.near)
            assert lease.batch.column("text").to_pylist() == ["row 0", "row 1", "row 2"]
            (tmp_path / "elsewhere").rename(tmp_path / "journal")

    run(test)


def test_a_record_put_by_a_client_far_away_and_one_moved_are_read_in_place(tmp_path: Path) -> None:
    async def test() -> None:
        async with both(tmp_path, segment_bytes=1 << 15) as q:
            await q.far.put(batch(2))
            expected = batch(2)
            for start in range(2, 62, 4):
                await q.far.put(batch(4, start=start))
                rows = await q.near.lease("score", rows=4, where=None)
                await q.near.drop(rows, [row for row in rows.ids if row > 2], reason="test")
                if kept := [row for row in rows.ids if row <= 2]:
                    await q.near.release(rows, kept)
            first = q.broker.rows.rows[1].places[""].record >> 32
            assert first > 1, "moved out of its first segment"
            found = await q.near.fetch([1, 2], ["ids", "weights", "text"])
            assert maps(q.near)
            assert found.select(["ids", "weights", "text"]).equals(expected)

    run(test)


def test_a_queue_alone_gives_no_meaning_to_the_names_of_columns(tmp_path: Path) -> None:
    """`reward`, `tokens` or `logprobs` may be of any type where no row is trained; `env` is the queue's own."""

    async def test() -> None:
        async with both(tmp_path) as q:
            strange = {
                "ids": [[1]],
                "weights": [[1.0]],
                "text": ["a"],
                "tokens": ["x"],
                "logprobs": [1],
                "reward": [None],
            }
            await q.near.put(pa.RecordBatch.from_pydict({**strange, "versions": [2.5]}))
            lease = await q.near.lease("score", rows=1, columns=["tokens", "logprobs", "reward", "versions"])
            assert lease.batch.column("tokens").to_pylist() == ["x"]
            for env in ([1], [None]):
                with pytest.raises(SchemaError, match="put: column env: expected strings without nulls"):
                    await q.near.put(pa.RecordBatch.from_pydict({**strange, "env": env}))

    run(test)


def test_a_lease_that_is_given_up_while_its_columns_travel_after_all_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with both(tmp_path) as q:
            await q.near.put(batch(3))

            def unreadable(part: object) -> pa.RecordBatch:
                raise JournalError("cannot map it")

            monkeypatch.setattr(q.near._journal, "read", unreadable)
            asked = trio.Event()
            # The broker does not come to answer.
            q.broker._handlers[messages.Fetch] = lambda _: asked.set()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(q.near.lease, "score", rows=3))
                await asked.wait()
                assert q.broker.rows.leases
                nursery.cancel_scope.cancel()
            while q.broker.rows.leases:
                await trio.sleep(0.01)

    run(test)
