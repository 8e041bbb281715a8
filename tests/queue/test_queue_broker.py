"""The broker and its clients, over real sockets; where it says so, with real processes and real kills."""

from __future__ import annotations

import pickle
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import trio
import trio.testing
import zmq
from queue_process import running

from streamrl_queue import (
    BlockingTransferQueue,
    Broker,
    QueueConfig,
    Segment,
    Span,
    Task,
    Trajectory,
    TransferQueue,
    messages,
    open_broker,
    schema,
    training_flow,
    wire,
    work_flow,
)
from streamrl_queue.batches import encode
from streamrl_queue.errors import (
    AddressError,
    DeadlineExceeded,
    LeaseExpired,
    QueueFull,
    RewardError,
    SchemaError,
    StreamRLError,
    UnknownName,
)
from streamrl_queue.nursery import open_nursery
from streamrl_queue.nursery import run as run_trio

FLOW = training_flow(QueueConfig(max_staleness=2, session_seconds=0.5, waiting_rows=64), rows_per_step=8)


def run(test: Callable[[Path], object], path: Path, seconds: float = 30.0) -> None:
    async def bounded() -> None:
        with trio.fail_after(seconds):
            await test(path)  # type: ignore[misc]

    run_trio(bounded)


@asynccontextmanager
async def queue_at(path: Path) -> AsyncIterator[tuple[Broker, TransferQueue]]:
    async with (
        open_broker(FLOW, path / "journal", bind=f"ipc://{path}/q.sock") as broker,
        TransferQueue.connect(broker.address, name="tester") as queue,
    ):
        yield broker, queue


def tasks(n: int, start: int = 0) -> list[Task]:
    return [Task(env="e", task={"i": i}, index=i) for i in range(start, start + n)]


def trajectory(version: int = 1, length: int = 5) -> Trajectory:
    return Trajectory(
        tokens=np.arange(length, dtype=np.int32),
        mask=np.array([0] + [1] * (length - 1), np.uint8),
        logprobs=np.array([np.nan] + [-1.0] * (length - 1), np.float32),
        versions=(Span(1, version, version),),
        segments=(Segment(0, length),),
        turns=1,
        status="completed",
        sampling={"temperature": 1.0},
        outcome=1.0,
    )


async def publish(queue: TransferQueue, step: int = 0) -> int:
    version = await queue.begin_version(step, None)
    await queue.commit_version(version, f"digest-{version}")
    return version


async def pass_all(queue: TransferQueue) -> None:
    """Roll out, score and compare whatever is ready."""
    while lease := await queue.lease("rollout", rows=100):
        await queue.write(lease, schema.trajectory_batch(lease.ids, [trajectory(lease.version)] * len(lease.ids)))
    while lease := await queue.lease("reward", rows=100):
        await queue.write(lease, schema.reward_batch(lease.ids, [1.0] * len(lease.ids), [{}] * len(lease.ids)))
    while lease := await queue.lease("advantage", rows=100):
        await queue.write(lease, schema.advantage_batch(lease.ids, [0.5] * len(lease.ids)))


