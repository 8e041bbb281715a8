"""An engine before a server, on real sockets: it takes weights by the run's own publish, and no token is lost to it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from engine_double_process import executable
from engine_doubles import CONTEXT, VOCAB, Request, SGLangDouble, served
from engine_servers import make_model, model_directory
from server_support import SECONDS, Learner, broker, client, endpoint

from streamrl_producers.config import SGLangEngine
from streamrl_producers.engines.protocol import Generate, Generated, Health, Healthy, Sampling
from streamrl_producers.engines.server import run_server_engine
from streamrl_queue import TransferQueue
from streamrl_queue.errors import EngineError, SchemaError
from streamrl_queue.nursery import run as queue_run
from streamrl_queue.rpc import RpcClient
from streamrl_queue.weights import Apply, Probe

NATS = 1e-3
PROMPT = [3, 5, 8, 13]


def logprobs(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        told = model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return np.asarray(told.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])


class TinyLearner(Learner):
    """Publishes models of the doubles' shape."""

    async def apply(self, version: int, made: Any) -> Any:
        ids = [7, VOCAB - 1, 9, 11, 13]
        probe = Probe(tuple(ids), tuple(logprobs(made, ids).tolist()))
        return [await one.call(Apply(version, probe), deadline=SECONDS) for one in self.clients]

    async def stage(self, version: int, made: Any, seconds: float = SECONDS) -> Any:
        state = {name: tensor.detach() for name, tensor in made.named_parameters()}
        await trio.to_thread.run_sync(await self.prepare(version, state, seconds))
        return await self.apply(version, made)


class Stand:
    """An engine before a double, its client, and a learner."""

    def __init__(self, queue: TransferQueue, rpc: RpcClient, learner: TinyLearner, double: SGLangDouble) -> None:
        self.queue, self.rpc, self.learner, self.double = queue, rpc, learner, double

    async def generate(self, seconds: float = SECONDS, **sampling: Any) -> Generated:
        request = Generate(np.array(PROMPT, "<i4").tobytes(), Sampling(**sampling), "a", seconds)
        got: Generated = (await self.rpc.call(request, deadline=SECONDS)).generated()
        return got

    async def health(self) -> Healthy:
        healthy: Healthy = await self.rpc.call(Health(), deadline=SECONDS)
        return healthy

    async def samples(self) -> None:
        """Return when the double samples."""
        with trio.fail_after(SECONDS):
            while not any(request.sampled for request in list(self.double.requests.values())):
                await trio.sleep(0.001)


@asynccontextmanager
async def engine(path: Path, config: SGLangEngine, restarts: int = 0) -> AsyncIterator[TransferQueue]:
    """A running engine of `config`, and a queue that knows it."""
    async with broker(path) as opened, trio.open_nursery() as nursery:

        def connect(endpoint: str | None) -> Any:
            return TransferQueue.connect(opened.address, role="engine", name="engine-0", endpoint=endpoint)

        async def run() -> None:
            await run_server_engine(
                connect,
                model_dir=model_directory(path / "base"),
                config=config,
                number=0,
                bind=lambda life: f"ipc://{path}/engine-{life}",
                log_file=path / "server.log",
                restarts=restarts,
                window=60.0,
            )

        nursery.start_soon(run)
        async with TransferQueue.connect(opened.address) as queue:
            yield queue
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def stand(path: Path, kind: type[SGLangDouble] = SGLangDouble) -> AsyncIterator[Stand]:
    double = kind(make_model(9), version="0")
    with served(double) as url:
        config = SGLangEngine(urls=(url,), max_tokens=CONTEXT, slots=1)
        async with engine(path, config) as queue, client(await endpoint(queue)) as rpc:
            yield Stand(queue, rpc, TinyLearner(rpc, bucket_bytes=4096), double)


def with_stand(path: Path, body: Any, kind: type[SGLangDouble] = SGLangDouble) -> None:
    async def main() -> None:
        async with stand(path, kind) as one:
            await body(one)

    trio.run(main)


