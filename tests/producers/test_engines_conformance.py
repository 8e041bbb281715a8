"""What an engine behind HTTP must do, asked of fast doubles and, with `make test-engines`, of the real servers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from engine_doubles import CONTEXT, VOCAB, SGLangDouble, VLLMDouble, served
from engine_servers import make_model, real_server

from streamrl_producers.config import ServerEngine, SGLangEngine, VLLMEngine
from streamrl_producers.engines.adapter import UNPUBLISHED, Adapter
from streamrl_producers.engines.protocol import Sampling
from streamrl_producers.engines.sglang import RESERVED_TOKENS, SGLang
from streamrl_producers.engines.vllm import VLLM
from streamrl_queue.errors import EngineError, LimitReached, SchemaError

PROMPT = np.array([3, 5, 8, 13, 21], np.int32)
SECONDS = 60.0
NATS = 1e-4


class Server:
    """A server under test: how to reach it, and the model whose weights it has."""

    def __init__(self, kind: type[Adapter], url: str, model: Any, version: int) -> None:
        self.kind, self.url, self.model, self.version = kind, url, model, version

    def adapter(self) -> Adapter:
        return self.kind(self.url, vocab_size=VOCAB)

    async def publish(self, adapter: Adapter, model: Any) -> None:
        self.version += 1
        tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
        await adapter.update(tensors, self.version, SECONDS)
        self.model = model

    def logprobs(self, ids: list[int], temperature: float = 1.0) -> Any:
        """Transformers' own log-probs of `ids[1:]`."""
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].float() / temperature
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def real(kind: type[Adapter], config: ServerEngine, path: Path) -> Iterator[Server]:
    """A real server with the weights of `make_model(1)`."""
    with real_server(config, path) as url:
        server = Server(kind, url, None, UNPUBLISHED)

        async def publish() -> None:
            async with server.adapter() as adapter:
                await server.publish(adapter, make_model(1))

        trio.run(publish)
        yield server


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = SGLangEngine(max_tokens=CONTEXT - RESERVED_TOKENS, slots=16)
    yield from real(SGLang, config, tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = VLLMEngine(max_tokens=CONTEXT, slots=16)
    yield from real(VLLM, config, tmp_path_factory.mktemp("vllm"))


REAL = [pytest.param(name, marks=pytest.mark.engines) for name in ("sglang", "vllm")]


@pytest.fixture(params=["sglang-double", "vllm-double", *REAL])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    match request.param:
        case "sglang-double":
            with served(SGLangDouble(make_model(1), version="1")) as url:
                yield Server(SGLang, url, make_model(1), 1)
        case "vllm-double":
            with served(VLLMDouble(make_model(1))) as url:
                yield Server(VLLM, url, make_model(1), UNPUBLISHED)
        case name:
            yield request.getfixturevalue(name)


only_sglang = pytest.mark.parametrize("server", ["sglang-double", REAL[0]], indirect=True)


def with_adapter(server: Server, body: Any) -> None:
    async def main() -> None:
        with trio.fail_after(SECONDS):
            async with server.adapter() as adapter:
                await body(adapter)

    trio.run(main)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_log_probs_are_those_of_the_distribution_that_is_sampled_from(server: Server, temperature: float) -> None:
    async def body(adapter: Adapter) -> None:
        sampling = Sampling(temperature=temperature, max_tokens=24)
        got = await adapter.generate(PROMPT, sampling, session="a", seconds=SECONDS)
        expected = server.logprobs([*PROMPT.tolist(), *got.tokens.tolist()], temperature or 1.0)[len(PROMPT) - 1 :]
        assert np.abs(got.logprobs - expected).max() < NATS
        assert (len(got.tokens), got.finish_reason) == (24, "length")

    with_adapter(server, body)


def test_every_token_carries_the_version_that_sampled_it(server: Server) -> None:
    async def body(adapter: Adapter) -> None:
        got = await adapter.generate(PROMPT, Sampling(max_tokens=4), session="a", seconds=SECONDS)
        assert [(span.start, span.version) for span in got.spans] == [(0, server.version)]

    with_adapter(server, body)


def test_a_greedy_answer_is_the_same_twice(server: Server) -> None:
    async def body(adapter: Adapter) -> None:
        greedy = Sampling(temperature=0, max_tokens=16)
        first, second = [await adapter.generate(PROMPT, greedy, session="a", seconds=SECONDS) for _ in range(2)]
        assert first.tokens.tolist() == second.tokens.tolist()

    with_adapter(server, body)


def test_a_stop_id_ends_the_answer_and_is_its_last_token(server: Server) -> None:
    async def body(adapter: Adapter) -> None:
        stops = tuple(range(100, VOCAB))
        got = await adapter.generate(PROMPT, Sampling(max_tokens=200, stop_ids=stops), session="a", seconds=SECONDS)
        assert got.finish_reason == "stop"
        assert [token in stops for token in got.tokens] == [False] * (len(got.tokens) - 1) + [True]

    with_adapter(server, body)


def test_an_end_of_sequence_id_that_nobody_asked_to_stop_at_is_no_stop(server: Server) -> None:
    async def body(adapter: Adapter) -> None:
        got = await adapter.generate(
            PROMPT, Sampling(max_tokens=200, stop_ids=(VOCAB - 1,)), session="a", seconds=SECONDS
        )
        assert got.finish_reason == "length" or got.tokens[-1] == (VOCAB - 1 if got.finish_reason == "stop" else 2)

    with_adapter(server, body)


def test_an_answer_ends_where_the_context_ends(server: Server) -> None:
    async def body(adapter: Adapter) -> None:
        info = await adapter.check()
        prompt = np.resize(PROMPT, info.max_tokens - 3)
        got = await adapter.generate(prompt, Sampling(max_tokens=50), session="a", seconds=SECONDS)
        assert (len(got.tokens), got.finish_reason) == (3, "length")
        assert info.max_tokens <= CONTEXT

    with_adapter(server, body)


def test_a_prompt_that_fills_the_context_is_refused(server: Server) -> None:
    async def body(adapter: Adapter) -> None:
        with pytest.raises(LimitReached, match="context"):
            await adapter.generate(np.resize(PROMPT, CONTEXT), Sampling(), session="a", seconds=SECONDS)

    with_adapter(server, body)


@pytest.mark.parametrize("id", [-1, VOCAB])
def test_an_id_outside_the_vocabulary_never_reaches_the_server(server: Server, id: int) -> None:
    async def body(adapter: Adapter) -> None:
        with pytest.raises(SchemaError, match=f"from 0 to {VOCAB - 1}, got {id}"):
            await adapter.generate(np.array([1, id], np.int32), Sampling(), session="a", seconds=SECONDS)
        assert await adapter.ready()
        await adapter.generate(PROMPT, Sampling(max_tokens=1), session="a", seconds=SECONDS)

    with_adapter(server, body)


def test_requests_at_the_same_time_get_their_own_answers(server: Server) -> None:
    async def body(adapter: Adapter) -> None:
        answers: dict[int, Any] = {}

        async def one(n: int) -> None:
            prompt = np.full(n + 1, n, np.int32)
            answers[n] = await adapter.generate(prompt, Sampling(max_tokens=n + 1), session=str(n), seconds=SECONDS)

        async with trio.open_nursery() as nursery:
            for n in range(8):
                nursery.start_soon(one, n)
        for n, got in answers.items():
            expected = server.logprobs([n] * (n + 1) + got.tokens.tolist())[n:]
            assert len(got.tokens) == n + 1
            assert np.abs(got.logprobs - expected).max() < NATS

    with_adapter(server, body)


@only_sglang
def test_requests_that_are_ended_answer_with_what_they_had(server: Server) -> None:
    async def body(adapter: Adapter) -> None:
        assert isinstance(adapter, SGLang)
        answers: list[Any] = []
        await adapter.check()

        async def one(n: int) -> None:
            most = Sampling(max_tokens=CONTEXT)
            answers.append(await adapter.generate(PROMPT + n, most, session=str(n), seconds=SECONDS))

        async def end() -> None:
            while len(answers) < 2:
                if await adapter.running():
                    await adapter.abort_all()

        async with trio.open_nursery() as nursery:
            for n in range(2):
                nursery.start_soon(one, n)
            nursery.start_soon(end)
        assert {got.finish_reason for got in answers} <= {"aborted", "length"}
        assert await adapter.running() == 0

    with_adapter(server, body)


@only_sglang
def test_a_request_that_runs_out_of_time_answers_with_what_it_had(server: Server) -> None:
    async def body(adapter: Adapter) -> None:
        got = await adapter.generate(PROMPT, Sampling(max_tokens=CONTEXT), session="a", seconds=0.0)
        assert got.finish_reason == "aborted"
        assert len(got.tokens) < CONTEXT - len(PROMPT)

    with_adapter(server, body)


def test_weights_that_are_published_are_the_ones_that_are_sampled_from(server: Server) -> None:
    async def body(adapter: Adapter) -> None:
        before = await adapter.logprobs(PROMPT.tolist())
        for seed in (2, 1):
            await server.publish(adapter, make_model(seed))
            told = await adapter.logprobs(PROMPT.tolist())
            assert np.abs(told - server.logprobs(PROMPT.tolist())).max() < NATS
            got = await adapter.generate(PROMPT, Sampling(max_tokens=4), session="a", seconds=SECONDS)
            assert [span.version for span in got.spans] == [server.version]
        assert np.abs(told - before).max() < NATS

    with_adapter(server, body)


def test_a_probe_may_have_every_id_of_the_vocabulary(server: Server) -> None:
    async def body(adapter: Adapter) -> None:
        for ids in ([0, VOCAB - 1, 1, VOCAB - 1], [VOCAB - 2, 2, VOCAB - 1, 7]):
            assert np.abs(await adapter.logprobs(ids) - server.logprobs(ids)).max() < NATS

    with_adapter(server, body)


def test_two_publishers_one_after_the_other_each_reach_the_server(server: Server) -> None:
    for seed in (3, 1):
        with_adapter(server, partial(_publish, server, seed))


async def _publish(server: Server, seed: int, adapter: Adapter) -> None:
    await server.publish(adapter, make_model(seed))
    told = await adapter.logprobs(PROMPT.tolist())
    assert np.abs(told - server.logprobs(PROMPT.tolist())).max() < NATS


@only_sglang
@pytest.mark.parametrize("limit", [{"top_p": 0.9}, {"top_k": 4}])
def test_log_probs_before_top_p_and_top_k_are_refused(server: Server, limit: dict[str, Any]) -> None:
    async def body(adapter: Adapter) -> None:
        with pytest.raises(EngineError, match="top_p=1 and top_k=0"):
            await adapter.generate(PROMPT, Sampling(**limit), session="a", seconds=SECONDS)

    with_adapter(server, body)
