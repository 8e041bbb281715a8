"""Requests, receipts and fences that come again, come late or come from nobody: each counts once, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import trio
from test_queue_broker import pass_all, publish, run, tasks, trajectory

from streamrl_queue import Broker, QueueConfig, TransferQueue, open_broker, schema, training_flow, wire, work_flow
from streamrl_queue import messages as m
from streamrl_queue.batches import encode
from streamrl_queue.errors import (
    JournalError,
    MessageTooLarge,
    ProtocolError,
    QueueError,
    SchemaError,
    StepConflict,
    StreamRLError,
)
from streamrl_queue.nonces import NONCE_BYTES
from streamrl_queue.replays import Replays
from streamrl_queue.rpc import MOST_NAMED, Forget, RpcClient
from streamrl_queue.transport import ZEROMQ, Dealer

FLOW = training_flow(QueueConfig(max_staleness=2, session_seconds=2.0, waiting_rows=4096), rows_per_step=8)


@asynccontextmanager
async def broker_at(path: Path, **options: Any) -> AsyncIterator[Broker]:
    async with open_broker(FLOW, path / "journal", bind=f"ipc://{path}/q.sock", **options) as broker:
        yield broker


class Wire:
    """A client of which every message is made by hand, so that it can be sent again at any time."""

    def __init__(self, dealer: Dealer, session: str) -> None:
        self._dealer = dealer
        self._session = session
        self._nonce = bytes(2 * NONCE_BYTES)

    def seal(self, id: int, request: msgspec.Struct, *asking: int) -> list[Any]:
        return wire.seal(self._session, id, request, None, None, asking, self._nonce)

    async def tell(self, frames: list[Any]) -> None:
        await self._dealer.send(frames)

    async def ask(self, id: int, request: msgspec.Struct, *asking: int) -> Any:
        await self._dealer.send(self.seal(id, request, *asking))
        reply = await self.reply()
        if not isinstance(reply, wire.Challenge):
            return reply
        self._nonce = self._nonce[:NONCE_BYTES] + reply.token
        return await self.ask(id, request, *asking)

    async def reply(self) -> Any:
        envelope, _ = wire.unseal(await self._dealer.recv(), None)
        return msgspec.msgpack.decode(envelope.body, type=m.Reply | wire.Refused | wire.Challenge)


def lease_of(rows: int, stage: str = "rollout", step: int | None = None) -> m.LeaseRows:
    return m.LeaseRows(stage, rows, 1, 0.0, None, step, True, None)


def test_a_copy_of_an_answered_lease_request_grants_nothing_even_to_a_session_that_was_lost_and_came_back(
    tmp_path: Path,
) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            await queue.put(tasks(4), members=4)
            await publish(queue)
            with ZEROMQ.dealer(broker.address) as dealer:
                old = Wire(dealer, "s")
                await old.ask(1, m.Hello("old", "producer"), 2, 1)
                copy = old.seal(2, lease_of(2), 3, 2)
                await old.tell(copy)
                grant = await old.reply()
                assert len(grant.rows) == 2
                # The next message says that request 2 is over; then the session is lost, and comes back.
                await old.ask(3, m.ListVersions(), 4, 3)
                await queue.end_session("old")
                await old.ask(4, m.Hello("old", "producer"), 5, 4)
                await old.tell(copy)
                assert await old.ask(5, m.GetStatistics(), 6, 5)
            assert (await queue.statistics()).leased == 0

    run(body, tmp_path)


def test_a_copy_of_a_lease_request_that_comes_behind_its_forget_grants_nothing(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            await queue.put(tasks(1), members=4)
            await publish(queue)
            with ZEROMQ.dealer(broker.address) as dealer:
                old = Wire(dealer, "s")
                await old.ask(1, m.Hello("old", "producer"), 2, 1)
                await old.tell(old.seal(2, Forget(), 3))
                assert await old.ask(3, m.GetStatistics(), 4, 3)
                await old.tell(old.seal(2, lease_of(2), 3, 2))
                assert await old.ask(4, m.GetStatistics(), 5, 4)
            assert (await queue.statistics()).leased == 0

    run(body, tmp_path)


def test_rows_of_a_request_whose_forget_was_lost_go_back_with_the_next_heartbeat(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address, name="one") as queue:
            await queue.put(tasks(1), members=4)
            await publish(queue)
            send = queue._rpc._dealer.try_send
            queue._rpc._dealer.try_send = lambda frames: False  # type: ignore[method-assign]
            with trio.move_on_after(0.1):
                await queue.lease("reward", rows=4, wait=20.0)
            queue._rpc._dealer.try_send = send  # type: ignore[method-assign]
            assert len(broker._waiting) == 1
            while broker._waiting or queue._given_up:
                await trio.sleep(0.01)
            assert queue._given_up == set()

    run(body, tmp_path)


def test_replies_are_kept_for_those_who_may_ask_again_and_for_nobody_else(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            for _ in range(50):
                await queue.versions()
            assert len(broker._replays.replies[queue.session]) <= 2
            with ZEROMQ.dealer(broker.address) as dealer:
                slow = Wire(dealer, "slow")
                await slow.ask(1, m.Hello("slow", "client"), 2, 1)
                begun = await slow.ask(2, m.BeginVersion(0, None), 3, 2)
                for id in range(3, 300):
                    await slow.ask(id, m.ListVersions(), id + 1, 2, id)
                # Request 2 is still open: its reply was lost.
                assert await slow.ask(2, m.BeginVersion(0, None), 3, 2) == begun
                assert len(broker._replays.replies["slow"]) <= 2

    run(body, tmp_path)


def test_an_id_that_is_over_stays_so_in_whatever_order_messages_come() -> None:
    said = [(3, 1, 2), (5, 2, 4), (9, 8), (9,), (6, 2, 5)]
    for order in (said, said[::-1], said[2:] + said[:2]):
        replays = Replays()
        for asking in order:
            replays.note("s", asking)
        assert [id for id in range(1, 12) if not replays.is_over("s", id)] == [9, 10, 11]
    assert not replays.is_over("another", 1)


def test_a_client_with_more_requests_in_flight_than_it_names_closes_none_of_them() -> None:
    class Sink:
        address = "nowhere"

    client = RpcClient(Sink(), m.Reply, None, "s")  # type: ignore[arg-type]
    replays = Replays()
    with ExitStack() as stack:
        ids = []
        for _ in range(3 * MOST_NAMED):
            ids.append(stack.enter_context(client.asking()))
            envelope, _ = wire.unseal(client._seal(ids[-1], m.ListVersions()), None)
            assert len(envelope.asking) <= MOST_NAMED + 1
            replays.note("s", envelope.asking)
        assert not any(replays.is_over("s", id) for id in ids)
    replays.note("s", client._asking())
    assert all(replays.is_over("s", id) for id in ids)


def test_a_write_that_ended_its_rows_is_acknowledged_again_after_the_broker_and_the_session_were_lost(
    tmp_path: Path,
) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address, session="w") as queue:
            await queue.put(tasks(2), members=1, split="eval")
            await publish(queue)
            await pass_all(queue)
            lease = await queue.lease("evaluate", rows=2)
            assert lease is not None
            done = pa.RecordBatch.from_pydict({"row": pa.array(lease.ids, pa.uint64())})
            first = await queue.write(lease, done)
            assert (await queue.statistics()).done == 2
        async with broker_at(path) as broker, TransferQueue.connect(broker.address, session="again") as queue:
            again = await queue.write(lease, done)
            assert (again.rows, again.duplicates) == (first.rows, 2)
            assert (await queue.statistics()).done == 2

    run(body, tmp_path)


def test_a_release_and_a_drop_are_acknowledged_again(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            await queue.put(tasks(1), members=4)
            await publish(queue)
            lease = await queue.lease("rollout", rows=4)
            assert lease is not None
            dropped = await queue.drop(lease, lease.ids[:1], reason="test")
            released = await queue.release(lease)
            assert (dropped.rows, released.rows) == (lease.ids[:1], lease.ids[1:])
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            assert (await queue.drop(lease, lease.ids[:1], reason="test")).duplicates == 1
            assert (await queue.release(lease)).rows == lease.ids[1:]
            statistics = await queue.statistics()
            assert (statistics.ready, statistics.dropped) == (3, {"test": 1})

    run(body, tmp_path)


def test_columns_that_do_not_exist_leave_no_row_leased(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            await queue.put(tasks(1), members=4)
            await publish(queue)
            with pytest.raises(SchemaError, match="no column nonsense"):
                await queue.lease("rollout", rows=4, columns=["nonsense"])
            lease = await queue.lease("rollout", rows=4)
            assert lease is not None
            assert [row.attempt for row in lease.rows] == [1] * 4

    run(body, tmp_path)


# -- fences


def test_a_fence_outlives_the_broker_and_the_session_until_the_engine_announces_itself(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED) -> None:
                with trio.CancelScope() as stop:
                    async with broker_at(path):
                        task_status.started(stop)
                        await trio.sleep_forever()
                ended.set()

            ended = trio.Event()
            stop = await nursery.start(serve)
            address = f"ipc://{path}/q.sock"
            async with (
                TransferQueue.connect(address, role="engine", name="e0", endpoint="ipc://x") as engine,
                TransferQueue.connect(address) as queue,
            ):

                async def ready() -> list[bool]:
                    return [member.ready for member in (await queue.members("engine")).members]

                await engine.announce(ready=True, version=3)
                await queue.fence(engine.session, "test")
                await queue.end_session("e0")
                await engine.versions()
                assert await ready() == [False]
                stop.cancel()
                await ended.wait()
                await nursery.start(serve)
                await engine.versions()
                assert await ready() == [False]
                await engine.announce(ready=True, version=3)
                assert await ready() == [True]
            nursery.cancel_scope.cancel()

    run(body, tmp_path)


def test_a_fence_waits_for_an_engine_that_is_not_back_after_a_restart(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            with ZEROMQ.dealer(broker.address) as dealer, trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(queue.fence, "late-engine", "test")
                    while not broker._waiting:
                        await trio.sleep(0.01)
                    engine = Wire(dealer, "late-engine")
                    await engine.ask(1, m.Hello("e0", "engine", "ipc://x", True, 3, 1), 2, 1)
                assert [member.ready for member in (await queue.members("engine")).members] == [False]

    run(body, tmp_path)


def test_an_announcement_that_comes_again_does_not_lift_a_later_fence(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            with ZEROMQ.dealer(broker.address) as dealer:
                engine = Wire(dealer, "e")
                await engine.ask(1, m.Hello("e0", "engine", "ipc://x"))
                await engine.ask(2, m.Announce(True, 3, 1))
                await queue.fence("e", "test")
                await engine.ask(3, m.Announce(True, 3, 1))
                assert [member.ready for member in (await queue.members("engine")).members] == [False]
                await engine.ask(4, m.Announce(True, 3, 2))
                assert [member.ready for member in (await queue.members("engine")).members] == [True]

    run(body, tmp_path)


# -- requests that make no sense

HUGE = 1 << 62
ABSURD: list[Callable[[], msgspec.Struct]] = [
    lambda: m.PutTasks(("a",), 1, "train", 1 << 40, {}, 0.0),
    lambda: m.PutTasks(("a",), 1 << 20, "train", 0, {}, 0.0),
    lambda: m.PutTasks(("a",), 1, "train", 0, {"s": -1}, 0.0),
    lambda: m.PutTasks(("a",), 1, "nowhere", 0, {}, 0.0),
    lambda: m.LeaseRows("rollout", -1, 1, 0.0, None, None, True, None),
    lambda: m.LeaseRows("rollout", 1 << 40, 1, 0.0, None, None, True, None),
    lambda: m.LeaseRows("rollout", 1, -5, 0.0, None, None, True, None),
    lambda: m.LeaseRows("learn", 1, 1, 0.0, None, -1, True, None),
    lambda: m.LeaseRows("learn", 1, 1, 0.0, None, HUGE, True, None),
    lambda: m.LeaseRows("", 1, 1, 0.0, None, None, True, None),
    lambda: m.Peek("rollout", 0),
    lambda: m.Peek("rollout", -9),
    lambda: m.Fetch((-1,), ("tokens",)),
    lambda: m.Fetch((HUGE,), ("tokens",)),
    lambda: m.Extend(-1),
    lambda: m.Release(HUGE, (-1,), ""),
    lambda: m.Drop(0, None, ""),
    lambda: m.WriteColumns(-1),
    lambda: m.BeginVersion(-1, None),
    lambda: m.BeginVersion(0, HUGE),
    lambda: m.CommitVersion(HUGE, ""),
    lambda: m.CommitStep(-1, ()),
    lambda: m.CommitStep(HUGE, ()),
    lambda: m.CommitStep(1, (-1,)),
    lambda: m.Retire(HUGE),
    lambda: m.Retire(-1),
    lambda: m.Reconcile(-HUGE),
    lambda: m.Reconcile(HUGE),
]


def test_numbers_out_of_all_bounds_are_refused_and_change_nothing(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            await queue.put(tasks(2), members=4)
            await publish(queue)
            before = await queue.statistics()
            for make in ABSURD:
                request = make()
                with pytest.raises(StreamRLError) as refused:
                    await queue._rpc.exchange(request, encode(schema.task_batch(tasks(1, 77))), deadline=5)
                assert "could not handle" not in str(refused.value), request
            assert await queue.statistics() == before

    run(body, tmp_path)


def test_a_version_of_a_step_that_was_not_taken_holds_nobody_up(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            await queue.put(tasks(1), members=4)
            version = await queue.begin_version(HUGE, None)
            await queue.commit_version(version, "digest")
            with trio.fail_after(2):
                assert await queue.lease("rollout", rows=4) is not None

    run(body, tmp_path)


def test_a_lease_for_another_step_than_the_next_is_refused_and_makes_nothing_stale(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            await queue.put(tasks(2), members=4)
            await publish(queue)
            await pass_all(queue)
            with pytest.raises(StepConflict, match="expected step 1 to assemble, got 100"):
                await queue.lease("learn", rows=8, step=100)
            assert (await queue.statistics()).dropped == {}

    run(body, tmp_path)


def test_row_ids_of_another_type_and_columns_that_come_twice_are_refused_by_name(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with (
            open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            twice = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
            with pytest.raises(SchemaError, match="column x is there more than once"):
                await queue.put(twice)
            await queue.put(pa.RecordBatch.from_pydict({"x": [1, 2]}))
            lease = await queue.lease("work", rows=2)
            assert lease is not None
            for ids in (pa.array([-1], pa.int64()), pa.array(["1"]), pa.array([None], pa.uint64())):
                with pytest.raises(SchemaError, match="row: expected uint64 without nulls"):
                    await queue.write(lease, pa.RecordBatch.from_arrays([ids], names=["row"]))
            assert (await queue.statistics()).leased == 2

    run(body, tmp_path)


# -- the disk


def test_a_full_disk_refuses_what_it_must_and_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            await queue.put(tasks(2), members=4)
            await publish(queue)
            lease = await queue.lease("rollout", rows=4)
            assert lease is not None

            def full(fd: int, buffers: list[bytes], offset: int) -> int:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", full)
                with pytest.raises(JournalError, match="No space left"):
                    await queue.lease("rollout", rows=4)
                with pytest.raises(JournalError, match="No space left"):
                    await queue.write(lease, schema.trajectory_batch(lease.ids, [trajectory()] * 4))
                with trio.move_on_after(0.05):
                    await queue.lease("reward", rows=1, wait=20.0)
                # A request that is given up, and a process that is gone, wait for the disk too.
                assert await queue.versions()
            await queue.write(lease, schema.trajectory_batch(lease.ids, [trajectory()] * 4))
            rest = await queue.lease("rollout", rows=8)
            assert rest is not None
            assert len(rest.ids) == 4
            (await queue.statistics()).check()

    run(body, tmp_path)


# -- sizes


def test_who_sends_too_much_is_told_so_before_anything_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(path: Path) -> None:
        async with (
            open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1 << 20)
            big = pa.RecordBatch.from_pydict({"blob": [bytes(1_200_000)]})
            with pytest.raises(MessageTooLarge, match="limit 1 MiB; take fewer rows at once"):
                await queue.put(big)
            small = pa.RecordBatch.from_pydict({"blob": [bytes(600_000)]})
            await queue.put(small)
            lease = await queue.lease("work", rows=1)
            assert lease is not None
            wide = pa.RecordBatch.from_pydict({"row": pa.array(lease.ids, pa.uint64()), "out": [bytes(1_200_000)]})
            with pytest.raises(MessageTooLarge):
                await queue.write(lease, wide)
            # The lease goes on.
            await queue.write(lease, wide.select(["row"]))
            assert (await queue.statistics()).done == 1

    run(body, tmp_path)


def test_a_reply_that_would_be_too_large_gives_the_rows_back_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamrl_queue import broker as module

    async def body(path: Path) -> None:
        async with (
            open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            monkeypatch.setattr(module, "LARGEST_PAYLOAD", 1 << 20)
            blob = pa.RecordBatch.from_pydict({"blob": [bytes(600_000)]})
            for _ in range(3):
                await queue.put(blob)
            with ZEROMQ.dealer(broker.address) as dealer:
                far = Wire(dealer, "far")
                await far.ask(1, m.Hello("far", "client"))
                refused = await far.ask(2, lease_of(3, "work"))
                assert refused.error == "MessageTooLarge"
                assert "lease fewer rows at once" in refused.message
            lease = await queue.lease("work", rows=1)
            assert lease is not None
            assert [row.attempt for row in lease.rows] == [1]
            assert (await queue.statistics()).leased == 1

    run(body, tmp_path)


def test_lists_beyond_two_to_the_31_elements_are_refused_without_being_copied(tmp_path: Path) -> None:
    """Two GiB of zeros that are never touched: whoever copied them would take that much memory."""
    import numpy as np

    async def body(path: Path) -> None:
        async with (
            open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            n = (1 << 31) + 8
            values = pa.array(np.zeros(n, np.int8))
            column = pa.LargeListArray.from_arrays(pa.array([0, n], pa.int64()), values)
            batch = pa.RecordBatch.from_arrays([column], names=["bytes"])
            with pytest.raises(MessageTooLarge, match="2048 MiB, limit 512 MiB; take fewer rows at once"):
                await queue.put(batch)

    run(body, tmp_path)


def test_another_release_is_refused_at_connect_and_the_broker_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker:
            with ZEROMQ.dealer(broker.address) as dealer:
                monkeypatch.setattr(wire, "PROTOCOL", wire.PROTOCOL + 1)
                frames = Wire(dealer, "s").seal(1, m.Hello("x", "x"))
                monkeypatch.undo()
                await dealer.send(frames)
                while not broker.protocol_errors:
                    await trio.sleep(0.01)
            assert f"expected protocol {wire.PROTOCOL}, got {wire.PROTOCOL + 1}" in caplog.text

    run(body, tmp_path)


def test_what_is_not_understood_is_refused_with_its_place_in_the_request(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with broker_at(path) as broker, TransferQueue.connect(broker.address) as queue:
            with pytest.raises(ProtocolError, match=r"Expected `int` >= 1 - at `\$.rows`"):
                await queue._rpc.call(lease_of(0), deadline=5)
            with pytest.raises(QueueError):
                await queue._rpc.call(m.LeaseRows("nope", 1, 1, 0.0, None, None, True, None), deadline=5)

    run(body, tmp_path)
