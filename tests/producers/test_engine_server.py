"""A real engine on real sockets: it samples, receives weights while it does, and never stays paused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from engine_support import model, prompt, reference, tensors
from server_support import SECONDS, Learner, broker, client, endpoint, engine

from streamrl_producers.engines.embedded.batch import Batch
from streamrl_producers.engines.protocol import Generate, Generated, Health, Healthy, Sampling
from streamrl_queue import TransferQueue
from streamrl_queue.errors import DeadlineExceeded, EngineError, LimitReached, WeightError
from streamrl_queue.nursery import run as queue_run
from streamrl_queue.rpc import RpcClient
from streamrl_queue.schema import Span
from streamrl_queue.weights import Abort, Resume

TOLERANCE = 2e-4  # nats


class Stand:
    """One engine, its client, and the learner."""

    def __init__(self, queue: TransferQueue, rpc: RpcClient, learner: Learner) -> None:
        self.queue, self.rpc, self.learner = queue, rpc, learner

    async def generate(
        self, tokens: Any, seconds: float = SECONDS, deadline: float = SECONDS, session: str = "", **sampling: Any
    ) -> Generated:
        data = np.asarray(tokens, np.int32).tobytes()
        request = Generate(data, Sampling(**sampling), session, seconds)
        reply = await self.rpc.call(request, deadline=deadline)
        result: Generated = reply.generated()
        return result

    async def health(self) -> Healthy:
        reply: Healthy = await self.rpc.call(Health(), deadline=SECONDS)
        return reply

    async def member(self) -> Any:
        (member,) = (await self.queue.members("engine")).members
        return member


@asynccontextmanager
async def stand(path: Path, made: Any, **settings: Any) -> AsyncIterator[Stand]:
    async with (
        broker(path) as opened,
        TransferQueue.connect(opened.address) as queue,
        engine(opened, path, made, **settings),
        client(await endpoint(queue)) as rpc,
    ):
        yield Stand(queue, rpc, Learner(rpc))


def run(test: Callable[[], Any]) -> None:
    async def bounded() -> None:
        with trio.fail_after(30):
            await test()

    trio.run(bounded)


def test_an_engine_without_weights_answers_health_but_is_not_ready(tmp_path: Path) -> None:
    async def test() -> None:
        async with stand(tmp_path, model()) as one:
            assert await one.health() == Healthy(None, "empty", False, 0, 0)
            assert not (await one.member()).ready
            with pytest.raises(EngineError, match="version None"):
                await one.generate(prompt(3))

    run(test)


def test_after_the_first_resume_it_is_ready_at_that_version_and_samples_what_the_learner_would(tmp_path: Path) -> None:
    made = model()

    async def test() -> None:
        async with stand(tmp_path, made) as one:
            await one.learner.publish(7, made)
            member = await one.member()
            assert (member.ready, member.version) == (True, 7)
            health = await one.health()
            assert (health.version, health.state, health.generated) == (7, "sampling", True)
            got = await one.generate(prompt(6), max_tokens=9)
            whole = np.concatenate([prompt(6), got.tokens])
            assert np.abs(reference(made, whole)[5:] - got.logprobs).max() < TOLERANCE
            assert got.spans == (Span(0, 7, 7),)

    run(test)


def test_weights_arrive_while_requests_run_and_spans_say_which_version_made_which_token(tmp_path: Path) -> None:
    made, other = model(), model(1)

    async def test() -> None:
        async with stand(tmp_path, made, max_tokens=4096, step_tokens=64) as one:
            await one.learner.publish(1, made)
            results: list[Generated] = []

            async def long() -> None:
                results.append(await one.generate(prompt(5), seconds=25, deadline=25, max_tokens=2000))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(long)
                while (await one.health()).running == 0:
                    await trio.lowlevel.checkpoint()
                await one.learner.publish(2, other)
            (got,) = results
            first, second = got.spans
            assert (first.start, first.version, first.context_version) == (0, 1, 1)
            assert (second.version, second.context_version) == (2, 2)
            assert 0 < second.start < len(got.tokens) == 2000
            near = slice(0, second.start + 200)
            whole = np.concatenate([prompt(5), got.tokens])[: 5 + near.stop]
            before, after = reference(made, whole)[4:], reference(other, whole)[4:]
            assert np.abs(got.logprobs[: second.start] - before[: second.start]).max() < 2e-3
            assert np.abs(got.logprobs[second.start : near.stop] - after[second.start :]).max() < 2e-3

    run(test)


def test_between_apply_and_resume_nothing_is_sampled_and_health_says_paused(tmp_path: Path) -> None:
    made = model()

    async def test() -> None:
        async with stand(tmp_path, made) as one:
            await one.learner.publish(1, made)
            await one.learner.stage(2, made)
            assert (await one.health()).state == "paused"
            got = await one.generate(prompt(4), seconds=0.05, max_tokens=5)
            assert (len(got.tokens), got.finish_reason) == (0, "aborted")
            await one.learner.resume(2)
            assert (await one.generate(prompt(4), max_tokens=5)).spans == (Span(0, 2, 2),)

    run(test)


def test_abort_puts_the_engine_back_to_the_version_before(tmp_path: Path) -> None:
    made = model()

    async def test() -> None:
        async with stand(tmp_path, made) as one:
            await one.learner.publish(1, made)
            before = await one.generate(prompt(4), max_tokens=8, seed=3)
            await one.learner.stage(2, model(1))
            await one.learner.abort(2)
            await one.learner.abort(2)  # repeating it is harmless
            after = await one.generate(prompt(4), max_tokens=8, seed=3)
            assert after.tokens.tolist() == before.tokens.tolist()
            assert np.array_equal(after.logprobs, before.logprobs)
            assert after.spans == (Span(0, 1, 1),)
            with pytest.raises(WeightError, match="version 2 was not prepared"):
                await one.rpc.call(Resume(2), deadline=SECONDS)
            with pytest.raises(WeightError, match="cannot be aborted"):
                await one.rpc.call(Abort(1, "too late"), deadline=SECONDS)

    run(test)


@pytest.mark.parametrize("committed", [True, False])
def test_a_learner_that_dies_between_apply_and_resume_leaves_no_paused_engine(tmp_path: Path, committed: bool) -> None:
    made = model()

    async def test() -> None:
        async with stand(tmp_path, made) as one:
            await one.learner.publish(await one.queue.begin_version(0, None), made)
            version = await one.queue.begin_version(1, None)
            await one.learner.stage(version, made, seconds=0.3)
            if committed:
                await one.queue.commit_version(version, "digest")
            got = await one.generate(prompt(4), max_tokens=2)
            assert got.spans[0].version == (version if committed else version - 1)

    run(test)


def test_an_offer_that_does_not_fit_is_refused_by_name_before_anything_is_sent(tmp_path: Path) -> None:
    made = model()

    async def test() -> None:
        async with stand(tmp_path, made) as one:
            state = tensors(made)
            state["model.layers.0.mlp.extra.weight"] = state.pop("model.layers.0.mlp.up_proj.weight")
            with pytest.raises(WeightError, match=r"missing model\.layers\.0\.mlp\.up_proj.*unexpected model"):
                await one.learner.prepare(1, state)
            assert (await one.health()).state == "empty"

    run(test)


def test_bytes_that_differ_from_their_digest_are_never_applied(tmp_path: Path) -> None:
    made = model()

    async def test() -> None:
        async with stand(tmp_path, made) as one:
            await one.learner.publish(1, made)
            true_manifest = one.learner.manifest

            def lying(version: int, state: Any) -> Any:
                manifest, buffers = true_manifest(version, state)
                buffers[1] = buffers[1].clone()
                buffers[1][5] ^= 1
                return manifest, buffers

            one.learner.manifest = lying  # type: ignore[method-assign]
            with pytest.raises(WeightError, match="bucket 1"):
                await one.learner.stage(2, model(1))
            await one.learner.abort(2)
            assert (await one.generate(prompt(3), max_tokens=2)).spans == (Span(0, 1, 1),)

    run(test)


def test_a_probe_sees_what_digests_do_not(tmp_path: Path) -> None:
    made = model()

    async def test() -> None:
        async with stand(tmp_path, made) as one:
            await trio.to_thread.run_sync(await one.learner.prepare(1, tensors(made)))
            (applied,) = await one.learner.apply(1, model(1))
            assert applied.probe_error > 0.1

    run(test)


def test_a_learner_that_never_sends_is_named_by_the_deadline_and_the_engine_samples_on(tmp_path: Path) -> None:
    made = model()

    async def test() -> None:
        async with stand(tmp_path, made) as one:
            await one.learner.publish(1, made)
            await one.learner.prepare(2, tensors(made), seconds=0.2)
            with pytest.raises((DeadlineExceeded, WeightError), match="version 2"):
                await one.learner.apply(2, made)
            assert (await one.generate(prompt(3), max_tokens=2)).finish_reason == "length"
            await one.learner.publish(3, made)

    run(test)


def test_the_version_in_force_may_be_sent_again_to_repair_an_engine(tmp_path: Path) -> None:
    made = model()

    async def test() -> None:
        async with stand(tmp_path, made) as one:
            await one.learner.publish(1, made)
            await one.learner.publish(1, made)
            assert (await one.generate(prompt(3), max_tokens=2)).spans == (Span(0, 1, 1),)

    run(test)


def test_a_caller_that_gives_up_frees_its_slot_and_a_deadline_brings_what_there_is(tmp_path: Path) -> None:
    made = model()

    async def test() -> None:
        async with stand(tmp_path, made, slots=1, step_tokens=8, max_tokens=100_000) as one:
            await one.learner.publish(1, made)
            with trio.move_on_after(0.05):
                await one.generate(prompt(3), max_tokens=90_000)
            got = await one.generate(prompt(3), seconds=0.1, max_tokens=90_000)
            assert got.finish_reason == "aborted"
            assert 0 < len(got.tokens) == len(got.logprobs) < 90_000

    run(test)


def test_a_prompt_beyond_the_context_is_refused_as_a_limit(tmp_path: Path) -> None:
    made = model()

    async def test() -> None:
        async with stand(tmp_path, made) as one:
            await one.learner.publish(1, made)
            with pytest.raises(LimitReached, match=r"engine\.max_tokens"):
                await one.generate(prompt(128))

    run(test)


def test_weights_that_give_nan_fail_the_request_and_not_the_engine(tmp_path: Path) -> None:
    made, broken = model(), model()
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan

    async def test() -> None:
        async with stand(tmp_path, made) as one:
            (applied,) = await one.learner.stage(1, broken)
            assert np.isnan(applied.probe_error)
            await one.learner.resume(1)
            with pytest.raises(EngineError, match="log-prob nan"):
                await one.generate(prompt(3), max_tokens=2)
            await one.learner.publish(2, made)
            assert (await one.generate(prompt(3), max_tokens=2)).finish_reason == "length"

    run(test)


def test_the_first_error_of_the_decode_loop_ends_the_engine_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model()

    def explode(self: Batch) -> None:
        raise MemoryError("no room for the cache")

    async def test() -> None:
        async with stand(tmp_path, made) as one:
            await one.learner.publish(1, made)
            monkeypatch.setattr(Batch, "step", explode)
            await one.generate(prompt(3))

    with pytest.raises(MemoryError, match="no room for the cache"):
        queue_run(test)