def test_an_engine_without_published_weights_samples_nothing(tmp_path: Path) -> None:
    async def body(one: Stand) -> None:
        assert (await one.health()).state == "empty"
        with pytest.raises(EngineError, match="has version None"):
            await one.generate()

    with_stand(tmp_path, body)


def test_published_weights_are_proved_and_then_sampled_from(tmp_path: Path) -> None:
    async def body(one: Stand) -> None:
        for version, seed in ((3, 1), (4, 2)):
            model = make_model(seed)
            for applied in await one.learner.stage(version, model):
                assert applied.probe_error < NATS
            assert not (await one.health()).generated
            await one.learner.resume(version)
            healthy = await one.health()
            assert (healthy.version, healthy.state, healthy.generated) == (version, "sampling", True)
            got = await one.generate(max_tokens=6)
            expected = logprobs(model, PROMPT + got.tokens.tolist())[len(PROMPT) - 1 :]
            assert np.abs(got.logprobs - expected).max() < NATS
            assert [(span.start, span.version) for span in got.spans] == [(0, version)]

    with_stand(tmp_path, body)


def test_a_running_answer_goes_on_with_the_weights_that_were_committed_meanwhile(tmp_path: Path) -> None:
    async def body(one: Stand) -> None:
        models = {1: make_model(1), 2: make_model(2)}
        await one.learner.stage(1, models[1])
        await one.learner.resume(1)
        answers: list[Generated] = []

        async def ask() -> None:
            answers.append(await one.generate(max_tokens=240))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await one.samples()
            await one.learner.stage(2, models[2])
            assert not answers
            await one.learner.resume(2)
        (got,) = answers
        assert (len(got.tokens), got.finish_reason) == (240, "length")
        assert [span.version for span in got.spans] == [1, 2]
        ids, cut = PROMPT + got.tokens.tolist(), got.spans[1].start
        before = logprobs(models[1], ids)[len(PROMPT) - 1 :][:cut]
        after = logprobs(models[2], ids)[len(PROMPT) - 1 :][cut:]
        assert np.abs(got.logprobs - np.concatenate([before, after])).max() < NATS

    with_stand(tmp_path, body)


class Slow(SGLangDouble):
    """Lets long answers wait until `goes_on` is set."""

    goes_on = threading.Event()

    def run(self, request: Request, most: int, temperature: float, stops: set[int]) -> str:
        if most > 100:
            assert self.goes_on.wait(SECONDS)
        return super().run(request, most, temperature, stops)


def test_an_engine_whose_slots_are_all_taken_still_proves_that_it_lives(tmp_path: Path) -> None:
    async def body(one: Stand) -> None:
        await one.learner.stage(1, make_model(1))
        await one.learner.resume(1)
        lengths: list[int] = []

        async def ask(most: int) -> None:
            lengths.append(len((await one.generate(max_tokens=most)).tokens))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 200)
            with trio.fail_after(SECONDS):
                while not one.double.requests:
                    await trio.sleep(0.001)
            nursery.start_soon(ask, 3)
            healthy = await one.health()
            assert healthy.generated
            assert not lengths
            Slow.goes_on.set()
        assert lengths == [200, 3]

    with_stand(tmp_path, body, Slow)


def test_an_aborted_version_was_never_sampled_from(tmp_path: Path) -> None:
    async def body(one: Stand) -> None:
        model = make_model(1)
        await one.learner.stage(1, model)
        await one.learner.resume(1)
        await one.learner.stage(2, make_model(2))
        await one.learner.abort(2)
        got = await one.generate(max_tokens=6)
        assert [span.version for span in got.spans] == [1]
        expected = logprobs(model, PROMPT + got.tokens.tolist())[len(PROMPT) - 1 :]
        assert np.abs(got.logprobs - expected).max() < NATS

    with_stand(tmp_path, body)


