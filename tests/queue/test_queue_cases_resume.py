"""Nothing is skipped and nothing repeated, however often and wherever a run is cut off."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import trio
from test_queue_broker import pass_all, publish, run, tasks

from streamrl_queue import QueueConfig, TransferQueue, open_broker, snapshot, training_flow, work_flow
from streamrl_queue.broker import Broker
from streamrl_queue.journal import EVENTS_PER_SEGMENT, Journal
from streamrl_queue.rows import Rows

FLOW = training_flow(QueueConfig(max_staleness=2), rows_per_step=2, min_group_members=1)


def test_after_a_stop_exactly_the_tasks_that_were_not_trained_are_left(tmp_path: Path) -> None:
    """Eight tasks, two a step, all rolled out at once; the run stops behind step 1 and its checkpoint."""

    async def first(path: Path) -> None:
        async with (
            open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            await queue.put(tasks(8), members=1)
            await publish(queue)
            await pass_all(queue)
            lease = await queue.lease("learn", rows=2, step=1)
            assert lease is not None
            await queue.commit(1, lease.ids)
            await queue.retire(1)
            # In flight for step 2, never committed.
            assert await queue.lease("learn", rows=2, step=2)

    async def second(path: Path) -> None:
        async with (
            open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            await queue.release_absent()
            await queue.reconcile(1)
            assert (await queue.statistics()).sources == {"tasks": 8}
            assert (await queue.put(tasks(8), members=1)).duplicates == 8
            trained: list[int] = []
            for step in (2, 3, 4):
                await publish(queue, step - 1)
                await pass_all(queue)
                lease = await queue.lease("learn", rows=2, at_least=2, step=step, wait=5)
                assert lease is not None
                await queue.commit(step, lease.ids)
                trained += lease.ids
            assert sorted(trained) == [3, 4, 5, 6, 7, 8]
            assert (await queue.statistics()).unfinished == 0

    run(first, tmp_path)
    run(second, tmp_path)


def test_the_bound_on_staleness_is_the_same_behind_a_resume(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        bound = 3 * 2
        for life in range(3):
            async with (
                open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock") as broker,
                TransferQueue.connect(broker.address) as queue,
            ):
                await queue.put(tasks(40), members=1)
                if life == 0:
                    await publish(queue)
                await queue.reconcile(0)
                await pass_all(queue)
                statistics = await queue.statistics()
                assert statistics.stages["learn"].ready == bound
                assert await queue.lease("rollout", rows=1) is None

    run(body, tmp_path)


def test_files_that_a_crash_left_half_written_are_passed_over(tmp_path: Path) -> None:
    async def put(path: Path) -> None:
        async with (
            open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock", segment_bytes=1 << 12) as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            for _ in range(10):
                await queue.put(pa.RecordBatch.from_pydict({"x": [bytes(1000)]}))

    run(put, tmp_path)
    newest = max((tmp_path / "j").glob("*.snapshot"))
    newest.with_name("99999999.draft").write_bytes(b"half a snaps")
    newest.write_bytes(newest.read_bytes()[:-7])
    (tmp_path / "j" / "99999998.segment").write_bytes(b"")

    async def count(path: Path) -> None:
        async with open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker:
            assert broker.rows.statistics().tasks == 10

    run(count, tmp_path)


def test_puts_without_keys_of_two_processes_are_two_puts_and_a_task_of_another_epoch_is_another_task(
    tmp_path: Path,
) -> None:
    async def body(path: Path) -> None:
        async with (
            open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address, name="worker") as one,
            TransferQueue.connect(broker.address, name="worker") as two,
        ):
            batch = pa.RecordBatch.from_pydict({"x": [1]})
            assert {(await queue.put(batch)).rows for queue in (one, two, one)} == {(1,), (2,), (3,)}
            again = [task.__class__(env=task.env, task=task.task, index=task.index, epoch=1) for task in tasks(1)]
            assert (await one.put(tasks(1))).duplicates == 0
            assert (await two.put(tasks(1))).duplicates == 1
            assert (await two.put(again)).duplicates == 0

    run(body, tmp_path)


def test_rows_of_one_environment_or_split_are_not_ready_for_those_who_asked_for_another(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with (
            open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            await publish(queue)
            await queue.put(tasks(2), members=1)
            assert await queue.lease("rollout", rows=1, where={"env": "another"}) is None
            await queue.put(tasks(2, start=10), members=1, split="eval")
            await pass_all(queue)
            evaluated = await queue.lease("evaluate", rows=9)
            trained = await queue.lease("learn", rows=2, step=1)
            assert evaluated is not None
            assert trained is not None
            assert {row.split for row in evaluated.rows} == {"eval"}
            assert {row.split for row in trained.rows} == {"train"}

    run(body, tmp_path)


def test_what_is_said_twice_counts_once(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with (
            open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            await queue.put(tasks(4), members=1)
            await publish(queue)
            await pass_all(queue)
            lease = await queue.lease("learn", rows=2, step=1)
            assert lease is not None
            for _ in range(2):
                await queue.commit(1, lease.ids)
            for _ in range(2):
                await queue.retire(1)
            assert await queue.end_rows("the run is over") == 2
            assert await queue.end_rows("the run is over") == 0
            statistics = await queue.statistics()
            statistics.check()
            assert (statistics.trained, statistics.dropped) == (2, {"the run is over": 2})

    run(body, tmp_path)


# -- recovery


def events_of(directory: Path) -> tuple[Rows, int]:
    """What a broker knows after it has started on a journal, and how many events it folded for that."""

    class Nobody:
        address = "nowhere"

    journal = Journal(directory, durability="flush", segment_bytes=1 << 16)
    broker = Broker(work_flow(), journal, Nobody(), clock=lambda: 0.0)  # type: ignore[arg-type]
    events = broker.recover()
    journal.close()
    return broker.rows, events


def test_recovery_folds_at_most_two_segments_of_events_however_long_the_journal_is(tmp_path: Path) -> None:
    """A snapshot is written when a segment is full and as much has happened as there are rows: here ten."""
    alive = 10

    async def body(path: Path) -> None:
        async with (
            open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock", segment_bytes=1 << 16) as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            for i in range(400):
                await queue.put(pa.RecordBatch.from_pydict({"x": [bytes(1000)]}))
                if i >= alive:
                    lease = await queue.lease("work", rows=1, payload=False)
                    assert lease is not None
                    await queue.write(lease, pa.RecordBatch.from_pydict({"row": pa.array(lease.ids, pa.uint64())}))
            most = max(segment.events for segment in broker.store.journal._segments.values())
            before = broker.rows.statistics()
            state = snapshot.dump(broker.rows)
        rows, events = events_of(path / "j")
        assert 0 < events <= alive + 2 * most < 3 * 400 / 2
        assert rows.statistics() == before
        assert snapshot.dump(rows) == state
        # The newest snapshot is damaged: the one before it lies as far back again.
        newest = max((path / "j").glob("*.snapshot"))
        newest.write_bytes(newest.read_bytes()[:-1])
        rows, events = events_of(path / "j")
        assert events <= 2 * (alive + 2 * most)
        assert rows.statistics() == before

    run(body, tmp_path)
    assert EVENTS_PER_SEGMENT <= 200_000


def test_a_broker_killed_at_any_record_stands_where_its_last_whole_record_left_it(tmp_path: Path) -> None:
    """The journal is cut off behind fifty random records; each time the broker has exactly their rows."""

    async def body(path: Path) -> None:
        async with (
            open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            for _ in range(20):
                await queue.put(pa.RecordBatch.from_pydict({"x": [0, 1]}))
                lease = await queue.lease("work", rows=1, payload=False)
                assert lease is not None
                await queue.write(lease, pa.RecordBatch.from_pydict({"row": pa.array(lease.ids, pa.uint64())}))
            end = broker.store.journal._segments[1].end
        data = (path / "j" / "00000001.segment").read_bytes()[:end]
        rng = random.Random(5)
        for cut in sorted(rng.randrange(1, end) for _ in range(50)):
            torn = path / f"cut{cut}"
            torn.mkdir(exist_ok=True)
            (torn / "00000001.segment").write_bytes(data[:cut])
            rows, events = events_of(torn)
            statistics = rows.statistics()
            statistics.check()
            # The first record says which stages there are.
            changes = max(events - 1, 0)
            assert statistics.tasks == 2 * -(-changes // 3)
            assert statistics.done == changes // 3

    run(body, tmp_path)


def flip(path: Path, mark: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(mark) + len(mark) // 2] ^= 1
    path.write_bytes(data)


def test_the_command_line_gives_damaged_rows_up_only_when_it_is_told_to(tmp_path: Path) -> None:
    async def put(path: Path) -> None:
        async with (
            open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            for letter in (b"a", b"b", b"c"):
                await queue.put(pa.RecordBatch.from_pydict({"x": [letter * 900]}))

    async def look(address: str) -> tuple[int, dict[str, int]]:
        async with TransferQueue.connect(address) as queue:
            statistics = await queue.statistics()
            lease = await queue.lease("work", rows=9)
            assert lease is not None
            assert lease.batch is not None
            assert lease.batch.column("x").to_pylist() == [b"a" * 900, b"c" * 900]
            return statistics.ready, statistics.dropped

    run(put, tmp_path)
    flip(tmp_path / "j" / "00000001.segment", b"b" * 900)
    command = [sys.executable, "-m", "streamrl.cli", "queue", "--bind", f"ipc://{tmp_path}/again.sock"]
    command += ["--dir", str(tmp_path / "j")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert "00000001.segment, byte" in refused.stderr
    assert "are damaged (Put of rows" in refused.stderr
    assert "recovery" in refused.stderr
    process = subprocess.Popen([*command, "--recovery", "skip"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().decode().split("queue at ")[1].split(",")[0]
        assert trio.run(look, address) == (2, {"journal_damage": 1})
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("wait", [0.0, 0.3])
def test_a_put_past_its_deadline_says_what_is_full(wait: float, tmp_path: Path) -> None:
    from streamrl_queue.errors import QueueFull

    async def body(path: Path) -> None:
        flow = training_flow(QueueConfig(waiting_rows=4), rows_per_step=2, min_group_members=1)
        async with (
            open_broker(flow, path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            await queue.put(tasks(4), members=1)
            with pytest.raises(QueueFull, match=rf"4 of 4 rows wait .* {wait:.1f} s made no room for 1 more rows"):
                await queue.put(tasks(1, start=9), members=1, wait=wait)

    run(body, tmp_path)
