"""Requests find an engine, keep to it, and survive it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from engine_support import model
from fake_engine import Answer, FakeEngine, counting, fake_engine, generated
from server_support import SECONDS, Learner, broker, client, endpoint, engine

from streamrl_producers.engines import fleet as fleet_module
from streamrl_producers.engines.fleet import EngineFleet
from streamrl_producers.engines.protocol import Generate, Generated, Health, Sampling
from streamrl_queue import TransferQueue
from streamrl_queue.errors import DeadlineExceeded, EngineError, LimitReached
from streamrl_queue.schema import Span

PROMPT = np.array([5, 6], np.int32)


async def hang(request: Generate) -> Generated:
    await trio.sleep_forever()
    raise AssertionError


class Stand:
    def __init__(self, fleet: EngineFleet, queue: TransferQueue, engines: list[FakeEngine]) -> None:
        self.fleet, self.queue, self.engines = fleet, queue, engines

    async def generate(self, session: str = "s", deadline: float = SECONDS, **sampling: Any) -> Generated:
        return await self.fleet.generate(PROMPT, Sampling(**sampling), session=session, deadline=deadline)

    async def session_of(self, name: str) -> str:
        return next(m.session for m in (await self.queue.members("engine")).members if m.name == name)


@asynccontextmanager
async def stand(path: Path, *answers: Any, slice_tokens: int = 100) -> AsyncIterator[Stand]:
    """A fleet over one fake engine per answer, all of them connected."""
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(broker(path))
        queue = await stack.enter_async_context(TransferQueue.connect(opened.address))
        engines = [
            await stack.enter_async_context(fake_engine(opened, path, f"engine-{i}", answer))
            for i, answer in enumerate(answers)
        ]
        fleet = await stack.enter_async_context(EngineFleet.watch(queue, slice_tokens=slice_tokens))
        while fleet.statistics().usable < len(engines):
            await trio.lowlevel.checkpoint()
        yield Stand(fleet, queue, engines)


def run(test: Callable[[], Any]) -> None:
    async def bounded() -> None:
        with trio.fail_after(30):
            await test()

    trio.run(bounded)


@pytest.mark.parametrize("how", ["dies", "is fenced"])
def test_the_request_of_a_lost_engine_goes_on_elsewhere_with_the_tokens_it_had(tmp_path: Path, how: str) -> None:
    served: list[int] = []

    def engine_of(number: int) -> Answer:
        async def answer(request: Generate) -> Generated:
            served.append(number)
            if number != served[0] or len(served) <= 2:
                return await counting(1 if number == served[0] else 2)(request)
            if how == "dies":
                one.engines[number].dies.cancel()
            else:
                await one.queue.fence(await one.session_of(f"engine-{number}"), "test")
            return await hang(request)

        return answer

    async def test() -> None:
        nonlocal one
        async with stand(tmp_path, engine_of(0), engine_of(1), slice_tokens=4) as one:
            got = await one.generate(max_tokens=10, seed=1)
            assert got.tokens.tolist() == list(range(7, 17))
            assert len(got.logprobs) == 10
            assert got.spans == (Span(0, 1, 1), Span(8, 2, 2))
            (asked,) = one.engines[1 - served[0]].asked
            assert np.frombuffer(asked.tokens, "<i4").tolist() == [5, 6, *range(7, 15)]
            assert (asked.sampling.max_tokens, asked.sampling.seed_position) == (2, 8)
            assert one.fleet.statistics().moved == 1

    one: Stand
    run(test)


def test_a_session_keeps_to_its_engine_and_others_go_where_least_is_outstanding(tmp_path: Path) -> None:
    async def test() -> None:
        release = trio.Event()

        async def slow(request: Generate) -> Generated:
            if request.session == "slow":
                await release.wait()
            return await counting()(request)

        async with stand(tmp_path, slow, slow) as one, trio.open_nursery() as nursery:
            nursery.start_soon(one.generate, "slow")
            while not any(e.asked for e in one.engines):
                await trio.lowlevel.checkpoint()
            busy, idle = sorted(one.engines, key=lambda e: -len(e.asked))
            for _ in range(3):
                await one.generate("a", max_tokens=3)
            assert [r.session for r in idle.asked] == ["a", "a", "a"]
            release.set()
            while one.fleet.statistics().finished < 4:
                await trio.lowlevel.checkpoint()
            for _ in range(2):
                await one.generate("a", max_tokens=3)
                await one.generate("slow", max_tokens=3)
            assert {r.session for r in idle.asked} == {"a"}
            assert {r.session for r in busy.asked} == {"slow"}

    run(test)


def test_without_a_ready_engine_a_request_waits_and_its_deadline_says_for_what(tmp_path: Path) -> None:
    async def test() -> None:
        async with stand(tmp_path) as one:
            with pytest.raises(DeadlineExceeded, match="a ready engine"):
                await one.generate(deadline=0.05)

    run(test)


def test_a_request_that_waited_starts_when_an_engine_becomes_ready(tmp_path: Path) -> None:
    async def test() -> None:
        async with stand(tmp_path, counting()) as one:
            await one.engines[0].queue.announce(ready=False)
            while one.fleet.statistics().usable:
                await trio.lowlevel.checkpoint()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.generate)
                await one.engines[0].queue.announce(ready=True, version=2)
            assert one.fleet.statistics().finished == 1

    run(test)


def test_a_deadline_names_the_engine_that_did_not_answer(tmp_path: Path) -> None:
    async def test() -> None:
        async with stand(tmp_path, hang) as one:
            with pytest.raises(DeadlineExceeded, match="engine-0"):
                await one.generate(deadline=0.1)

    run(test)


def test_a_request_that_fails_everywhere_ends_with_the_last_error(tmp_path: Path) -> None:
    async def broken(request: Generate) -> Generated:
        raise EngineError("logits are not finite")

    async def test() -> None:
        async with stand(tmp_path, broken, broken) as one:
            with pytest.raises(EngineError, match=r"3 engines.*logits are not finite"):
                await one.generate()
            assert sum(len(e.asked) for e in one.engines) == 3

    run(test)


def test_a_prompt_beyond_the_context_is_not_tried_elsewhere(tmp_path: Path) -> None:
    async def full(request: Generate) -> Generated:
        raise LimitReached("context")

    async def test() -> None:
        async with stand(tmp_path, full, full) as one:
            with pytest.raises(LimitReached):
                await one.generate()
            assert sum(len(e.asked) for e in one.engines) == 1

    run(test)


def test_an_answer_that_fills_the_context_or_stops_is_not_asked_for_more(tmp_path: Path) -> None:
    async def short(request: Generate) -> Generated:
        return generated([7, 8], finish="stop" if request.session == "stop" else "length")

    async def test() -> None:
        async with stand(tmp_path, short, slice_tokens=4) as one:
            for session, reason in (("stop", "stop"), ("full", "length")):
                got = await one.generate(session, max_tokens=50)
                assert (got.tokens.tolist(), got.finish_reason) == ([7, 8], reason)
            assert len(one.engines[0].asked) == 2

    run(test)


def test_an_engine_that_answers_messages_but_samples_nothing_is_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "PROBE_SECONDS", 0.02)

    async def test() -> None:
        async with stand(tmp_path, hang, counting()) as one:
            one.engines[0].sick = True
            while (await one.queue.members("engine")).members[0].ready:
                await trio.lowlevel.checkpoint()
            assert len((await one.generate(max_tokens=5)).tokens) == 5

    run(test)


def test_with_real_engines_a_lost_one_costs_no_token_and_seeds_go_on(tmp_path: Path) -> None:
    made = model()

    async def test() -> None:
        async with (
            broker(tmp_path) as opened,
            TransferQueue.connect(opened.address) as queue,
            engine(opened, tmp_path, made, "engine-0", max_tokens=2048) as dies,
            engine(opened, tmp_path, made, "engine-1", max_tokens=2048),
            client(await endpoint(queue, "engine-0")) as first,
            client(await endpoint(queue, "engine-1")) as second,
            EngineFleet.watch(queue, slice_tokens=50) as fleet,
        ):
            learner = Learner(first, second)
            await learner.publish(1, made)
            wanted = Sampling(max_tokens=600, seed=4)
            expected = await fleet.generate(PROMPT, wanted, session="a", deadline=SECONDS)
            results: list[Generated] = []

            async def ask(session: str) -> None:
                results.append(await fleet.generate(PROMPT, wanted, session=session, deadline=SECONDS))

            async with trio.open_nursery() as nursery:
                for i in range(4):
                    nursery.start_soon(ask, f"s{i}")
                while (await first.call(Health(), deadline=SECONDS)).running == 0:
                    await trio.lowlevel.checkpoint()
                dies.cancel()
            for got in results:
                assert got.tokens.tolist() == expected.tokens.tolist()
                assert np.abs(got.logprobs - expected.logprobs).max() < 1e-3
                assert got.spans == (Span(0, 1, 1),)
            assert fleet.statistics().moved > 0

    run(test)