def test_an_answer_waits_at_the_gate_no_longer_than_its_time(tmp_path: Path) -> None:
    async def body(one: Stand) -> None:
        await one.learner.stage(1, make_model(1))
        await one.learner.resume(1)
        await one.learner.stage(2, make_model(2))
        got = await one.generate(seconds=0.05, max_tokens=6)
        assert (len(got.tokens), got.finish_reason) == (0, "aborted")

    with_stand(tmp_path, body)


def test_wrong_weights_are_found_by_the_probe(tmp_path: Path) -> None:
    async def body(one: Stand) -> None:
        model = make_model(1)
        state = {name: tensor.detach() for name, tensor in model.named_parameters()}
        name = "model.layers.1.mlp.down_proj.weight"
        await trio.to_thread.run_sync(await one.learner.prepare(1, state | {name: state[name] * 2}))
        (applied,) = await one.learner.apply(1, model)
        assert applied.probe_error > NATS

    with_stand(tmp_path, body)


def test_an_id_outside_the_vocabulary_is_refused_and_the_server_lives(tmp_path: Path) -> None:
    async def body(one: Stand) -> None:
        await one.learner.stage(1, make_model(1))
        await one.learner.resume(1)
        request = Generate(np.array([VOCAB], "<i4").tobytes(), Sampling(), "a", SECONDS)
        with pytest.raises(SchemaError, match="from 0 to"):
            await one.rpc.call(request, deadline=SECONDS)
        assert (await one.health()).generated

    with_stand(tmp_path, body)


def test_weights_that_somebody_else_changed_are_noticed(tmp_path: Path) -> None:
    async def body(one: Stand) -> None:
        await one.learner.stage(1, make_model(1))
        await one.learner.resume(1)
        one.double.version = "2"
        with pytest.raises(EngineError, match="somebody else"):
            await one.generate(max_tokens=2)

    with_stand(tmp_path, body)


async def publishes(address: str, version: int) -> None:
    """A learner publishes to the engine at `address`, which then samples."""
    async with client(address) as rpc:
        learner = TinyLearner(rpc)
        await learner.stage(version, make_model(version))
        await learner.resume(version)
        assert (await rpc.call(Health(), deadline=SECONDS)).generated


def test_a_server_that_dies_is_started_again_and_joins_as_an_engine_without_weights(tmp_path: Path) -> None:
    async def main() -> None:
        config = SGLangEngine(python=str(executable(tmp_path)), max_tokens=CONTEXT, start_seconds=60.0)
        with trio.fail_after(90):
            async with engine(tmp_path, config, restarts=1) as queue:
                first = await endpoint(queue)
                await publishes(first, 1)
                url = (tmp_path / "server.log").read_text().split()[-1]
                os.kill(listener(url), signal.SIGKILL)
                second = first
                while second == first:
                    second = await endpoint(queue)
                await publishes(second, 1)

    trio.run(main)


def test_a_server_that_dies_too_often_ends_its_engine(tmp_path: Path) -> None:
    async def main() -> None:
        script = tmp_path / "python"
        script.write_text("#!/bin/sh\necho broken\nexit 3\n")
        script.chmod(0o755)
        with trio.fail_after(60):
            async with engine(tmp_path, SGLangEngine(python=str(script), start_seconds=60.0), restarts=1):
                await trio.sleep_forever()

    with pytest.raises(EngineError, match=r"exit code 3.*(?s:.*)broken"):
        queue_run(main)
    assert (tmp_path / "server.log").read_text() == "broken\n" * 2


def listener(url: str) -> int:
    """The process that was started to serve `url`."""
    port = url.rpartition(":")[2]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        words = entry.read_bytes().split(b"\0")
        if port.encode() in words and b"--port" in words and b"engine_double_process.py" in words[1].split(b"/"):
            return int(entry.parent.name)
    raise AssertionError(f"nobody serves {url}")
