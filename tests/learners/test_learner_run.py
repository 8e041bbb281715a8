"""The whole learner against a real queue: warm start, steps, checkpoints, versions, export, resume."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import trio
from learner_engines import FakeEngine
from learner_fakes import VOCAB, free_address, write_model_dir

from streamrl_learners.advantage_worker import run_advantage_worker
from streamrl_learners.algorithms.pieces import Algorithm, Grpo
from streamrl_learners.checkpoint import complete_steps
from streamrl_learners.config import LearnerConfig, TinyModel, WarmStart
from streamrl_learners.learner import run_learner
from streamrl_queue import BlockingTransferQueue, QueueConfig, Task, TransferQueue, open_broker, training_flow
from streamrl_queue.errors import WeightError
from streamrl_queue.nursery import run
from streamrl_queue.schema import Segment, Span, Trajectory, reward_batch, trajectory_batch

CONFIG = LearnerConfig(
    steps=4,
    rows_per_step=8,
    warmup_steps=1,
    checkpoint_every=2,
    publish_seconds=10.0,
    wait_seconds=20.0,
    linger_seconds=0.05,
)
TWO_RANKS = msgspec.structs.replace(CONFIG, ranks=2, micro_batch_tokens=40)
LONG = msgspec.structs.replace(CONFIG, steps=12)
TINY = TinyModel(warm_start=WarmStart(clean_steps=2, sloppy_steps=1, batch=4))


def demonstrate(rng: random.Random, sloppy: bool) -> tuple[np.ndarray, np.ndarray]:
    n = rng.randrange(4, 9)
    return np.array([rng.randrange(VOCAB) for _ in range(n)], np.int32), np.array([0] + [1] * (n - 1), np.uint8)


def episode(row: int, version: int) -> Trajectory:
    rng = np.random.default_rng(row)
    n = int(rng.integers(5, 16))
    return Trajectory(
        tokens=rng.integers(0, VOCAB, n).astype(np.int32),
        mask=np.array([0, 0] + [1] * (n - 2), np.uint8),
        logprobs=np.array([np.nan] * 2 + [-3.5] * (n - 2), np.float32),
        versions=(Span(2, version, version),),
        segments=(Segment(0, n),),
        turns=1,
        status="completed",
        sampling={"temperature": 1.0},
        outcome=float(rng.random()),
    )


async def produce(address: str, engine: FakeEngine) -> None:
    """Roll rows out and score them until cancelled."""
    async with TransferQueue.connect(address, role="producer") as queue:
        while True:
            if lease := await queue.lease("rollout", rows=4, wait=30.0):
                version = await engine.at_least(lease.version)
                episodes = [episode(id, version) for id in lease.ids]
                await queue.write(lease, trajectory_batch(lease.ids, episodes))
                scored = await queue.lease("reward", rows=64, wait=5.0)
                assert scored is not None
                rewards = [float(x) for x in np.random.default_rng(scored.ids[0]).random(len(scored.ids))]
                await queue.write(scored, reward_batch(scored.ids, rewards, [{}] * len(rewards)))


async def advantages(address: str) -> None:
    async with TransferQueue.connect(address, role="scorer") as queue:
        await run_advantage_worker(queue, Grpo())


async def sample(address: str, engine: FakeEngine) -> None:
    async with (
        engine.serve(),
        TransferQueue.connect(address, role="engine", name=engine.name, endpoint=engine.endpoint),
    ):
        await trio.sleep_forever()


class Run:
    """A queue with a producer, a scorer and an engine in a thread of their own."""

    def __init__(self, directory: Path, engine: FakeEngine, tasks: int, budget_bytes: int = 1 << 34) -> None:
        self.budget_bytes = budget_bytes
        self.directory = directory
        self.engine = engine
        self.tasks = tasks
        self.address = ""
        self.opened = threading.Event()
        self.token: trio.lowlevel.TrioToken
        self.scope = trio.CancelScope()

    async def main(self) -> None:
        flow = training_flow(QueueConfig(max_staleness=2), rows_per_step=8)
        flow = msgspec.structs.replace(flow, budget_bytes=self.budget_bytes)
        async with trio.open_nursery() as nursery, open_broker(flow, self.directory) as broker:
            self.address = broker.address
            self.token = trio.lowlevel.current_trio_token()
            nursery.start_soon(produce, self.address, self.engine)
            nursery.start_soon(advantages, self.address)
            self.join = partial(nursery.start_soon, sample, self.address)
            self.join(self.engine)
            async with TransferQueue.connect(self.address) as queue:
                self.opened.set()
                with self.scope:
                    # One at a time: with a small budget they wait for room.
                    for i in range(self.tasks):
                        await queue.put([Task(env="e", task={"text": "y" * 4000}, index=i)], members=4, wait=60.0)
                    await trio.sleep_forever()
            nursery.cancel_scope.cancel()


@contextmanager
def running(directory: Path, engine: FakeEngine, tasks: int = 8, **options: int) -> Iterator[Run]:
    machine = Run(directory, engine, tasks, **options)
    thread = threading.Thread(target=run, args=(machine.main,))
    thread.start()
    assert machine.opened.wait(10)
    try:
        yield machine
    finally:
        trio.from_thread.run_sync(machine.scope.cancel, trio_token=machine.token)
        thread.join(10)


def learn(
    machine: Run,
    tmp_path: Path,
    *,
    until: Callable[[list[dict]], bool] = lambda emitted: False,
    **options: Any,
) -> list[dict]:
    """Run a learner to its end, or until what it emitted makes `until` true; what it emitted."""
    emitted: list[dict] = []
    write_model_dir(tmp_path / "base")
    with BlockingTransferQueue.connect(machine.address, role="learner") as queue:
        train(queue, tmp_path, emit=emitted.append, should_stop=lambda: until(emitted), **options)
        machine.statistics, machine.versions = queue.statistics(), queue.versions()
    return emitted


def train(queue: BlockingTransferQueue, run_dir: Path, **options: Any) -> None:
    """`run_learner` with this file's settings."""
    defaults = {"config": CONFIG, "algorithm": Algorithm(), "model": TINY, "demonstrations": demonstrate, "seed": 1}
    run_learner(queue, **(defaults | options), model_dir=run_dir / "base", run_dir=run_dir)


