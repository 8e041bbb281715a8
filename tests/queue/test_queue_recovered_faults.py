"""What the simulator found in the queue, each as the smallest case that shows it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import trio
from test_queue_rows import MEMBERS, ROWS_PER_STEP, Driver, flow

from streamrl_queue import (
    QueueConfig,
    Segment,
    Span,
    Trajectory,
    TransferQueue,
    open_broker,
    schema,
    training_flow,
    wire,
)
from streamrl_queue import messages as m
from streamrl_queue.border import tokens_of
from streamrl_queue.errors import LeaseExpired, SessionLost
from streamrl_queue.events import VersionBegun
from streamrl_queue.journal import Journal
from streamrl_queue.nonces import NONCE_BYTES, Door
from streamrl_queue.nursery import run as run_trio
from streamrl_queue.rpc import RpcClient, RpcServer
from streamrl_queue.state import Version
from streamrl_queue.transport import Buffer, Router


def ready_to_learn(driver: Driver) -> None:
    for stage in ("rollout", "reward", "advantage"):
        driver.run_through(stage)


def test_rows_that_admission_does_not_bind_do_not_queue_behind_rows_that_it_holds_back() -> None:
    driver = Driver(flow())
    driver.publish(0)
    driver.put(*(f"k{i}" for i in range(20)))
    assert driver.lease("rollout") is not None
    driver.put("check", split="eval")
    lease = driver.lease("rollout")
    assert lease
    assert {driver.rows.rows[id].split for id in lease.rows} == {"eval"}


def test_a_row_of_a_group_that_has_begun_does_not_queue_behind_a_more_urgent_group_that_may_not_begin() -> None:
    driver = Driver(flow())
    driver.publish(0)
    driver.put(*(f"k{i}" for i in range(6)))
    lease = driver.lease("rollout")
    assert lease
    assert len(lease.rows) == 6 * MEMBERS
    driver.put("urgent", priority=9)
    driver.do(driver.rows.release(0.0, "s", lease.lease, lease.rows[:1], "released", "drain"))
    again = driver.lease("rollout")
    assert again
    assert again.rows == lease.rows[:1]


def test_the_learner_gets_the_row_with_the_earliest_deadline_whatever_its_priority() -> None:
    driver = Driver(flow())
    driver.publish(0)
    driver.put(*(f"k{i}" for i in range(6)))
    driver.put("soon", priority=5)
    ready_to_learn(driver)
    for step in (1, 2):
        batch = driver.lease("learn", rows=ROWS_PER_STEP, step=step)
        assert batch
        driver.do(driver.rows.commit(0.0, "s", step, batch.rows))
        driver.publish(step)
        driver.put(f"a{step}", f"b{step}", priority=9)
        ready_to_learn(driver)
    batch = driver.lease("learn", rows=ROWS_PER_STEP, step=3)
    assert batch
    assert len(batch.rows) == ROWS_PER_STEP
    assert {driver.rows.rows[id].born for id in batch.rows} == {0}


def test_a_step_that_names_a_row_twice_is_refused() -> None:
    driver = Driver(flow())
    driver.publish(0)
    driver.put("a", "b")
    ready_to_learn(driver)
    first = driver.lease("learn", rows=3, step=1)
    assert first
    driver.do(*driver.rows.end_session(0.0, "s", "stood still"))
    second = driver.lease("learn", rows=8, step=1)
    assert second
    with pytest.raises(LeaseExpired, match="twice"):
        driver.rows.commit(0.0, "s", 1, [*first.rows, *second.rows])


def test_a_release_or_drop_that_names_a_row_twice_is_refused() -> None:
    driver = Driver(flow())
    driver.publish(0)
    driver.put("a")
    lease = driver.lease("rollout")
    assert lease
    twice = [lease.rows[0], lease.rows[0]]
    with pytest.raises(LeaseExpired, match="twice"):
        driver.rows.release(0.0, "s", lease.lease, twice, "released", "test")
    with pytest.raises(LeaseExpired, match="twice"):
        driver.rows.drop(0.0, "s", lease.lease, twice, "test")


def test_a_group_that_got_the_place_of_a_lost_row_can_be_finished() -> None:
    config = QueueConfig(max_staleness=0)
    driver = Driver(training_flow(config, rows_per_step=ROWS_PER_STEP))
    driver.publish(0)
    driver.put("a", "b", "c")
    lease = driver.lease("rollout")
    assert lease
    assert len(lease.rows) == ROWS_PER_STEP
    driver.do(driver.rows.drop(0.0, "s", lease.lease, lease.rows[:1], "error_env"))
    driver.write(lease, lease.rows[1:])
    ready_to_learn(driver)
    batch = driver.lease("learn", step=1)
    assert batch
    rows = list(batch.rows)
    while len(rows) < ROWS_PER_STEP:
        ready_to_learn(driver)
        batch = driver.lease("learn", rows=ROWS_PER_STEP - len(rows), step=1)
        assert batch, "the step can never be filled"
        rows += batch.rows
    driver.do(driver.rows.commit(0.0, "s", 1, rows))


def test_the_oldest_version_of_a_row_is_that_of_the_earliest_step() -> None:
    row = Trajectory(
        tokens=np.arange(4, dtype=np.int32),
        mask=np.ones(4, np.uint8),
        logprobs=np.zeros(4, np.float32),
        versions=(Span(0, 5, 5), Span(2, 6, 6)),
        segments=(Segment(0, 4),),
        turns=1,
        status="completed",
        sampling={},
    )
    batch = schema.trajectory_batch([1], [row])
    # The learner went back: version 6 is of an earlier step than version 5.
    versions = {5: Version(5, 8, 4, "d"), 6: Version(6, 3, 5, "d")}
    assert tokens_of(batch, versions) == ((6,), (4,))


def test_a_sync_covers_every_segment_that_holds_something_unsynced(tmp_path: Path) -> None:
    synced: list[int] = []

    def watch(journal: Journal) -> None:
        for number, segment in journal._segments.items():
            segment.sync = lambda number=number: synced.append(number)  # type: ignore[method-assign, misc]

    journal = Journal(tmp_path, durability="flush", segment_bytes=1 << 12)
    for version in range(1, 60):
        journal.append(VersionBegun(0.0, version, 0, None))
    watch(journal)
    journal.sync()
    assert synced == list(journal._segments)
    assert len(synced) > 1
    synced.clear()
    journal.sync()
    assert synced == []
    journal.close()
    # Nobody knows what a process that was killed had synced.
    again = Journal(tmp_path, durability="flush", segment_bytes=1 << 12)
    assert len(list(again.recover())) == 59
    watch(again)
    again.sync()
    assert synced == list(again._segments)
    again.close()


class ForgetfulServer:
    """Knows the session only after a Hello; remembers the ids that it was asked with."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._known = False
        self._numbers = itertools.count(1)

    @contextmanager
    def asking(self) -> Iterator[int]:
        yield next(self._numbers)

    async def exchange(self, request: object, payload: object, *, id: int, **options: object) -> tuple[m.Number, None]:
        self.ids.append(id)
        if not self._known:
            raise SessionLost("who?")
        return m.Number(1), None

    async def call(self, request: object, **options: object) -> m.Welcome:
        self._known = True
        return m.Welcome(6.0)