def test_a_row_gains_the_columns_of_every_stage_and_is_trained(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (_, queue):
            await queue.put(tasks(2), members=4)
            await publish(queue)
            await pass_all(queue)
            lease = await queue.lease("learn", rows=100, step=1)
            assert lease is not None
            assert lease.batch is not None
            assert lease.batch.column("row").to_pylist() == list(lease.ids)
            assert lease.batch.column("tokens").to_pylist() == [[0, 1, 2, 3, 4]] * 8
            assert lease.batch.column("advantage").to_pylist() == [0.5] * 8
            assert schema.spans(lease.batch.column("versions"))[0] == (Span(1, 1, 1),)
            await queue.commit(1, lease.ids)
            await queue.commit(1, lease.ids)
            await queue.retire(1)
            statistics = await queue.statistics()
            statistics.check()
            assert statistics.trained == 8

    run(body, tmp_path)


def test_the_payload_of_a_row_is_what_its_writer_wrote_in_any_batching(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (_, queue):
            await queue.put(tasks(3), members=4)
            await publish(queue)
            lease = await queue.lease("rollout", rows=100)
            assert lease is not None
            order = list(lease.ids)
            random.Random(0).shuffle(order)
            for chunk in (order[:1], order[1:4], order[4:]):
                rows = [trajectory(1, length=row + 2) for row in chunk]
                await queue.write(lease, schema.trajectory_batch(chunk, rows))
            wanted = order[::-2]
            batch = await queue.fetch(wanted, ["tokens", "task", "status"])
            assert batch.column("row").to_pylist() == wanted
            assert [len(tokens) for tokens in batch.column("tokens").to_pylist()] == [row + 2 for row in wanted]
            assert batch.column("task").to_pylist() == [b'{"i":%d}' % ((row - 1) // 4) for row in wanted]

    run(body, tmp_path)


def test_a_waiting_lease_gets_rows_when_they_come_and_holds_up_nobody(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (_, queue), open_nursery() as nursery:
            await publish(queue)
            got: list[int] = []

            async def wait_for_rows() -> None:
                lease = await queue.lease("rollout", rows=8, wait=20)
                assert lease is not None
                got.extend(lease.ids)

            nursery.start_soon(wait_for_rows)
            await trio.testing.wait_all_tasks_blocked(0.05)
            with trio.fail_after(2):
                await queue.statistics()
                await queue.put(tasks(1), members=4)
            while not got:
                await trio.sleep(0.01)
            assert got == [1, 2, 3, 4]

    run(body, tmp_path)


def test_a_lease_that_finds_nothing_in_time_is_none(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (_, queue):
            started = trio.current_time()
            assert await queue.lease("reward", rows=8, wait=0.2) is None
            assert 0.15 < trio.current_time() - started < 5

    run(body, tmp_path)


def test_rows_granted_to_a_request_that_was_given_up_go_back(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (broker, queue), TransferQueue.connect(broker.address, name="other") as other:
            await publish(queue)
            with trio.move_on_after(0.1):
                await queue.lease("rollout", rows=8, wait=20)
            while broker._waiting:
                await trio.sleep(0.01)
            await other.put(tasks(1), members=4)
            lease = await other.lease("rollout", rows=8)
            assert lease is not None
            assert [row.attempt for row in lease.rows] == [1] * 4

    run(body, tmp_path)


def test_a_full_queue_blocks_to_the_deadline_and_then_names_the_figures(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (_, queue):
            await queue.put(tasks(16), members=4)
            with pytest.raises(QueueFull, match="64 of 64 rows wait"):
                await queue.put(tasks(1, start=16), members=4, wait=0.2)
            assert (await queue.statistics()).tasks == 64
            await publish(queue)
            async with open_nursery() as nursery:
                nursery.start_soon(lambda: queue.put(tasks(1, start=16), members=4, wait=20))
                await trio.testing.wait_all_tasks_blocked(0.05)
                await queue.lease("rollout", rows=4)
            assert (await queue.statistics()).tasks == 68
            with pytest.raises(QueueFull, match="can never fit"):
                await queue.put(tasks(20, start=100), members=4)

    run(body, tmp_path)


def test_a_byte_budget_holds_puts_back_until_rows_leave(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        flow = msgspec.structs.replace(work_flow(), budget_bytes=1 << 20)
        blob = pa.RecordBatch.from_pydict({"blob": [bytes(300_000)]})
        async with (
            open_broker(flow, path / "j", bind=f"ipc://{path}/q.sock", segment_bytes=1 << 20) as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            for _ in range(3):
                await queue.put(blob)
            with pytest.raises(QueueFull, match=r"0\.9 of 1\.0 MiB are taken by rows"):
                await queue.put(blob, wait=0.1)
            async with open_nursery() as nursery:
                nursery.start_soon(lambda: queue.put(blob, wait=20))
                await trio.testing.wait_all_tasks_blocked(0.05)
                lease = await queue.lease("work", rows=1, columns=["blob"])
                assert lease is not None
                assert lease.batch is not None
                await queue.write(lease, lease.batch.select(["row"]))
            assert (await queue.statistics()).tasks == 4

    run(body, tmp_path)


def test_many_times_the_budget_passes_through_a_journal_that_stays_small(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        flow = msgspec.structs.replace(work_flow(), budget_bytes=2 << 20)
        batch = pa.RecordBatch.from_pydict({"blob": [bytes(100_000)] * 4})
        async with (
            open_broker(flow, path / "j", bind=f"ipc://{path}/q.sock", segment_bytes=1 << 20) as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            kept = await queue.put(batch)
            held = await queue.lease("work", rows=1)
            assert held is not None
            for _ in range(50):
                await queue.put(batch)
                while lease := await queue.lease("work", rows=4, payload=False):
                    await queue.write(lease, pa.RecordBatch.from_pydict({"row": pa.array(lease.ids, pa.uint64())}))
            assert sum(file.stat().st_size for file in (path / "j").iterdir()) < 8 << 20
            # What is still needed was moved to the end of the journal, whole.
            again = await queue.fetch(held.ids, ["blob"])
            assert again.column("blob").to_pylist() == [bytes(100_000)]
            assert held.ids[0] in kept.rows
        async with open_broker(flow, path / "j", bind=f"ipc://{path}/q.sock", segment_bytes=1 << 20) as broker:
            statistics = broker.rows.statistics()
            statistics.check()
            assert (statistics.tasks, statistics.ready, statistics.done) == (204, 1, 203)
            assert bytes(broker.store.journal.payload(broker.rows.rows[held.ids[0]].places[""].record))

    run(body, tmp_path)


def test_a_session_without_heartbeat_loses_its_leases(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (broker, queue):
            await queue.put(tasks(1), members=4)
            await publish(queue)
            async with TransferQueue.connect(broker.address, name="mute") as mute:
                lease = await mute.lease("rollout", rows=4)
                assert lease is not None
                broker.sessions._deadlines[mute.session] = 0.0
                again = await queue.lease("rollout", rows=4, wait=10)
                assert again is not None
                assert again.ids == lease.ids
                assert [row.attempt for row in again.rows] == [2] * 4
                with pytest.raises(LeaseExpired):
                    await mute.write(lease, schema.trajectory_batch(lease.ids, [trajectory()] * 4))

    run(body, tmp_path)


def test_a_supervisor_ends_the_session_of_a_dead_process_at_once(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (broker, queue):
            await queue.put(tasks(1), members=4)
            await publish(queue)
            async with TransferQueue.connect(broker.address, name="victim") as victim:
                assert await victim.lease("rollout", rows=3)
                assert await queue.end_session("victim") == 3
                lease = await queue.lease("rollout", rows=4)
                assert lease is not None
                assert len(lease.ids) == 4

    run(body, tmp_path)


def test_bad_columns_are_refused_by_name_and_the_lease_goes_on(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (_, queue):
            await queue.put(tasks(1), members=4)
            await publish(queue)
            lease = await queue.lease("rollout", rows=4)
            assert lease is not None
            with pytest.raises(SchemaError, match="missing column"):
                await queue.write(lease, pa.RecordBatch.from_pydict({"row": pa.array(lease.ids, pa.uint64())}))
            good = schema.trajectory_batch(lease.ids, [trajectory()] * 4)
            wrong = good.set_column(good.schema.get_field_index("turns"), "turns", pa.array([1.0] * 4))
            with pytest.raises(SchemaError, match="turns: expected int32, got double"):
                await queue.write(lease, wrong)
            with pytest.raises(SchemaError, match="does not write reward"):
                await queue.write(lease, good.append_column("reward", pa.array([1.0] * 4)))
            await queue.write(lease, good)
            reward = await queue.lease("reward", rows=4)
            assert reward is not None
            batch = schema.reward_batch(reward.ids, [1.0] * 4, [{}] * 4)
            nan = batch.set_column(1, "reward", pa.array([1.0, float("nan"), 1.0, 1.0]))
            with pytest.raises(RewardError, match="expected a finite float, got nan"):
                await queue.write(reward, nan)
            await queue.write(reward, batch)
            with pytest.raises(UnknownName, match="the stages are rollout"):
                await queue.lease("rolout", rows=1)

    run(body, tmp_path)


DAMAGED = 2000


def send_damaged(stranger: zmq.Socket[bytes]) -> None:
    """Messages with one flipped bit each, a pickle, and a request of another protocol."""
    honest = [bytes(frame) for frame in wire.seal("x", 1, messages.Hello("x", "x"), b"payload", None)]
    rng = random.Random(1)
    for _ in range(DAMAGED):
        frames = list(honest)
        i = rng.randrange(len(frames))
        damaged = bytearray(frames[i])
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        frames[i] = bytes(damaged)
        stranger.send_multipart(frames)
    stranger.send_multipart([pickle.dumps({"a": 1})])
    stranger.send_multipart([b"GET / HTTP/1.1\r\n\r\n", b"", b"", b""])


def test_foreign_and_damaged_bytes_are_dropped_and_service_goes_on(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (broker, queue):
            stranger = zmq.Context.instance().socket(zmq.DEALER)
            stranger.connect(broker.address)
            await trio.to_thread.run_sync(send_damaged, stranger)
            await queue.put(tasks(1), members=1)
            assert (await queue.statistics()).tasks == 1
            assert len((await queue.members()).members) == 1
            while broker.protocol_errors < DAMAGED + 2:
                await queue.statistics()
            assert broker.protocol_errors == DAMAGED + 2
            stranger.close()

    run(body, tmp_path)


def test_a_request_that_cannot_work_is_refused_and_neither_kills_the_broker_nor_is_recorded(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (broker, queue):
            with pytest.raises(SchemaError, match="members: expected 1 to 65535"):
                await queue.put(tasks(1), members=0)
            absurd = (
                messages.PutTasks(("a",), 0, "train", 0, {}, 0.0),
                messages.PutTasks(("a",), -3, "train", 0, {}, float("nan")),
                messages.LeaseRows("rollout", 0, 1, 0.0, None, None, True, None),
            )
            for request in absurd:
                with pytest.raises(StreamRLError):
                    await queue._rpc.exchange(request, encode(schema.task_batch(tasks(1))), deadline=5)
            for wait in (float("nan"), float("-inf"), -1.0):
                with pytest.raises(ValueError, match="wait: expected 0 or more seconds"):
                    await queue.lease("rollout", rows=1, wait=wait)
                ask = messages.LeaseRows("rollout", 1, 1, wait, None, None, True, None)
                assert (await queue._rpc.call(ask, deadline=5)).rows == ()
            assert (await queue.statistics()).tasks == 0
            assert broker.protocol_errors == 0
        async with open_broker(FLOW, path / "journal", bind=f"ipc://{path}/q.sock") as again:
            assert again.rows.statistics().tasks == 0

    run(body, tmp_path)


def test_payloads_with_flipped_bits_under_a_good_digest_are_refused_as_schema_errors(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (_, queue):
            honest = encode(schema.task_batch(tasks(3))).to_pybytes()
            rng = random.Random(2)
            outcomes = {"stored": 0, "refused": 0}
            for number in range(400):
                damaged = bytearray(honest)
                for _ in range(rng.randint(1, 3)):
                    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
                ask = messages.PutTasks((f"{number}/a", f"{number}/b", f"{number}/c"), 1, "eval", 0, {}, 0.0)
                try:
                    await queue._rpc.exchange(ask, bytes(damaged), deadline=5)
                    outcomes["stored"] += 1
                except (SchemaError, QueueFull):
                    outcomes["refused"] += 1
            (await queue.statistics()).check()
            assert outcomes["refused"] > 50

    run(body, tmp_path, seconds=60)


def test_followers_of_the_membership_hear_of_changes_after_a_restart_at_once(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (_, queue):
            for _ in range(20):
                await queue.announce(ready=True)
            old = (await queue.members()).epoch
        async with queue_at(path) as (_, queue):
            started = trio.current_time()
            assert (await queue.members(after=old, wait=20)).epoch != old
            assert trio.current_time() - started < 5

    run(body, tmp_path)


def test_a_resumed_run_gives_rows_of_dead_processes_back_without_counting_a_delivery(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        for _ in range(5):
            with running(path) as broker:
                async with TransferQueue.connect(broker.address, name="coordinator") as queue:
                    await queue.put(tasks(1), members=4)
                    if not (await queue.versions()):
                        await publish(queue)
                    await queue.release_absent()
                    lease = await queue.lease("rollout", rows=4)
                    assert lease is not None
                    assert [row.attempt for row in lease.rows] == [1] * 4
                    broker.kill()

    run(body, tmp_path, seconds=90)


def test_another_key_gets_no_answer_and_says_so_by_its_deadline(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock", key=b"k" * 32) as broker:
            with pytest.raises(DeadlineExceeded, match=r"waited 0\.5 s for the reply to Hello"):
                async with TransferQueue.connect(broker.address, deadline=0.5):
                    pass
            async with TransferQueue.connect(broker.address, key=b"k" * 32) as queue:
                await queue.statistics()

    run(body, tmp_path)


def test_a_public_address_needs_a_key_and_a_taken_one_is_named(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        with pytest.raises(AddressError, match="needs a key"):
            async with open_broker(FLOW, path / "a", bind="tcp://0.0.0.0:0"):
                pass
        async with open_broker(FLOW, path / "b", bind="tcp://127.0.0.1:0") as broker:
            with pytest.raises(AddressError, match="cannot bind"):
                async with open_broker(FLOW, path / "c", bind=broker.address):
                    pass

    run(body, tmp_path)


def test_membership_moves_when_engines_come_announce_are_fenced_and_go(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with queue_at(path) as (broker, queue):
            before = await queue.members("engine")
            async with TransferQueue.connect(broker.address, role="engine", name="e0", endpoint="ipc://x") as engine:
                await engine.announce(ready=True, version=3)
                now = await queue.members("engine", after=before.epoch, wait=5)
                assert [(m.name, m.ready, m.version, m.endpoint) for m in now.members] == [("e0", True, 3, "ipc://x")]
                await queue.fence(engine.session, "test")
                now = await queue.members("engine", after=now.epoch, wait=5)
                assert [m.ready for m in now.members] == [False]
                engine.report("decodes", tokens=5.0)
            gone = await queue.members("engine", after=now.epoch, wait=5)
            assert gone.members == ()

    run(body, tmp_path)


def test_the_queue_alone_passes_any_columns_through_its_work_stage(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with (
            open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            batch = pa.RecordBatch.from_pydict({"x": [1, 2, 3], "text": ["a", "b", "c"]})
            receipt = await queue.put(batch)
            lease = await queue.lease("work", rows=2)
            assert lease is not None
            assert lease.batch is not None
            assert lease.batch.select(["x", "text"]).to_pylist() == [{"x": 1, "text": "a"}, {"x": 2, "text": "b"}]
            await queue.write(lease, lease.batch.select(["row"]))
            statistics = await queue.statistics()
            assert (statistics.done, statistics.ready) == (2, 1)
            assert len(receipt.rows) == 3

    run(body, tmp_path)


def test_the_blocking_twin_does_the_same_from_another_thread(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock") as broker:

            def blocking() -> int:
                with BlockingTransferQueue.connect(broker.address, name="learner") as queue:
                    queue.put(tasks(2), members=4)
                    version = queue.begin_version(0, None)
                    queue.commit_version(version, "d")
                    queue.portal.call(pass_all, queue.aio)
                    lease = queue.lease("learn", rows=100, step=1)
                    assert lease is not None
                    queue.commit(1, lease.ids)
                    return queue.statistics().trained

            assert await trio.to_thread.run_sync(blocking) == 8

    run(body, tmp_path)


def test_acknowledged_rows_survive_a_killed_broker_and_its_clients_go_on(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        with running(path) as broker:
            async with TransferQueue.connect(broker.address, name="tester") as queue:
                receipt = await queue.put(tasks(3), members=4)
                version = await publish(queue)
                lease = await queue.lease("rollout", rows=4)
                assert lease is not None
                broker.kill()
                await trio.to_thread.run_sync(broker.start)
                # The lease lives on, and so does everything that was acknowledged.
                await queue.write(lease, schema.trajectory_batch(lease.ids, [trajectory(version)] * 4))
                assert (await queue.put(tasks(3), members=4)).duplicates == 3
                await pass_all(queue)
                batch = await queue.lease("learn", rows=100, step=1)
                assert batch is not None
                await queue.commit(1, batch.ids)
                broker.kill()
                await trio.to_thread.run_sync(broker.start)
                statistics = await queue.statistics()
                statistics.check()
                assert statistics.tasks == len(receipt.rows)
                assert statistics.trained == 8
                assert statistics.version == version

    run(body, tmp_path, seconds=60)


def test_requests_in_flight_at_a_kill_are_answered_once_it_is_back(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        with running(path) as broker:
            async with TransferQueue.connect(broker.address, name="tester") as queue:
                await publish(queue)
                rows: list[int] = []

                async def wait_for_rows() -> None:
                    lease = await queue.lease("rollout", rows=100, wait=40)
                    assert lease is not None
                    rows.extend(lease.ids)

                async with open_nursery() as nursery:
                    nursery.start_soon(wait_for_rows)
                    await trio.testing.wait_all_tasks_blocked(0.1)
                    broker.kill()
                    nursery.start_soon(lambda: queue.put(tasks(2), members=4, wait=40))
                    await trio.to_thread.run_sync(broker.start)
                assert rows == list(range(1, 9))

    run(body, tmp_path, seconds=60)
