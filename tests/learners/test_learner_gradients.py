"""The gradient of a step is that of the whole batch: for any order, any packing and any number of ranks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_fakes import FakeQueue, free_address, make_policy, make_row

from streamrl_learners.algorithms.metrics import Tally
from streamrl_learners.batches import Row
from streamrl_learners.config import AlgorithmConfig, LearnerConfig, PPOClip, Reinforce
from streamrl_learners.objective import Objective
from streamrl_learners.optimise import Optimiser
from streamrl_learners.ranks import Ranks
from streamrl_learners.stream import Stream

ROWS = [make_row(i, temperature=0.7 if i % 3 else 1.0, advantage=0.0 if i % 5 == 0 else i - 6.5) for i in range(12)]


def whole_batch_gradient(algorithm: AlgorithmConfig) -> list[torch.Tensor]:
    """One row after the other, the full softmax, the mean over all sampled tokens: straight from the paper."""
    policy = make_policy(dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for row in ROWS:
        logits = policy.lm(input_ids=torch.from_numpy(row.tokens.astype("int64"))[None]).logits[0] / row.temperature
        table = logits.log_softmax(-1)
        gains, n = torch.zeros((), dtype=torch.float64), 0
        for t in range(1, len(row.tokens)):
            if row.mask[t]:
                ratio = (table[t - 1, int(row.tokens[t])] - float(row.logprobs[t])).exp()
                gain = ratio * row.advantage
                if isinstance(algorithm, PPOClip):
                    gain = torch.minimum(gain, ratio.clamp(0.8, 1.28) * row.advantage)
                gains, n = gains + gain, n + 1
        if algorithm.normalise == "sequence_mean":
            gains = gains / n
        total = total + gains
        count += {"token_mean": n, "sequence_mean": 1, "constant": algorithm.normalise_length or 0}[algorithm.normalise]
    (-total / count).backward()
    return [p.grad for p in policy.parameters() if p.grad is not None]


def streamed_gradient(
    algorithm: AlgorithmConfig, rows: list[Row], arrivals: list[int], budget: int
) -> list[torch.Tensor]:
    policy = make_policy(dtype=torch.float64)
    config = LearnerConfig(rows_per_step=len(rows), micro_batch_tokens=budget, max_grad_norm=1e9)
    tally = Tally()
    stream = Stream(FakeQueue(rows, arrivals), config, algorithm, tally)
    objective = Objective(algorithm, tally)
    optimiser = Optimiser(policy, config, tally, Ranks())
    for micro in stream.micro_batches(1):
        objective.loss(policy, micro).backward()
    caught: list[torch.Tensor] = []
    optimiser.adamw.register_step_pre_hook(lambda *_: caught.extend(p.grad.clone() for p in policy.parameters()))
    optimiser.step(1)
    return caught


@pytest.mark.parametrize(
    "algorithm",
    [
        PPOClip(),
        Reinforce(),
        PPOClip(normalise="sequence_mean"),
        PPOClip(normalise="constant", normalise_length=50),
    ],
    ids=lambda a: f"{type(a).__name__}-{a.normalise}",
)
def test_any_order_and_any_packing_give_the_gradient_of_the_whole_batch(algorithm: AlgorithmConfig):
    wanted = whole_batch_gradient(algorithm)
    for seed, arrivals, budget in ((0, [], 4096), (1, [1] * 12, 64), (2, [5, 0, 3], 40)):
        rows = random.Random(seed).sample(ROWS, len(ROWS))
        for got, want in zip(streamed_gradient(algorithm, rows, arrivals, budget), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def train_some_steps(rank: int, world: int, store: str | None) -> dict[str, torch.Tensor]:
    """Three steps over the same rows on this rank; the whole weights afterwards."""
    from streamrl_learners.fsdp import gather, shard

    torch.set_num_threads(1)
    ranks = Ranks.join(rank, world, store, "cpu")
    policy = shard(make_policy(), ranks, "cpu")
    config = LearnerConfig(rows_per_step=12, micro_batch_tokens=48, learning_rate=1e-3, warmup_steps=0)
    tally = Tally()
    optimiser = Optimiser(policy, config, tally, ranks)
    objective = Objective(PPOClip(), tally)
    for step in (1, 2, 3):
        # 7 rows, then 5: the second round leaves a rank with an empty micro-batch.
        stream = Stream(FakeQueue(ROWS, [7, 5]), config, PPOClip(), tally, ranks=ranks)
        for micro in stream.micro_batches(step):
            objective.loss(policy, micro).backward()
        assert sorted(stream.rows(step)) == list(range(12))
        optimiser.step(step)
    weights = gather(policy.lm, keep=True)
    ranks.leave()
    return weights


def test_two_ranks_under_fsdp_train_like_one(tmp_path: Path):
    """Slow (about 8 s): two processes import torch and transformers and form a process group."""
    store = free_address()
    here = [sys.executable, "-W", "error", __file__]
    workers = [subprocess.Popen([*here, str(rank), store, str(tmp_path / f"{rank}.safetensors")]) for rank in (0, 1)]
    assert [worker.wait(timeout=100) for worker in workers] == [0, 0]
    from safetensors.torch import load_file

    wanted = train_some_steps(0, 1, None)
    start = {name: tensor.detach() for name, tensor in make_policy().lm.named_parameters()}
    for rank in (0, 1):
        got = load_file(tmp_path / f"{rank}.safetensors")
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=5e-6, msg=name)
    assert any(not torch.equal(start[name], tensor) for name, tensor in wanted.items())


if __name__ == "__main__":
    from safetensors.torch import save_file

    save_file(train_some_steps(int(sys.argv[1]), 2, sys.argv[2]), sys.argv[3])
    # As roles do: an interpreter that shuts down with torch's threads about is aborted now and then.
    os._exit(0)
