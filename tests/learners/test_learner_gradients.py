"""The gradient of a step is that of the whole batch: for any order, any packing and any number of ranks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_oracle import Token, objective
from learner_fakes import FakeQueue, free_address, make_policy, make_row

from streamrl_learners.algorithms.metrics import Tally
from streamrl_learners.algorithms.pieces import (
    Algorithm,
    Cispo,
    Decoupled,
    GeometricRejection,
    Gspo,
    LagDecay,
    LagMask,
    MaskedIS,
    PPOClip,
    Reinforce,
    ReinforcePlusPlus,
    SequenceRejection,
    TruncatedIS,
)
from streamrl_learners.batches import Row
from streamrl_learners.config import LearnerConfig
from streamrl_learners.model import Policy
from streamrl_learners.objective import Objective
from streamrl_learners.optimise import Optimiser
from streamrl_learners.ranks import Ranks
from streamrl_learners.stream import Stream
from streamrl_queue import Version
from streamrl_queue.schema import Segment, Span

# Versions 1 to 4 are of steps 0 to 3: in step 4 their tokens have lags 3 to 0.
VERSIONS = tuple(Version(id=i + 1, step=i, parent=None, digest="") for i in range(4))
STEP = 4


def varied_row(id: int) -> Row:
    """Zero and other advantages, several temperatures; some rows saw their weights change, some have two segments."""
    row = make_row(id, temperature=0.7 if id % 3 else 1.0, advantage=0.0 if id % 5 == 0 else id - 6.5)
    n = len(row.tokens)
    spans = (Span(0, 1 + id % 4, 1), Span(n // 2, 1 + (id + 1) % 4, 1)) if id % 2 else (Span(0, 1 + id % 4, 1),)
    if id % 4 == 3:
        half = n // 2
        row.mask[half] = 0
        row.logprobs[half] = np.nan
        row = row._replace(segments=(Segment(0, half), Segment(half, n)))
    return row._replace(spans=spans)


ROWS = [varied_row(i) for i in range(12)]


def scalar_tokens(policy: Policy, row: Row) -> list[Token]:
    """The sampled tokens of `row` from the full softmax of each of its segments."""
    found = []
    for segment in row.segments:
        ids = torch.from_numpy(row.tokens[segment.start : segment.end].astype("int64"))
        table = (policy.lm(input_ids=ids[None]).logits[0] / row.temperature).log_softmax(-1)
        for t in range(segment.start + 1, segment.end):
            if row.mask[t]:
                logs = table[t - segment.start - 1]
                version = [span.version for span in row.spans if span.start <= t][-1]
                token = Token(
                    logs[int(row.tokens[t])],
                    float(row.logprobs[t]),
                    row.advantage,
                    STEP - 1 - (version - 1),
                    -(logs.exp() * logs).sum(),
                )
                found.append(token)
    return found


def whole_batch_gradient(algorithm: Algorithm) -> list[torch.Tensor]:
    """One row after the other, the full softmax, one token after the other: straight from the papers."""
    policy = make_policy(dtype=torch.float64)
    total, count = objective(algorithm, [scalar_tokens(policy, row) for row in ROWS])
    (total / count).backward()
    return [p.grad for p in policy.parameters() if p.grad is not None]


def streamed_gradient(algorithm: Algorithm, rows: list[Row], arrivals: list[int], budget: int) -> list[torch.Tensor]:
    policy = make_policy(dtype=torch.float64)
    config = LearnerConfig(rows_per_step=len(rows), micro_batch_tokens=budget, max_grad_norm=1e9)
    tally = Tally()
    stream = Stream(FakeQueue(rows, arrivals, VERSIONS), config, algorithm, tally)
    learned = Objective(algorithm, tally)
    optimiser = Optimiser(policy, config, tally, Ranks())
    for micro in stream.micro_batches(STEP):
        learned.loss(policy, micro).backward()
    caught: list[torch.Tensor] = []
    optimiser.adamw.register_step_pre_hook(lambda *_: caught.extend(p.grad.clone() for p in policy.parameters()))
    optimiser.step(1)
    return caught


COMBINATIONS: tuple[dict[str, Any], ...] = (
    {"normalise": "token_mean"},
    {"normalise": "sequence_mean"},
    {"normalise": "constant", "normalise_length": 50},
    {"loss": PPOClip(dual_clip=1.1), "correction": Decoupled(), "lag": LagDecay(), "normalise": "sequence_mean"},
    {
        "loss": Gspo(clip=0.05, clip_high=0.05),
        "lag": LagMask(max_lag=1),
        "normalise": "constant",
        "normalise_length": 9,
    },
    {"loss": Gspo(clip=0.05, clip_high=0.05), "normalise": "sequence_mean"},
    {"loss": Cispo(clip_high=0.1), "rejection": GeometricRejection(low=0.9, high=1.1), "normalise": "sequence_mean"},
    {"loss": Reinforce(), "correction": MaskedIS(low=0.8, high=1.2), "entropy": 0.3},
    {
        "loss": Reinforce(),
        "correction": TruncatedIS(level="sequence", cap=1.2),
        "rejection": SequenceRejection(low=0.2, high=2.0),
        "lag": LagMask(max_lag=2),
        "entropy": 0.1,
        "normalise": "constant",
        "normalise_length": 50,
    },
)


@pytest.mark.parametrize("pieces", COMBINATIONS, ids=lambda pieces: "-".join(pieces))
def test_any_order_and_any_packing_give_the_gradient_of_the_whole_batch(pieces: dict[str, Any]):
    algorithm = Algorithm(**pieces)
    wanted = whole_batch_gradient(algorithm)
    for seed, arrivals, budget in ((0, [], 4096), (1, [1] * 12, 64), (2, [5, 0, 3], 40)):
        rows = random.Random(seed).sample(ROWS, len(ROWS))
        for got, want in zip(streamed_gradient(algorithm, rows, arrivals, budget), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_the_rows_of_these_tests_are_clipped_masked_and_rejected_in_part():
    """Else the test above would compare less than it says."""
    policy = make_policy(dtype=torch.float64)
    rows = [scalar_tokens(policy, row) for row in ROWS]
    everything = objective(Algorithm(), rows)[1]
    for pieces in COMBINATIONS:
        algorithm = Algorithm(**pieces | {"normalise": "token_mean", "normalise_length": None})
        if algorithm.rejection or isinstance(algorithm.lag, LagMask):
            assert 0 < objective(algorithm, rows)[1] < everything
    ratios = [float((token.new - token.old).exp().detach()) for row in rows for token in row]
    assert min(ratios) < 0.8 < 1.28 < max(ratios)
    assert {token.lag for row in rows for token in row} == {0, 1, 2, 3}


def test_a_step_of_rejected_rows_leaves_the_weights_alone():
    algorithm = Algorithm(rejection=SequenceRejection(low=0.9999, high=1.0001), entropy=0.5)
    assert streamed_gradient(algorithm, ROWS, [], 4096) == []


def test_a_constant_reward_leaves_the_weights_alone_whatever_the_entropy_bonus_asks_for():
    rows = [row._replace(advantage=0.0) for row in ROWS]
    assert streamed_gradient(Algorithm(entropy=0.5), rows, [], 4096) == []


# What needs all ranks: advantages over the step, a normaliser without the rejected rows, entropy beside log-probs.
EVERYTHING = Algorithm(
    advantage=ReinforcePlusPlus(),
    loss=Gspo(clip=0.05),
    rejection=GeometricRejection(low=0.9, high=1.1),
    lag=LagDecay(),
    entropy=0.1,
)


def train_some_steps(rank: int, world: int, store: str | None) -> dict[str, torch.Tensor]:
    """Three steps over the same rows on this rank; the whole weights afterwards."""
    from streamrl_learners.fsdp import gather, shard

    torch.set_num_threads(1)
    ranks = Ranks.join(rank, world, store, "cpu")
    policy = shard(make_policy(), ranks, "cpu")
    config = LearnerConfig(rows_per_step=12, micro_batch_tokens=48, learning_rate=1e-3, warmup_steps=0)
    tally = Tally()
    optimiser = Optimiser(policy, config, tally, ranks)
    objective = Objective(EVERYTHING, tally)
    for step in (1, 2, 3):
        # 7 rows, then 5: the second round leaves a rank with an empty micro-batch.
        stream = Stream(FakeQueue(ROWS, [7, 5], VERSIONS), config, EVERYTHING, tally, ranks=ranks)
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
