"""How fast the embedded engine samples lookup-like sessions, alone and over RPC.

    python bench/embedded_engine.py [--sessions 64] [--seconds 5] [--local]

Model: Qwen2, 64 hidden, 2 layers, 4 heads, 1 KV head, 192 intermediate, vocabulary 280, tied; random weights. A session
has three turns: a prompt of 10 tokens, then tool texts of 6; each answer is 4 to 9 tokens (mean 6.5).
Without --local the engine is a process of its own and the sessions run through EngineFleet and a real broker.
Prints sampled tokens per second, and CPU microseconds per request of each side.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

# This folder holds a queue.py, which must not be found in place of the standard library's.
sys.path[0] = str(Path(__file__).parent.parent)

import numpy as np
import torch
import trio

from streamrl_producers.config import EmbeddedEngine
from streamrl_producers.engines.embedded.architecture import Architecture
from streamrl_producers.engines.embedded.batch import Batch, Request
from streamrl_producers.engines.embedded.server import make_batch, run_engine
from streamrl_producers.engines.fleet import EngineFleet
from streamrl_producers.engines.protocol import EngineReply, Sampling
from streamrl_queue import QueueConfig, TransferQueue, open_broker, training_flow
from streamrl_queue.rpc import RpcClient
from streamrl_queue.weights import (
    Apply,
    Bucket,
    Manifest,
    Prepare,
    Probe,
    Resume,
    TensorSpec,
    TransferGroup,
    buffer_digest,
    host_store,
    pack,
)

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 280,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
}
CONFIG = EmbeddedEngine(slots=128, max_tokens=512)
TURNS = 3
rng = random.Random(0)
noise = np.random.default_rng(0)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = Architecture.parse(MODEL, "bench").tensors()
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def tokens(n: int) -> np.ndarray:
    return noise.integers(0, 280, n).astype(np.int32)


def answer() -> Sampling:
    return Sampling(max_tokens=rng.randint(4, 9), stop_ids=(257,))


def local(sessions: int, seconds: float) -> None:
    batch = make_batch(Architecture.parse(MODEL, "bench"), CONFIG)
    batch.reweigh(batch.decoder.build(weights()), 1, recompute=True)
    turns = dict.fromkeys((str(i) for i in range(sessions)), 1)
    for session in turns:
        batch.submit(Request(tokens(10), answer(), session))
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        batch.step()
        for one in batch.ended():
            done += 1
            again(batch, one, turns)
    report("in process", batch.counters.sampled, done, time.perf_counter() - started)
    print(f"  {batch.counters}")


def again(batch: Batch, one: Request, turns: dict[str, int]) -> None:
    assert one.result is not None
    if turns[one.session] % TURNS:
        prompt = np.concatenate([one.tokens, one.result.tokens, tokens(6)])
    else:
        prompt = tokens(10)
    turns[one.session] += 1
    batch.submit(Request(prompt, answer(), one.session))


def report(what: str, sampled: int, requests: int, seconds: float) -> None:
    print(f"{what}: {sampled / seconds:,.0f} sampled tok/s, {requests / seconds:,.0f} requests/s")


async def play(fleet: EngineFleet, name: str, count: Callable[[int], None]) -> None:
    episode = 0
    while True:
        episode += 1
        prompt = tokens(10)
        for _ in range(TURNS):
            got = await fleet.generate(prompt, answer(), session=f"{name}/{episode}", deadline=60)
            count(len(got.tokens))
            prompt = np.concatenate([prompt, got.tokens, tokens(6)])


async def push(queue: TransferQueue) -> None:
    """Publish version 1 to the only engine."""
    members = await queue.members("engine", wait=0)
    while not members.members:
        members = await queue.members("engine", after=members.epoch, wait=60)
    state, store = weights(), host_store()
    specs = tuple(TensorSpec(name, "float32", tuple(t.shape)) for name, t in state.items())
    buffer = pack(specs, state)
    manifest = Manifest(1, 0, None, (Bucket(specs, buffer.numel(), buffer_digest(buffer)),))
    where = ("bench", f"127.0.0.1:{store.port}")

    def send() -> None:
        group = TransferGroup(where[1], where[0], 0, 2, "gloo", 30)
        group.broadcast(buffer)

    async with RpcClient.connect(members.members[0].endpoint, EngineReply) as client:
        await client.call(Prepare(manifest, *where, 1, 2, "gloo", 30), deadline=30)
        await trio.to_thread.run_sync(send)
        await client.call(Apply(1, Probe((0, 1), (0.0,))), deadline=30)
        await client.call(Resume(1), deadline=30)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def remote(sessions: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(MODEL))
        flow = training_flow(QueueConfig(), rows_per_step=8)
        async with (
            open_broker(flow, path / "journal", bind=f"ipc://{path}/queue", durability="memory") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            engine = await trio.lowlevel.open_process([sys.executable, __file__, "--engine", folder])
            await push(queue)
            async with EngineFleet.watch(queue) as fleet, trio.open_nursery() as nursery:
                counts: list[int] = []
                for i in range(sessions):
                    nursery.start_soon(play, fleet, str(i), counts.append)
                await trio.sleep(1)
                counts.clear()
                before, own = cpu_seconds(engine.pid), time.process_time()
                await trio.sleep(seconds)
                n = len(counts)
                report("over RPC", sum(counts), n, seconds)
                theirs, ours = cpu_seconds(engine.pid) - before, time.process_time() - own
                print(f"  engine {theirs / n * 1e6:.0f} us/request ({theirs / seconds:.0%} of a core)")
                print(f"  client {ours / n * 1e6:.0f} us/request ({ours / seconds:.0%} of a core)")
                nursery.cancel_scope.cancel()
            engine.terminate()
            await engine.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--local", action="store_true", help="the batch alone, without any process around it")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.engine:
        path = Path(args.engine)
        connect = partial(TransferQueue.connect, f"ipc://{path}/queue", role="engine", name="engine-0")

        def session(endpoint: str) -> object:
            return connect(endpoint=endpoint)

        trio.run(partial(run_engine, session, model_dir=path, config=CONFIG, bind=f"ipc://{path}/engine"))
    elif args.local:
        local(args.sessions, args.seconds)
    else:
        trio.run(remote, args.sessions, args.seconds)


if __name__ == "__main__":
    main()
