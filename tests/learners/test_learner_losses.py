"""Losses, corrections and rejections against transcriptions of their equations, alone and in every combination."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from algorithm_oracle import Token, objective
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_learners.algorithms.corrections import correct
from streamrl_learners.algorithms.losses import Gains, gain
from streamrl_learners.algorithms.metrics import Observed, Tally, observe
from streamrl_learners.algorithms.pieces import (
    Algorithm,
    Behaviour,
    Cispo,
    Decoupled,
    GeometricRejection,
    Gspo,
    MaskedIS,
    NoCorrection,
    PPOClip,
    Reinforce,
    SequenceRejection,
    TruncatedIS,
)
from streamrl_learners.algorithms.rejections import keep
from streamrl_learners.algorithms.sampled import LOG_RATIO_LIMIT, Sampled
from streamrl_learners.ranks import Ranks

LOSSES = (
    PPOClip(),
    PPOClip(clip=0.1, clip_high=None, dual_clip=1.3),
    Reinforce(),
    Gspo(clip=0.05, clip_high=0.1),
    Gspo(clip=0.2, clip_high=None),
    Cispo(clip_high=0.3),
    Cispo(clip=0.2, clip_high=0.3),
)
CORRECTIONS = (
    NoCorrection(),
    Behaviour(),
    TruncatedIS(cap=1.2),
    TruncatedIS(level="sequence", cap=1.5),
    MaskedIS(low=0.7, high=1.3),
    MaskedIS(level="sequence", low=0.5, high=3.0),
    Decoupled(cap=1.2),
)
REJECTIONS = (None, SequenceRejection(low=0.4, high=2.5), GeometricRejection(low=0.8, high=1.2))
COMBINATIONS = list(itertools.product(LOSSES, CORRECTIONS, REJECTIONS))


def make_sampled(rows: list[list[tuple[float, float, float, int]]], dtype: torch.dtype = torch.float64) -> Sampled:
    """Rows of (current, behaviour, advantage, lag) tokens."""
    tokens = [token for row in rows for token in row]
    new, old, advantage = (torch.tensor([t[i] for t in tokens], dtype=dtype) for i in range(3))
    numbers = torch.tensor([number for number, row in enumerate(rows) for _ in row], dtype=torch.int64)
    lags = torch.tensor([t[3] for t in tokens], dtype=torch.int64)
    return Sampled(new.requires_grad_(), old, advantage, numbers, lags)


def random_rows(seed: int) -> list[list[tuple[float, float, float, int]]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(1, 5)):
        a = rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 3)])
        rows.append(
            [
                (new := -rng.expovariate(1.0), new + rng.gauss(0, 0.4), a, rng.randint(0, 4))
                for _ in range(rng.randint(1, 6))
            ]
        )
    return rows


def piecewise(algorithm: Algorithm, sampled: Sampled) -> torch.Tensor:
    """The loss sum under the normaliser `token_mean`."""
    log_ratio, weight = correct(algorithm.correction, sampled)
    kept = keep(algorithm.rejection, sampled) if algorithm.rejection else 1.0
    return -(kept * weight * gain(algorithm.loss, log_ratio, sampled).values).sum()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from(COMBINATIONS))
def test_every_combination_is_its_equations_in_value_and_gradient(seed: int, combination: tuple[Any, Any, Any]):
    loss, correction, rejection = combination
    algorithm = Algorithm(loss=loss, correction=correction, rejection=rejection)
    rows = random_rows(seed)
    sampled = make_sampled(rows)
    got = piecewise(algorithm, sampled)
    (gradient,) = torch.autograd.grad(got, sampled.logprobs)

    leaves = [[torch.tensor(t[0], dtype=torch.float64, requires_grad=True) for t in row] for row in rows]
    wanted, _ = objective(
        algorithm,
        [[Token(leaf, *t[1:]) for leaf, t in zip(*both, strict=True)] for both in zip(leaves, rows, strict=True)],
    )
    flat = [leaf for row in leaves for leaf in row]
    wanted_gradient = (
        torch.autograd.grad(wanted, flat, materialize_grads=True)
        if wanted.requires_grad
        else [torch.zeros((), dtype=torch.float64)] * len(flat)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, torch.stack(list(wanted_gradient)), rtol=1e-9, atol=1e-9)


def gradient(algorithm: Algorithm, rows: list[list[tuple[float, float, float, int]]]) -> list[float]:
    sampled = make_sampled(rows)
    (grad,) = torch.autograd.grad(-piecewise(algorithm, sampled), sampled.logprobs)
    return grad.tolist()


def test_without_a_correction_every_loss_has_the_gradient_of_reinforce():
    rows = [[(-0.1, -0.5, 1.0, 0), (-2.0, -1.0, 1.0, 0)], [(-0.7, -0.7, -3.0, 0)]]
    for loss in (PPOClip(), Reinforce(), Cispo()):
        assert gradient(Algorithm(loss=loss, correction=NoCorrection()), rows) == pytest.approx([1.0, 1.0, -3.0])


def test_a_row_of_several_segments_has_one_ratio_in_gspo():
    """Tokens of one row lie together, whatever segment they are of."""
    joined = [[(-0.1, -0.5, 1.0, 0), (-2.0, -1.0, 1.0, 0), (-0.7, -0.6, 1.0, 0)]]
    got = gradient(Algorithm(loss=Gspo(clip=0.5, clip_high=0.5)), joined)
    s = math.exp((0.4 - 1.0 - 0.1) / 3)
    assert got == pytest.approx([s] * 3)


def test_one_token_has_the_ratio_of_its_row():
    row = [[(-0.1, -0.3, 2.0, 1)]]
    alone = gradient(Algorithm(loss=PPOClip(clip=0.3, clip_high=0.3)), row)
    assert gradient(Algorithm(loss=Gspo(clip=0.3, clip_high=0.3)), row) == pytest.approx(alone)
    for level in ("token", "sequence"):
        assert gradient(Algorithm(loss=Reinforce(), correction=TruncatedIS(level=level)), row) == pytest.approx(
            [math.exp(0.2) * 2.0]
        )


def test_interpolation_is_behaviour_at_lag_one_and_a_weight_alone_at_lag_zero():
    row = [(-0.1, -0.3, 1.0)]
    fresh, old = ([[(*token, lag) for token in row]] for lag in (0, 1))
    assert correct(Decoupled(), make_sampled(old)).log_ratio.item() == pytest.approx(0.2)
    assert correct(Decoupled(), make_sampled(old)).weight.item() == pytest.approx(1.0)
    assert correct(Decoupled(), make_sampled(fresh)).log_ratio.item() == pytest.approx(0.0)
    assert correct(Decoupled(), make_sampled(fresh)).weight.item() == pytest.approx(math.exp(0.2))


def test_the_dual_clip_bounds_what_a_negative_advantage_costs():
    far = [[(-0.1, -3.0, -2.0, 0)]]
    assert gradient(Algorithm(loss=PPOClip()), far) == pytest.approx([-2.0 * math.exp(2.9)])
    assert gradient(Algorithm(loss=PPOClip(dual_clip=3.0)), far) == [0.0]


EVERY = [Algorithm(loss=a, correction=b, rejection=c) for a, b, c in COMBINATIONS]


def test_no_sampled_token_gives_a_loss_of_zero_and_finite_metrics():
    sampled = make_sampled([])
    for algorithm in EVERY:
        loss = piecewise(algorithm, sampled)
        loss.backward()
        assert loss.item() == 0.0, algorithm
    tally = Tally()
    none = torch.zeros(0, dtype=torch.bool)
    observe(tally, Observed(sampled, none, sampled.behaviour, none, sampled.behaviour))
    assert all(math.isfinite(value) for value in tally.take(Ranks()).summary().values())


@pytest.mark.parametrize("difference", [100.0, -100.0, math.inf, -math.inf])
def test_an_overflowing_ratio_is_clamped_before_exp_in_every_combination(difference: float):
    sampled = make_sampled([[(0.0, -difference, 1.0, 2)], [(0.0, -difference, -1.0, 1)]], torch.float32)
    for algorithm in EVERY:
        loss = piecewise(algorithm, sampled)
        (grad,) = torch.autograd.grad(loss, sampled.logprobs)
        assert math.isfinite(loss.item()), algorithm
        assert bool(grad.isfinite().all()), algorithm


def test_a_nan_log_prob_is_hidden_by_no_mask():
    sampled = make_sampled([[(math.nan, 0.0, 1.0, 0), (-1.0, -1.0, 1.0, 0)]])
    for algorithm in EVERY:
        assert math.isnan(piecewise(algorithm, sampled).item()), algorithm


@pytest.mark.parametrize(("rejection", "kept"), [(SequenceRejection(high=2.0), [0, 1]), (GeometricRejection(), [0, 0])])
def test_rows_are_rejected_whole(rejection: SequenceRejection | GeometricRejection, kept: list[int]):
    far, near = [(-0.1, -0.5, 1.0, 0)] * 3, [(-0.1, -0.15, 1.0, 0)] * 3
    assert keep(rejection, make_sampled([far, near])).tolist() == [bool(k) for k in kept for _ in range(3)]


def told(sampled: Sampled, loss: Any, parts: list[slice]) -> dict[str, float]:
    """The metrics of `sampled`, observed in parts."""
    tally = Tally()
    for part in parts:
        some = Sampled(*(field.detach()[part] for field in sampled))
        some = some._replace(rows=some.rows.unique(return_inverse=True)[1])
        found: Gains = gain(loss, some.log_ratio(), some)
        ones = torch.ones_like(some.behaviour)
        observe(tally, Observed(some, found.clipped, ones, ones > 0, ones))
    return tally.take(Ranks()).summary()


def test_metrics_are_their_equations_by_lag_however_the_tokens_are_split():
    rows = [[(-0.1, -0.5, 1.0, 0), (-2.0, -1.0, 1.0, 3)], [(-0.7, -0.7, -0.5, 3), (-3.0, -0.4, -2.0, 12)]]
    got = told(make_sampled(rows), PPOClip(), [slice(0, 1), slice(1, 3), slice(3, 4)])
    tokens = [token for row in rows for token in row]
    chosen = {"": tokens, "lag_0/": tokens[:1], "lag_3/": tokens[1:3], "lag_8/": tokens[3:]}
    for prefix, some in chosen.items():
        r = [math.exp(new - old) for new, old, _, _ in some]
        n = len(some)
        clipped = [(x > 1.28 and t[2] > 0) or (x < 0.8 and t[2] < 0) for x, t in zip(r, some, strict=True)]
        wanted = {
            "kl_k1": sum(-math.log(x) for x in r) / n,
            "kl_k2": sum(math.log(x) ** 2 / 2 for x in r) / n,
            "kl": sum(x - 1 - math.log(x) for x in r) / n,
            "ess": sum(r) ** 2 / (n * sum(x * x for x in r)),
            "ratio_mean": sum(r) / n,
            "clip_share": sum(clipped) / n,
        }
        assert {name: got[prefix + name] for name in wanted} == pytest.approx(wanted), prefix
    assert got["ratio_max"] == pytest.approx(math.exp(0.4))
    assert not any(name.startswith(("lag_1/", "lag_2/")) for name in got)


@pytest.mark.parametrize("difference", [100.0, -100.0])
def test_a_saturated_ratio_is_counted_and_its_metrics_stay_finite(difference: float):
    got = told(make_sampled([[(0.0, -difference, 1.0, 0)]]), PPOClip(), [slice(0, 1)])
    assert got["saturated"] == 1
    assert got["ratio_max"] == pytest.approx(math.exp(math.copysign(LOG_RATIO_LIMIT, difference)))
    assert all(math.isfinite(value) for value in got.values())


def test_a_nan_shows_in_the_metrics():
    got = told(make_sampled([[(math.nan, 0.0, 1.0, 0)]]), PPOClip(), [slice(0, 1)])
    assert math.isnan(got["kl"])
    assert math.isnan(got["ratio_max"])


def test_a_tally_starts_again_after_it_was_taken():
    tally = Tally()
    tally.add(rows=3)
    assert tally.take(Ranks()).sums["rows"] == 3
    assert tally.take(Ranks()).sums["rows"] == 0