def test_a_request_is_asked_again_under_its_id_after_a_lost_session() -> None:
    """A lease whose reply was lost with the broker is else given to a session that does not know of it."""
    server = ForgetfulServer()

    async def body() -> int:
        async with trio.open_nursery() as nursery:
            queue = TransferQueue(cast(RpcClient, server), nursery, "s", m.Hello("n", "r"), "nowhere")
            return await queue.begin_version(0, None)

    assert trio.run(body) == 1
    assert server.ids == [1, 1]


def test_a_lost_session_is_no_answer_that_is_remembered(tmp_path: Path) -> None:
    async def test() -> None:
        with trio.fail_after(20):
            async with (
                open_broker(flow(), tmp_path / "journal", bind=f"ipc://{tmp_path}/q.sock") as broker,
                RpcClient.connect(broker.address, m.Reply, session="s") as client,
            ):
                with client.asking() as id:
                    with pytest.raises(SessionLost):
                        await client.exchange(m.BeginVersion(0, None), None, deadline=5.0, id=id)
                    await client.call(m.Hello("n", "r"), deadline=5.0)
                    reply, _ = await client.exchange(m.BeginVersion(0, None), None, deadline=5.0, id=id)
                    again, _ = await client.exchange(m.BeginVersion(0, None), None, deadline=5.0, id=id)
                assert (reply, again) == (m.Number(1), m.Number(1))

    run_trio(test)


class TwiceRouter:
    """Every message has arrived twice before its receiver looks."""

    address = "memory"

    def __init__(self, frames: list[Buffer]) -> None:
        self._frames = [frames, frames]
        self.sent: list[Sequence[Buffer]] = []

    async def recv(self) -> list[Buffer]:
        if not self._frames:
            await trio.sleep_forever()
        return self._frames.pop()

    def send(self, frames: Sequence[Buffer]) -> bool:
        self.sent.append(frames)
        return True


SECRET = b"s" * 32


def test_a_request_that_arrives_twice_at_once_is_handled_once() -> None:
    handled: list[object] = []

    async def handle(peer: str, request: object) -> m.Number:
        handled.append(request)
        return m.Number(1)

    async def test() -> None:
        nonce = bytes(NONCE_BYTES) + Door(SECRET).token("s", bytes(NONCE_BYTES))
        router = TwiceRouter([b"peer", *wire.seal("s", 1, m.Extend(7), None, None, nonce=nonce)])
        server = RpcServer(cast(Router, router), m.Request, handle, None, SECRET)
        with trio.move_on_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server._receive, nursery)
                while not router.sent:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
        assert handled == [m.Extend(7)]
        assert len(router.sent) == 1

    trio.run(test)
