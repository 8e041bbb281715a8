"""What is taken off rewards and objectives, and what tokens weigh by their lag, against scalar transcriptions."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl_learners.advantage_worker import penalised
from streamrl_learners.algorithms.lags import lag_weights
from streamrl_learners.algorithms.lengths import length_penalty
from streamrl_learners.algorithms.penalties import divergence, entropy, reference_penalty
from streamrl_learners.algorithms.pieces import LagDecay, LagMask, SoftOverlong
from streamrl_queue import Lease
from streamrl_queue.batches import RowKeys

logits = st.lists(st.floats(-20, 20), min_size=1, max_size=6)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.integers(1, 200), st.integers(1, 200))
def test_soft_overlong_is_its_equation(tokens: list[int], most: int, buffer: int):
    buffer = min(buffer, most)
    wanted = []
    for length in tokens:
        if length <= most - buffer:
            wanted.append(0.0)
        elif length <= most:
            wanted.append((most - buffer - length) / buffer * 0.5)
        else:
            wanted.append(-0.5)
    config = SoftOverlong(max_tokens=most, buffer_tokens=buffer, scale=0.5)
    assert length_penalty(config, np.array(tokens)).tolist() == pytest.approx(wanted, abs=1e-12)
    assert length_penalty(None, np.array(tokens)).tolist() == [0.0] * len(tokens)


def test_long_rows_are_compared_with_what_they_lost():
    keys = tuple(RowKeys(i, 0, i, 1, "train", tokens) for i, tokens in enumerate((5, 9, 10)))
    batch = pa.RecordBatch.from_pydict({"row": [0, 1, 2], "group": [0, 0, 0], "reward": [1.0, 1.0, 0.0]})
    lease = Lease(1, "advantage", keys, 60.0, 1, 0, batch)
    got = penalised(SoftOverlong(max_tokens=10, buffer_tokens=4), lease)
    assert got.column("reward").to_pylist() == [1.0, 0.25, -1.0]
    assert got.column("row").to_pylist() == [0, 1, 2]
    assert penalised(None, lease) is batch


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(0, 10), st.floats(0.1, 3))
def test_lag_weights_are_their_equations(lags: list[int], most: int, power: float):
    array = np.array(lags, np.int64)
    assert lag_weights(LagMask(max_lag=most), array).tolist() == [1.0 if lag <= most else 0.0 for lag in lags]
    wanted = [1.0 if lag < 2 else 1 / lag**power for lag in lags]
    assert lag_weights(LagDecay(power=power), array).tolist() == pytest.approx(wanted)
    assert lag_weights(None, array).tolist() == [1.0] * len(lags)


@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), max_size=8))
def test_the_penalty_to_a_reference_is_schulmans_estimates(pairs: list[tuple[float, float]]):
    current, reference = (torch.tensor([p[i] for p in pairs], dtype=torch.float64) for i in (0, 1))
    for name, formula in {
        "k1": lambda p, q: p - q,
        "k2": lambda p, q: (q - p) ** 2 / 2,
        "k3": lambda p, q: math.exp(q) / math.exp(p) - 1 - (q - p),
    }.items():
        got = reference_penalty(name, current, reference).tolist()
        assert got == pytest.approx([formula(p, q) for p, q in pairs], rel=1e-9, abs=1e-9)


@given(logits, st.integers(0, 1 << 30))
def test_k1_and_k3_are_unbiased_and_k3_is_never_negative(values: list[float], seed: int):
    """Their mean under p, taken exactly over a small vocabulary, is the divergence."""
    q_logits = torch.tensor(np.random.default_rng(seed).normal(size=len(values)))
    log_p, log_q = (t.double().log_softmax(0) for t in (torch.tensor(values), q_logits))
    exact = float((log_p.exp() * (log_p - log_q)).sum())
    estimates = divergence(log_q - log_p)
    assert float((log_p.exp() * estimates.k1).sum()) == pytest.approx(exact, rel=1e-6, abs=1e-9)
    assert float((log_p.exp() * estimates.k3).sum()) == pytest.approx(exact, rel=1e-6, abs=1e-9)
    assert bool((estimates.k3 >= -1e-12).all())


def test_the_gradient_of_k2_at_equal_policies_is_that_of_the_divergence():
    """KL(p || q) has the gradient 0 where p = q, and k2 has it at every token."""
    current = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(reference_penalty("k2", current, current.detach()).sum(), current)
    assert gradient.tolist() == [0.0, 0.0]


@given(st.lists(logits.filter(lambda row: len(row) == 3), min_size=1, max_size=3))
def test_entropy_is_its_equation(rows: list[list[float]]):
    wanted = []
    for row in rows:
        total = math.fsum(math.exp(x) for x in row)
        p = [math.exp(x) / total for x in row]
        wanted.append(-math.fsum(x * math.log(x) for x in p))
    got = entropy(torch.tensor(rows, dtype=torch.float64))
    assert got.tolist() == pytest.approx(wanted, abs=1e-9)


def test_the_entropy_of_one_certain_token_is_zero_and_has_a_finite_gradient():
    forbidden = torch.tensor([[0.0, -math.inf], [3.0, 3.0]], dtype=torch.float64, requires_grad=True)
    values = entropy(forbidden)
    assert values.tolist() == pytest.approx([0.0, math.log(2)])
    (gradient,) = torch.autograd.grad(values.sum(), forbidden)
    assert bool(gradient.isfinite().all())


def test_nothing_sampled_has_no_entropy_and_no_divergence():
    assert entropy(torch.zeros(0, 5)).tolist() == []
    assert divergence(torch.zeros(0)).k3.tolist() == []