def test_a_run_from_warm_start_to_exported_model(tmp_path):
    """Slow (about 3 s): a queue, an engine, a producer and a learner."""
    from safetensors.torch import load_file

    engine = FakeEngine("engine-0")
    with running(tmp_path / "journal", engine) as machine:
        emitted = learn(machine, tmp_path)
    machine.statistics.check()
    assert machine.statistics.trained == 32
    assert [(v.step, v.committed) for v in machine.versions] == [(step, True) for step in range(5)]
    assert [metrics["step"] for metrics in emitted] == [1, 2, 3, 4]
    assert max(metrics["lag_max"] for metrics in emitted) <= 2
    assert all(metrics["rows"] == 8 for metrics in emitted)
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]
    exported = load_file(tmp_path / "model" / "model.safetensors")
    start = load_file(tmp_path / "base" / "model.safetensors")
    assert (tmp_path / "model" / "tokenizer.json").exists()
    for name, tensor in engine.policy.lm.named_parameters():
        assert torch.equal(exported[name], tensor)
    assert not torch.equal(exported["model.norm.weight"], start["model.norm.weight"])


def test_a_stopped_run_resumes_under_fresh_versions_and_trains_no_row_twice(tmp_path):
    """Slow (about 4 s): two learners, one after the other."""
    engine = FakeEngine("engine-0")
    with running(tmp_path / "journal", engine) as machine:
        stopped = learn(machine, tmp_path, until=lambda emitted: len(emitted) == 3)
        assert [metrics["step"] for metrics in stopped] == [1, 2, 3]
        assert complete_steps(tmp_path / "checkpoints")[-1] == 3
        before = {version.id for version in machine.versions}
        resumed = learn(machine, tmp_path, resume=True)
    assert [metrics["step"] for metrics in resumed] == [4]
    machine.statistics.check()
    assert machine.statistics.trained == 32
    assert machine.statistics.step == 4
    fresh = [version for version in machine.versions if version.id not in before]
    assert [version.step for version in fresh] == [3, 4]


def test_a_damaged_newest_checkpoint_costs_the_steps_since_the_one_before(tmp_path):
    """Slow (about 4 s): two learners, one after the other."""
    with running(tmp_path / "journal", FakeEngine("engine-0")) as machine:
        learn(machine, tmp_path)
        newest = tmp_path / "checkpoints" / "step-00000004"
        weights = next(newest.glob("*.distcp"))
        weights.write_bytes(weights.read_bytes()[:-100])
        resumed = learn(machine, tmp_path, resume=True)
    assert [metrics["step"] for metrics in resumed] == [3, 4]
    machine.statistics.check()
    assert machine.statistics.trained == 32
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]


