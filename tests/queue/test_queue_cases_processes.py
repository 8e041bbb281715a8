"""Processes that die in the worst moment, flood, stand still or come in the wrong order."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import trio
from test_queue_broker import pass_all, publish, run, tasks

from streamrl_queue import (
    BlockingTransferQueue,
    Broker,
    QueueConfig,
    TransferQueue,
    messages,
    open_broker,
    training_flow,
    work_flow,
)
from streamrl_queue.errors import DeadlineExceeded, JournalError, LeaseExpired, QueueFull, UnknownName
from streamrl_queue.nursery import open_nursery

SESSION_SECONDS = 1.0
FLOW = training_flow(QueueConfig(max_staleness=2, session_seconds=SESSION_SECONDS, waiting_rows=4096), rows_per_step=8)

CHILD = """
import os, signal, sys
import trio, zmq
from streamrl_queue import TransferQueue, messages, schema, wire
from streamrl_queue.batches import encode

async def main(address, what):
    async with TransferQueue.connect(address, name="child", deadline=30.0) as queue:
        if what == "half a put":
            await queue.lease("rollout", rows=4)
            batch = encode(schema.task_batch([schema.Task(env="e", task={}, index=99)]))
            ask = messages.PutTasks(("half",), 4, "train", 0, {}, 0.0)
            frames = wire.seal(queue.session, 999, ask, batch, None)
            assert len(frames) == 2
            queue._rpc._dealer._socket.send(frames[0], zmq.SNDMORE)
        else:
            lease = await queue.lease("learn", rows=8, step=1)
            if what == "commit":
                await queue.commit(1, lease.ids)
        os.kill(os.getpid(), signal.SIGKILL)

