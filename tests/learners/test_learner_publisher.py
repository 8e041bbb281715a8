"""A version exists when every engine that is not fenced has proved it; otherwise it never does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch
import trio
from learner_engines import FakeEngine, FakeVersions
from learner_fakes import make_policy

from streamrl_learners.config import LearnerConfig
from streamrl_learners.publisher import Courier, Publisher, backend_of
from streamrl_learners.ranks import Ranks
from streamrl_learners.snapshot import Snapshot, take
from streamrl_queue.errors import WeightError
from streamrl_queue.weights import host_store


def snapshot(step: int) -> Snapshot:
    taken = take(make_policy(seed=step), step, Ranks())
    assert taken is not None
    return taken


def run(body: Callable[[], Awaitable[None]], seconds: float = 30.0) -> None:
    """Run with a limit; errors of background tasks arrive bare, as they do from the queue's portal."""

    async def limited() -> None:
        with trio.fail_after(seconds):
            await body()

    try:
        trio.run(limited)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


@asynccontextmanager
async def publishing(*engines: FakeEngine, **changes) -> AsyncIterator[tuple[Courier, FakeVersions]]:
    config = LearnerConfig(**({"publish_seconds": 5.0, "wait_seconds": 1.0} | changes))
    store = host_store()
    queue = FakeVersions(*engines)
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.serve())
        courier = Courier(queue, config, f"127.0.0.1:{store.port}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(courier.run)
            yield courier, queue
            nursery.cancel_scope.cancel()


async def publish(courier: Courier, step: int) -> None:
    await courier.accept(snapshot(step))
    assert await courier.settled(20.0)


def holds(engine: FakeEngine, step: int) -> bool:
    mine, theirs = engine.policy.lm.state_dict(), make_policy(seed=step).lm.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_version_reaches_every_engine_and_is_committed_once():
    a, b = FakeEngine("engine-0"), FakeEngine("engine-1")

    async def body() -> None:
        async with publishing(a, b) as (courier, queue):
            await publish(courier, 0)
            await publish(courier, 1)
            assert queue.committed == [1, 2]
            assert queue.all[2].parent == 1
            assert courier.last is not None
            assert courier.last[:3] == (2, 1, 2)
            assert courier.last.pause_seconds == 0.5

    run(body)
    for engine in (a, b):
        assert holds(engine, 1)
        assert engine.version == 2
        assert engine.log == ["Prepare", "Apply", "Resume"] * 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("prepare", "prepare: missing tensors: model.norm.weight"),
        ("apply", "apply: out of memory"),
        ("digest", "apply: digests: expected"),
        ("probe", r"apply: probe: log-probs differ by"),
    ],
)
def test_an_engine_that_fails_is_fenced_and_the_rest_get_a_fresh_version(fault: str, words: str):
    good, bad = FakeEngine("engine-0"), FakeEngine("engine-1", fault)

    async def body() -> None:
        async with publishing(good, bad) as (courier, queue):
            await publish(courier, 0)
            assert queue.committed == [2]
            session, reason = queue.fenced[0]
            assert session == bad.session
            assert words.split(": ")[0] in reason
            assert "engine-1" in reason

    run(body)
    assert good.version == 2
    assert bad.version == 0
    assert holds(good, 0)
    assert "Abort" in bad.log
    assert good.log[:3] == (["Prepare", "Abort", "Prepare"] if fault == "prepare" else ["Prepare", "Apply", "Abort"])


def test_an_engine_that_does_not_answer_costs_its_deadline_and_no_more():
    good, bad = FakeEngine("engine-0"), FakeEngine("engine-1", "hang")

    async def body() -> None:
        async with publishing(good, bad, publish_seconds=1.5) as (courier, queue):
            await publish(courier, 0)
            assert queue.committed == [2]
            assert "Prepare from engine-1" in queue.fenced[0][1]

    run(body)


def test_an_engine_that_leaves_ends_its_phase_at_once():
    good, bad = FakeEngine("engine-0"), FakeEngine("engine-1", "vanish")

    async def body() -> None:
        async with publishing(good, bad, publish_seconds=60.0) as (courier, queue):
            await publish(courier, 0)
            assert queue.committed == [2]
            assert queue.fenced == []

    run(body, seconds=15.0)


def test_a_broadcast_that_nobody_is_to_blame_for_is_tried_again():
    """Slow (about 1 s): the broadcast fails by its deadline."""
    engine = FakeEngine("engine-0", "never joins", times=1)

    async def body() -> None:
        async with publishing(engine, publish_seconds=0.5) as (courier, queue):
            await publish(courier, 0)
            assert queue.committed == [2]

    run(body)
    assert holds(engine, 0)