@pytest.mark.parametrize("every", [0, 2])
def test_rows_that_no_checkpoint_covers_yet_never_keep_out_those_that_the_step_waits_for(tmp_path, caplog, every):
    """Slow (about 6 s): the journal has room for the rows of two steps, and each shortage lasts a second."""
    config = msgspec.structs.replace(CONFIG, steps=5, checkpoint_every=every, wait_seconds=5.0)
    budget = 24 << 10
    with running(tmp_path / "journal", FakeEngine("engine-0"), tasks=10, budget_bytes=budget) as machine:
        emitted = learn(machine, tmp_path, config=config, budget_bytes=budget)
    machine.statistics.check()
    assert (len(emitted), machine.statistics.trained) == (5, 40)
    assert "a checkpoint ahead of its time" in caplog.text


def test_a_publish_that_cannot_be_verified_ends_the_learner_with_its_own_error(tmp_path):
    """Slow (about 3 s): the learner waits `wait_seconds` for a sound engine."""
    engine = FakeEngine("engine-0", "apply")
    config = msgspec.structs.replace(CONFIG, wait_seconds=1.0)
    with (
        running(tmp_path / "journal", engine) as machine,
        pytest.raises(WeightError, match=r"publish of step 0: .*engine-0: apply: out of memory"),
    ):
        learn(machine, tmp_path, config=config)


def test_an_engine_that_joins_after_the_last_step_gets_the_last_version(tmp_path):
    """Slow (about 2 s): a queue, two engines, a producer and a learner."""
    first, late = FakeEngine("engine-0"), FakeEngine("engine-1")
    with running(tmp_path / "journal", first) as machine:

        def served(emitted: list[dict]) -> bool:
            if len(emitted) == CONFIG.steps and not joined:
                joined.append(late.name)
                trio.from_thread.run_sync(machine.join, late, trio_token=machine.token)
            return late.version > 0

        joined: list[str] = []
        learn(machine, tmp_path, until=served, serve_after=True)
        assert late.version == first.version == machine.versions[-1].id


def test_two_ranks_run_as_one_learner(tmp_path):
    """Slow (about 10 s): two processes import torch and transformers and form a process group."""
    engine, store = FakeEngine("engine-0"), free_address()
    write_model_dir(tmp_path / "base")
    with running(tmp_path / "journal", engine) as machine:
        here = [sys.executable, "-W", "error", __file__, machine.address, store, str(tmp_path)]
        ranks = [subprocess.Popen([*here, str(rank)]) for rank in (0, 1)]
        assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
        with BlockingTransferQueue.connect(machine.address) as queue:
            statistics, versions = queue.statistics(), queue.versions()
    statistics.check()
    assert statistics.trained == 32
    assert [(v.step, v.committed) for v in versions] == [(step, True) for step in range(5)]
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_learner_that_is_killed_anywhere_resumes_without_losing_or_repeating_a_row(tmp_path):
    """Slow (about 8 s): a learner process imports torch and transformers, is killed, and is followed by another."""
    engine = FakeEngine("engine-0")
    write_model_dir(tmp_path / "base")
    with running(tmp_path / "journal", engine, tasks=24) as machine:
        here = [sys.executable, "-W", "error", __file__, machine.address, "", str(tmp_path), "0"]
        victim = subprocess.Popen(here)
        trio.from_thread.run(engine.at_least, 4, trio_token=machine.token)
        victim.kill()
        victim.wait(timeout=10)
        with BlockingTransferQueue.connect(machine.address) as queue:
            queue.portal.call(queue.aio.end_session, "learner-0")
        emitted = learn(machine, tmp_path, config=LONG, resume=True)
    machine.statistics.check()
    assert machine.statistics.trained == 96
    assert machine.statistics.step == 12
    assert emitted[-1]["step"] == 12
    first = emitted[0]["step"]
    assert first >= 3
    assert first % 2 == 1  # checkpoints are at even steps
    ids = [version.id for version in machine.versions]
    assert len(set(ids)) == len(ids)


def one_rank(address: str, store: str, directory: str, rank: str) -> None:
    """A learner process: a rank of two, or alone when there is no `store`."""
    torch.set_num_threads(1)
    world, config = (2, TWO_RANKS) if store else (1, LONG)
    with BlockingTransferQueue.connect(address, role="learner", name=f"learner-{rank}") as queue:
        train(queue, Path(directory), rank=int(rank), world=world, store=store, config=config)


if __name__ == "__main__":
    one_rank(*sys.argv[1:])
