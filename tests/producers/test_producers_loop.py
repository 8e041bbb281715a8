"""The producer against a real queue: every leased row is written once, or goes back with its reason."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from engine_support import model, reference
from fake_engine import Answer, FakeEngine, fake_engine, generated
from server_support import SECONDS, Learner, broker, client, endpoint, engine

from streamrl_agents.agent import load_agent
from streamrl_agents.template import ChatTemplate
from streamrl_agents.vocabulary import build_tokenizer, write_model_files
from streamrl_producers import producer as producer_module
from streamrl_producers.config import RolloutConfig
from streamrl_producers.engines.protocol import Generate, Generated
from streamrl_producers.producer import run_producer
from streamrl_queue import Broker, Lease, Task, TransferQueue, Waiting, schema
from streamrl_queue.errors import EngineError, LimitReached

AGENT = load_agent("streamrl_agents.environments.lookup:Lookup")
CONFIG = RolloutConfig(concurrency=4, max_turn_tokens=16, max_tokens=96, turn_seconds=5.0)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = tmp_path_factory.mktemp("model")
    write_model_files(folder, build_tokenizer(AGENT))
    return ChatTemplate.load(folder)


def saying(template: ChatTemplate, text: str, version: int = 3) -> Answer:
    """Ends every turn with `text`."""

    async def answer(request: Generate) -> Generated:
        return generated([*template.encode(text), template.stop_ids[0]], version, "stop")

    return answer


def following(template: ChatTemplate) -> Answer:
    """A perfect policy: looks up what it was told to, then answers."""

    async def answer(request: Generate) -> Generated:
        said = template.decode(np.frombuffer(request.tokens, "<i4").tolist()).rsplit("<|end|>", 2)[-2]
        words = said.split()
        call = f'<tool_call>{{"name": "get", "arguments": {{"key": "{words[-1]}"}}}}</tool_call>'
        text = f"Answer: {words[-1]}" if words[-2].endswith("value") else call
        return generated([*template.encode(text), template.stop_ids[0]], 3, "stop")

    return answer


def tasks(n: int) -> list[Task]:
    rng = random.Random(0)
    return [Task(env="lookup", task=AGENT.sample_task(rng), index=i) for i in range(n)]


class Stand:
    def __init__(self, opened: Broker, queue: TransferQueue, engine: FakeEngine, template: ChatTemplate) -> None:
        self.opened, self.queue, self.engine, self.template = opened, queue, engine, template
        self.stops = trio.CancelScope()
        self.stopped = trio.Event()

    async def produce(self, config: RolloutConfig) -> None:
        async with TransferQueue.connect(self.opened.address, role="producer", name="producer-0") as queue:
            with self.stops:
                await run_producer(queue, agent=AGENT, template=self.template, config=config)
        self.stopped.set()

    async def rollouts(self, n: int) -> list[Lease]:
        """Leases of the next stage that hold `n` rows together."""
        leases: list[Lease] = []
        while sum(len(lease.rows) for lease in leases) < n:
            lease = await self.queue.lease("reward", rows=n, wait=SECONDS)
            assert lease is not None
            leases.append(lease)
        return leases


@asynccontextmanager
async def stand(
    path: Path, template: ChatTemplate, answer: Answer, config: RolloutConfig = CONFIG
) -> AsyncIterator[Stand]:
    async with (
        broker(path) as opened,
        TransferQueue.connect(opened.address) as queue,
        fake_engine(opened, path, "engine-0", answer) as engine,
        trio.open_nursery() as nursery,
    ):
        made = Stand(opened, queue, engine, template)
        nursery.start_soon(made.produce, config)
        yield made
        nursery.cancel_scope.cancel()


def run(test: Callable[[], Any]) -> None:
    async def bounded() -> None:
        with trio.fail_after(30):
            await test()

    trio.run(bounded)


def columns(leases: list[Lease], name: str) -> list[Any]:
    return [value for lease in leases if lease.batch for value in lease.batch.column(name).to_pylist()]


def test_calls_that_failed_are_counted_in_the_gauges(tmp_path: Path, template: ChatTemplate) -> None:
    async def test() -> None:
        async with stand(tmp_path, template, saying(template, "<tool_call>nothing</tool_call>")) as one:
            await one.queue.put(tasks(2))
            leases = await one.rollouts(2)
            errors = sum(dict(metrics)["parse_errors"] for metrics in columns(leases, "metrics"))
            assert errors > 0
            gauges: dict[str, float] = {}
            while gauges.get("episodes") != 2:
                (producer,) = (await one.queue.members("producer", wait=0.1)).members
                gauges = producer.gauges
            assert gauges["parse_errors"] == errors
            assert gauges["parse_error_episodes"] == 2
            assert gauges["tool_errors"] == gauges["tool_error_episodes"] == 0

    run(test)


def test_every_row_is_played_and_written_once(tmp_path: Path, template: ChatTemplate) -> None:
    async def test() -> None:
        async with stand(tmp_path, template, following(template)) as one:
            await one.queue.put(tasks(5), members=2)
            leases = await one.rollouts(10)
            assert sorted(row.row for lease in leases for row in lease.rows) == sorted(set(columns(leases, "row")))
            assert columns(leases, "status") == ["completed"] * 10
            assert columns(leases, "outcome") == [1.0] * 10
            for lease in leases:
                assert lease.batch is not None
                mask, logprobs = (schema.arrays(lease.batch.column(name)) for name in ("mask", "logprobs"))
                for m, lp, spans in zip(mask, logprobs, schema.spans(lease.batch.column("versions")), strict=True):
                    assert np.isfinite(lp[m == 1]).all()
                    assert np.isnan(lp[m == 0]).all()
                    assert {span.version for span in spans} == {3}
            (await one.queue.statistics()).check()

    run(test)


def test_eval_rows_are_sampled_greedily_and_say_so(tmp_path: Path, template: ChatTemplate) -> None:
    async def test() -> None:
        config = RolloutConfig(concurrency=4, max_turn_tokens=16, max_tokens=96, temperature=0.7, top_p=0.9)
        async with stand(tmp_path, template, saying(template, "Answer: 1"), config) as one:
            await one.queue.put(tasks(1), split="eval")
            (lease,) = await one.rollouts(1)
            assert dict(columns([lease], "sampling")[0])["temperature"] == 0.0
            await one.queue.put(tasks(1), split="train")
            (lease,) = await one.rollouts(1)
            assert dict(columns([lease], "sampling")[0]) == pytest.approx(
                {"temperature": 0.7, "top_p": 0.9, "top_k": 0.0}
            )
            greedy, sampled = (request.sampling for request in one.engine.asked)
            assert (greedy.temperature, greedy.top_p) == (0.0, 1.0)
            assert (sampled.temperature, sampled.top_p) == pytest.approx((0.7, 0.9))
            assert greedy.stop_ids == template.stop_ids

    run(test)


def test_no_more_episodes_run_than_configured(tmp_path: Path, template: ChatTemplate) -> None:
    async def test() -> None:
        running, most, go = 0, 0, trio.Event()
        say = saying(template, "Answer: 1")

        async def counted(request: Generate) -> Generated:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == CONFIG.concurrency:
                go.set()
            await go.wait()
            running -= 1
            return await say(request)

        async with stand(tmp_path, template, counted) as one:
            await one.queue.put(tasks(12))
            await one.rollouts(12)
            assert most == CONFIG.concurrency

    run(test)


def test_a_row_that_no_engine_can_play_goes_back_and_is_played_again(tmp_path: Path, template: ChatTemplate) -> None:
    async def test() -> None:
        failures = 3
        say = saying(template, "Answer: 1")

        async def flaky(request: Generate) -> Generated:
            nonlocal failures
            if failures:
                failures -= 1
                raise EngineError("out of memory")
            return await say(request)

        async with stand(tmp_path, template, flaky) as one:
            await one.queue.put(tasks(1))
            leases = await one.rollouts(1)
            assert columns(leases, "status") == ["completed"]
            sessions = [request.session for request in one.engine.asked]
            assert len(set(sessions[:3])) == 1
            assert sessions[3] != sessions[0]  # another attempt is another session

    run(test)


@pytest.mark.parametrize(
    ("error", "asked"), [(EngineError("out of memory"), 9), (LimitReached("does not fit the context"), 1)]
)
def test_a_row_that_can_never_be_played_is_dropped_and_counted(
    tmp_path: Path, template: ChatTemplate, error: Exception, asked: int
) -> None:
    async def broken(request: Generate) -> Generated:
        raise error

    async def test() -> None:
        async with stand(tmp_path, template, broken) as one:
            await one.queue.put(tasks(1))
            while not (statistics := await one.queue.statistics()).dropped:
                await trio.lowlevel.checkpoint()
            assert statistics.dropped == {type(error).__name__: 1}
            assert len(one.engine.asked) == asked
            statistics.check()

    run(test)


def test_rows_played_on_a_real_engine_carry_the_logprobs_that_transformers_computes(
    tmp_path: Path, template: ChatTemplate
) -> None:
    made = model(vocab_size=template.tokenizer.get_vocab_size())

    async def test() -> None:
        async with (
            broker(tmp_path) as opened,
            TransferQueue.connect(opened.address) as queue,
            engine(opened, tmp_path, made, "engine-0"),
            client(await endpoint(queue)) as rpc,
            TransferQueue.connect(opened.address, role="producer") as session,
            trio.open_nursery() as nursery,
        ):
            await Learner(rpc).publish(await queue.begin_version(0, None), made)
            config = RolloutConfig(concurrency=8, max_turn_tokens=16, max_tokens=96)
            nursery.start_soon(partial(run_producer, session, agent=AGENT, template=template, config=config))
            await queue.put(tasks(8), members=2)
            rows = 0
            while rows < 16:
                lease = await queue.lease("reward", rows=16, wait=SECONDS)
                assert lease is not None
                assert lease.batch is not None
                arrays = (schema.arrays(lease.batch.column(name)) for name in ("tokens", "mask", "logprobs"))
                for tokens, mask, logprobs in zip(*arrays, strict=True):
                    sampled = np.flatnonzero(mask)
                    assert len(sampled)
                    assert np.abs(reference(made, tokens)[sampled - 1] - logprobs[sampled]).max() < 2e-4
                rows += len(lease.rows)
            nursery.cancel_scope.cancel()

    run(test)


def test_no_row_is_leased_while_no_engine_is_ready(tmp_path: Path, template: ChatTemplate) -> None:
    async def test() -> None:
        async with (
            broker(tmp_path) as opened,
            TransferQueue.connect(opened.address, role="producer") as queue,
            trio.open_nursery() as nursery,
        ):
            await queue.put(tasks(1))
            nursery.start_soon(partial(run_producer, queue, agent=AGENT, template=template, config=CONFIG))
            while (await queue.members("producer")).members[0].activity != "waits for an engine":
                await trio.lowlevel.checkpoint()
            assert (await queue.statistics()).leased == 0
            nursery.cancel_scope.cancel()

    run(test)


def test_a_stopping_producer_gives_its_rows_back_at_once(tmp_path: Path, template: ChatTemplate) -> None:
    async def test() -> None:
        started = trio.Event()

        async def hang(request: Generate) -> Generated:
            started.set()
            await trio.sleep_forever()
            raise AssertionError

        full = RolloutConfig(concurrency=3, max_turn_tokens=16, max_tokens=96)
        async with stand(tmp_path, template, hang, full) as one:
            await one.queue.put(tasks(3))
            await started.wait()
            assert (await one.queue.statistics()).leased == 3
            one.stops.cancel()
            await one.stopped.wait()
            assert (await one.queue.statistics()).leased == 0
            lease = await one.queue.lease("rollout", rows=3, at_least=3, wait=SECONDS)
            assert lease is not None
            assert [row.attempt for row in lease.rows] == [1, 1, 1]  # given back, not lost

    run(test)


def test_a_long_episode_keeps_its_lease(
    tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    extended: list[int] = []

    async def extend(self: TransferQueue, lease: Any) -> tuple[int, ...]:
        extended.append(lease.id)
        if len(extended) == 3:
            enough.set()
        return tuple(lease.ids)

    monkeypatch.setattr(TransferQueue, "extend", extend)
    monkeypatch.setattr(producer_module, "EXTENSIONS", 5000)
    enough = trio.Event()

    async def test() -> None:
        say = saying(template, "Answer: 1")

        async def slow(request: Generate) -> Generated:
            await enough.wait()
            return await say(request)

        async with stand(tmp_path, template, slow) as one:
            await one.queue.put(tasks(1))
            assert columns(await one.rollouts(1), "status") == ["completed"]
            assert len(set(extended)) == 1

    run(test)


def test_rows_of_a_lease_that_was_lost_are_not_written(tmp_path: Path, template: ChatTemplate) -> None:
    async def test() -> None:
        started, go = trio.Event(), trio.Event()
        say = saying(template, "Answer: 1")

        async def slow(request: Generate) -> Generated:
            if not started.is_set():
                started.set()
                await go.wait()
            return await say(request)

        async with stand(tmp_path, template, slow) as one:
            await one.queue.put(tasks(1))
            await started.wait()
            await one.queue.end_session("producer-0")
            lease = await one.queue.lease("rollout", rows=1, wait=SECONDS)
            assert lease is not None
            go.set()
            await one.queue.release(lease)
            leases = await one.rollouts(1)
            assert leases[0].rows[0].attempt > 0
            (await one.queue.statistics()).check()

    run(test)


def test_a_producer_tells_the_row_turn_and_engine_that_it_waits_for(tmp_path: Path, template: ChatTemplate) -> None:
    async def never(request: Generate) -> Generated:
        await trio.sleep_forever()
        raise AssertionError

    async def test() -> None:
        async with stand(tmp_path, template, never) as one:
            (row,) = (await one.queue.put(tasks(1))).rows
            waits: tuple[Waiting, ...] = ()
            while not any(wait.what == "waits for turn 1" for wait in waits):
                producers = (await one.queue.members("producer", wait=0.1)).members
                waits = producers[0].waits if producers else ()
            assert [(wait.row, wait.on) for wait in waits] == [(row, "engine")]

    run(test)


def test_a_producer_without_an_engine_says_so(tmp_path: Path, template: ChatTemplate) -> None:
    async def test() -> None:
        async with stand(tmp_path, template, following(template)) as one:
            await one.engine.queue.announce(ready=False)
            await one.queue.put(tasks(1))
            waits: tuple[Waiting, ...] = ()
            while ("waits for a ready engine", "engine") not in [(wait.what, wait.on) for wait in waits]:
                producers = (await one.queue.members("producer", wait=0.1)).members
                waits = producers[0].waits if producers else ()

    run(test)