def test_broadcasts_that_always_fail_end_the_run():
    """Slow (about 2 s): three broadcasts fail by their deadline."""
    engine = FakeEngine("engine-0", "never joins")

    async def body() -> None:
        async with publishing(engine, publish_seconds=0.5) as (courier, _):
            await publish(courier, 3)

    with pytest.raises(WeightError, match=r"publish of step 3: no broadcast succeeds .*transfer group: transfer:"):
        run(body)


def test_fewer_engines_than_required_end_the_run_with_what_was_tried():
    """Slow (about 1 s): waits `wait_seconds` for another engine."""
    good, bad = FakeEngine("engine-0"), FakeEngine("engine-1", "apply")

    async def body() -> None:
        async with publishing(good, bad, min_engines=2, wait_seconds=0.5) as (courier, _):
            await publish(courier, 7)

    with pytest.raises(WeightError, match=r"publish of step 7: 2 engines in the run, 1 of them fenced.*out of memory"):
        run(body)
    assert good.version == 0


def test_the_first_publish_waits_for_engines_to_come():
    engine = FakeEngine("engine-0")

    async def body() -> None:
        async with publishing(wait_seconds=20.0) as (courier, queue):
            await courier.accept(snapshot(0))
            async with engine.serve():
                queue.join(engine)
                assert await courier.settled(20.0)
            assert queue.committed == [1]

    run(body)


def test_a_joiner_gets_the_committed_version_without_a_fresh_one():
    first, joiner = FakeEngine("engine-0"), FakeEngine("engine-1")

    async def body() -> None:
        async with publishing(first) as (courier, queue):
            await publish(courier, 0)
            async with joiner.serve():
                queue.join(joiner)
                await joiner.at_least(1)
            assert list(queue.all) == [1]
            assert first.log == ["Prepare", "Apply", "Resume"]

    run(body)
    assert holds(joiner, 0)


@pytest.mark.parametrize("fault", ["apply", "resume"])
def test_a_failed_engine_is_repaired_with_the_committed_version(fault: str):
    """Slow (about 1 s): the repair comes after its back-off."""
    good, bad = FakeEngine("engine-0"), FakeEngine("engine-1", fault, times=1)

    async def body() -> None:
        async with publishing(good, bad) as (courier, queue):
            await publish(courier, 0)
            committed = queue.committed[-1]
            await bad.at_least(committed)
            await publish(courier, 1)
            assert queue.committed[-1] == bad.version == good.version

    run(body)
    assert holds(bad, 1)


def test_a_repair_gives_way_to_a_publish():
    good, joiner = FakeEngine("engine-0"), FakeEngine("engine-1", "hang", times=1)

    async def body() -> None:
        async with publishing(good, publish_seconds=60.0) as (courier, queue):
            await publish(courier, 0)
            async with joiner.serve():
                queue.join(joiner)
                await joiner.asked.wait()
                await publish(courier, 1)
                assert joiner.version == good.version == 2

    run(body, seconds=15.0)


def test_a_resumed_run_goes_on_from_the_version_in_force():
    engine = FakeEngine("engine-0")

    async def body() -> None:
        async with publishing(engine) as (courier, queue):
            await publish(courier, 0)
            store = host_store()
            again = Courier(queue, LearnerConfig(publish_seconds=5.0), f"127.0.0.1:{store.port}")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(again.run)
                await publish(again, 0)
                nursery.cancel_scope.cancel()
            assert queue.all[2].parent == 1

    run(body)


def test_a_stop_request_does_not_wait_for_an_unfinished_publish():
    class Portal:
        def start_soon(self, function, *args):
            pass

        def call(self, function, *args):
            return False if function.__name__ == "settled" else None

    class Queue:
        portal, aio, report = Portal(), None, print

    publisher = Publisher(Queue(), LearnerConfig(), Ranks(), should_stop=lambda: True)
    publisher.publish(make_policy(), 1)
    publisher.finish()


def test_a_snapshot_is_a_copy_that_training_does_not_touch():
    policy = make_policy()
    taken = take(policy, 0, Ranks())
    assert taken is not None
    before = [buffer.clone() for buffer in taken.buffers]
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, taken.buffers, strict=True))
    assert taken.manifest(3, None).names[0] == "model.embed_tokens.weight"


def test_weights_go_by_what_the_device_suggests_unless_told():
    assert backend_of(LearnerConfig()) == "gloo"
    assert backend_of(LearnerConfig(device="cuda")) == "nccl"
    assert backend_of(LearnerConfig(device="cuda", transfer="gloo")) == "gloo"