trio.run(main, *sys.argv[1:])
"""


@asynccontextmanager
async def broker_at(path: Path) -> AsyncIterator[tuple[Broker, TransferQueue]]:
    async with (
        open_broker(FLOW, path / "journal", bind=f"ipc://{path}/q.sock") as broker,
        TransferQueue.connect(broker.address, name="tester") as queue,
    ):
        yield broker, queue


async def killed_while(broker: Broker, what: str) -> None:
    """A process of its own does what it is told, and kills itself."""
    command = [sys.executable, "-c", CHILD, broker.address, what]
    done = await trio.run_process(command, check=False, capture_stderr=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def test_a_process_killed_in_the_middle_of_a_put_leaves_no_row_and_its_rows_are_requeued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as (broker, queue):
            await queue.put(tasks(1), members=4)
            await publish(queue)
            await killed_while(broker, "half a put")
            died = trio.current_time()
            lease = await queue.lease("rollout", rows=4, at_least=4, wait=3 * SESSION_SECONDS)
            assert lease is not None
            assert trio.current_time() - died < 3 * SESSION_SECONDS
            assert [row.attempt for row in lease.rows] == [2] * 4
            assert (await queue.statistics()).tasks == 4
            assert f"child lost: no heartbeat for {SESSION_SECONDS:.1f} s; 4 rows requeued" in caplog.text

    run(body, tmp_path)


@pytest.mark.parametrize("when", ["lease", "commit"])
def test_a_learner_killed_before_or_behind_its_commit_trains_each_row_once_in_the_history_that_counts(
    when: str, tmp_path: Path
) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as (broker, queue):
            await queue.put(tasks(2), members=4)
            await publish(queue)
            await pass_all(queue)
            await killed_while(broker, when)
            # No checkpoint was made: the new learner goes on from step 0.
            back = await queue.reconcile(0)
            assert back == (8 if when == "commit" else 0)
            lease = await queue.lease("learn", rows=8, at_least=8, step=1, wait=3 * SESSION_SECONDS)
            assert lease is not None
            assert [row.attempt for row in lease.rows] == [2] * 8
            await queue.commit(1, lease.ids)
            statistics = await queue.statistics()
            statistics.check()
            assert (statistics.trained, statistics.step) == (8, 1)

    run(body, tmp_path)


# -- floods


def test_a_flood_of_puts_starves_no_client_and_stops_no_heartbeat(tmp_path: Path) -> None:
    clients, rows = 100, 1500

    async def body(path: Path) -> None:
        taken: Counter[int] = Counter()
        async with (
            open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address, name="flood") as flood,
            open_nursery() as nursery,
        ):
            members = (await flood.members()).epoch

            async def consume(number: int) -> None:
                async with TransferQueue.connect(broker.address, name=f"c{number}") as queue:
                    while True:
                        lease = await queue.lease("work", rows=4, wait=30.0, payload=False)
                        assert lease is not None
                        await queue.write(lease, pa.RecordBatch.from_pydict({"row": pa.array(lease.ids, pa.uint64())}))
                        taken[number] += len(lease.ids)

            for number in range(clients):
                nursery.start_soon(consume, number)
            while len((await flood.members(after=members, wait=5.0)).members) <= clients:
                pass
            for _ in range(rows // 10):
                await flood.put(pa.RecordBatch.from_pydict({"x": list(range(10))}))
            while (await flood.statistics()).done < rows:
                await trio.sleep(0.02)
            assert len((await flood.members()).members) == clients + 1, "nobody lost its session"
            nursery.cancel_scope.cancel()
        mean = rows / clients
        assert max(taken.values()) <= 2 * mean
        assert min(taken[number] for number in range(clients)) >= mean / 2

    run(body, tmp_path, seconds=60)


def test_a_large_put_is_not_kept_out_by_small_ones_and_holds_them_up_no_longer_than_it_waits(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        flow = msgspec.structs.replace(work_flow(), waiting_rows=10)
        async with (
            open_broker(flow, path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
            TransferQueue.connect(broker.address) as other,
            open_nursery() as nursery,
        ):

            def rows(n: int) -> pa.RecordBatch:
                return pa.RecordBatch.from_pydict({"x": [0] * n})

            async def large(wait: float) -> None:
                with suppress(QueueFull):
                    await queue.put(rows(8), wait=wait)

            await queue.put(rows(6))
            nursery.start_soon(large, 0.3)
            while not broker._waiting:
                await trio.sleep(0.01)
            with pytest.raises(QueueFull, match="a put of 8 rows waits for room before this one"):
                await queue.put(rows(1), wait=0.0)
            # The large one gives up, and what waits behind it goes on at once.
            await queue.put(rows(1), wait=20.0)
            nursery.start_soon(large, 20.0)
            while not broker._waiting:
                await trio.sleep(0.01)
            nursery.start_soon(other.put, rows(1))
            while len(broker._waiting) < 2:
                await trio.sleep(0.01)
            lease = await queue.lease("work", rows=7)
            assert lease is not None
            while broker._waiting:
                await trio.sleep(0.01)
            assert (await queue.statistics()).tasks == 6 + 1 + 8 + 1

    run(body, tmp_path)


# -- clocks


def test_jumps_of_the_wall_clock_end_no_lease_and_no_session(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        jump = [0.0]
        async with (
            open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock", wall=lambda: 1.7e9 + jump[0]) as broker,
            TransferQueue.connect(broker.address, wall=lambda: 1.7e9 - jump[0]) as queue,
        ):
            await queue.put(tasks(1), members=4)
            await publish(queue)
            lease = await queue.lease("rollout", rows=4)
            assert lease is not None
            for jump[0] in (3600.0, -3600.0, 0.0, 7200.0):
                await queue.extend(lease)
                assert await queue.lease("rollout", rows=1, wait=0.05) is None
            assert len((await queue.members()).members) == 1
            assert (await queue.release(lease)).rows == lease.ids

    run(body, tmp_path)


# -- strangers


def test_an_http_request_a_pickle_and_noise_on_the_port_reach_nobody(tmp_path: Path) -> None:
    noise = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x80\x04\x95\x10\x00.", os.urandom(4096), b"\xff" * 100_000)

    def shout(address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        for data in noise:
            with socket.create_connection((host, int(port)), timeout=5) as stranger:
                try:
                    stranger.sendall(data)
                    stranger.settimeout(0.2)
                    stranger.recv(1 << 16)
                except OSError:
                    pass

    async def body(path: Path) -> None:
        async with (
            open_broker(FLOW, path / "j", bind="tcp://127.0.0.1:0") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            await trio.to_thread.run_sync(shout, broker.address)
            await queue.put(tasks(1), members=1)
            assert (await queue.statistics()).tasks == 1
            assert len((await queue.members()).members) == 1

    run(body, tmp_path)


# -- starts, ends, errors


def test_a_client_that_starts_before_its_broker_waits_for_it(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        address = f"ipc://{path}/q.sock"
        connected = trio.Event()

        async def early() -> None:
            async with TransferQueue.connect(address, deadline=20.0):
                connected.set()

        async with open_nursery() as nursery:
            nursery.start_soon(early)
            await trio.sleep(0.1)
            async with open_broker(FLOW, path / "j", bind=address):
                await connected.wait()

    run(body, tmp_path)


def test_a_client_of_nobody_says_whom_it_missed_by_its_deadline(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.3 s for the reply to Hello from the queue at ipc:"):
            async with TransferQueue.connect(f"ipc://{path}/nobody.sock", deadline=0.3):
                pass

    run(body, tmp_path)


def test_leaving_a_broker_that_is_gone_does_not_hang(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
                async with open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock") as broker:
                    task_status.started(broker.address)
                    await trio.sleep_forever()

            address = await nursery.start(serve)
            async with TransferQueue.connect(address):
                nursery.cancel_scope.cancel()

    run(body, tmp_path, seconds=5)


def test_a_worker_that_raises_between_its_lease_and_its_write_gives_the_rows_back_at_once(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as (broker, queue):
            await queue.put(tasks(1), members=4)
            await publish(queue)

            async def work() -> None:
                async with TransferQueue.connect(broker.address, name="raises") as worker:
                    assert await worker.lease("rollout", rows=4)
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await work()
            lease = await queue.lease("rollout", rows=4)
            assert lease is not None
            assert len(lease.ids) == 4

    run(body, tmp_path)


def test_the_error_of_a_background_task_reaches_the_caller_as_itself(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock") as broker:

            async def fails() -> None:
                raise UnknownName("of a background task")

            def blocking() -> None:
                with BlockingTransferQueue.connect(broker.address, name="learner") as queue:
                    queue.portal.start_soon(fails)
                    while True:
                        queue.statistics()

            with pytest.raises(UnknownName, match="of a background task"):
                await trio.to_thread.run_sync(blocking)

    run(body, tmp_path)


def test_threads_that_share_a_blocking_queue_each_get_their_own_answers(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker:

            def blocking() -> set[int]:
                rows: list[int] = []
                with BlockingTransferQueue.connect(broker.address) as queue:

                    def work() -> None:
                        for _ in range(10):
                            receipt = queue.put(pa.RecordBatch.from_pydict({"x": [0, 1]}))
                            batch = queue.fetch(receipt.rows, ["x"])
                            assert batch.column("row").to_pylist() == list(receipt.rows)
                            rows.extend(receipt.rows)

                    import threading

                    threads = [threading.Thread(target=work) for _ in range(6)]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join()
                assert len(rows) == len(set(rows))
                return set(rows)

            assert await trio.to_thread.run_sync(blocking) == set(range(1, 121))

    run(body, tmp_path)


def test_clients_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as (broker, queue):

            async def visit() -> None:
                async with TransferQueue.connect(broker.address) as visitor:
                    await visitor.statistics()

            for _ in range(5):
                await visit()
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(30):
                await visit()
            assert len(os.listdir("/proc/self/fd")) <= before + 5
            assert set(broker._replays.replies) <= {queue.session}
            assert len((await queue.members()).members) == 1

    run(body, tmp_path)


def test_a_journal_has_one_broker(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path):
            with pytest.raises(JournalError, match="belongs to another broker"):
                async with open_broker(FLOW, path / "journal", bind=f"ipc://{path}/other.sock"):
                    pass
        async with open_broker(FLOW, path / "journal", bind=f"ipc://{path}/other.sock"):
            pass

    run(body, tmp_path)


def test_a_lease_that_nobody_extends_runs_out_and_the_hanging_worker_is_fenced(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with (
            open_broker(work_flow(seconds=0.2), path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address, name="hangs") as hangs,
            TransferQueue.connect(broker.address, name="works") as works,
        ):
            await works.put(pa.RecordBatch.from_pydict({"x": [1]}))
            held = await hangs.lease("work", rows=1)
            assert held is not None
            again = await works.lease("work", rows=1, wait=10)
            assert again is not None
            assert again.rows[0].attempt == 2
            done = pa.RecordBatch.from_pydict({"row": pa.array(held.ids, pa.uint64())})
            with pytest.raises(LeaseExpired):
                await hangs.write(held, done)
            await works.write(again, done)

    run(body, tmp_path)


def test_a_heartbeat_makes_the_session_live_on(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as (broker, queue):
            request = messages.Heartbeat("works", 0.0, {})
            before = broker.sessions._deadlines[queue.session]
            await trio.sleep(0.01)
            await queue._ask(request)
            assert broker.sessions._deadlines[queue.session] > before

    run(body, tmp_path)


def test_a_broker_that_stood_still_calls_nobody_late_for_it(tmp_path: Path) -> None:
    """Its sockets bring what was sent meanwhile a moment after it goes on."""

    async def body(path: Path) -> None:
        flow = msgspec.structs.replace(work_flow(), session_seconds=0.9)
        async with open_broker(flow, path / "j", bind=f"ipc://{path}/q.sock") as broker:
            router = broker._router
            receive, try_receive = router.recv, router.try_recv
            held_until = 0.0

            async def recv(deadline: float = float("inf")) -> list[Any] | None:
                """Nothing arrives as long as the process stands still, and for a moment longer."""
                while trio.current_time() < held_until:
                    if deadline <= trio.current_time():
                        return None
                    await trio.sleep(0.01)
                return await receive(deadline)

            monkey = {"recv": recv, "try_recv": lambda: try_receive() if trio.current_time() >= held_until else None}
            for name, replacement in monkey.items():
                setattr(router, name, replacement)
            async with TransferQueue.connect(broker.address) as queue:
                await queue.put(pa.RecordBatch.from_pydict({"x": [1]}))
                lease = await queue.lease("work", rows=1)
                assert lease is not None
                held_until = trio.current_time() + 2.4
                # The whole process, clients' heartbeats included, which they sent before or send right after.
                time.sleep(2.2)  # noqa: ASYNC251
                await queue.write(lease, pa.RecordBatch.from_pydict({"row": pa.array(lease.ids, pa.uint64())}))
                assert (await queue.statistics()).done == 1

    run(body, tmp_path)
