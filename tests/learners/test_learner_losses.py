"""Losses, corrections and metrics against scalar transcriptions in float64."""

from __future__ import annotations

import math

import pytest
import torch

from streamrl_learners.algorithms.corrections import LOG_RATIO_LIMIT, correct
from streamrl_learners.algorithms.losses import surrogate
from streamrl_learners.algorithms.metrics import Tally, observe
from streamrl_learners.config import Behaviour, NoCorrection, PPOClip, Reinforce, TruncatedIS
from streamrl_learners.ranks import Ranks

CURRENT = [-0.1, -2.0, -0.7, -3.0, -0.5, -1.0, -1.0]
SAMPLED = [-0.5, -1.0, -0.7, -0.4, -2.5, -1.1, -0.9]
ADVANTAGES = [1.0, 1.0, -0.5, -2.0, -1.5, 0.0, 3.0]


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    current = torch.tensor(CURRENT, dtype=torch.float64, requires_grad=True)
    return current, torch.tensor(SAMPLED, dtype=torch.float64), torch.tensor(ADVANTAGES, dtype=torch.float64)


def gradient(config: PPOClip | Reinforce, current: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor):
    log_ratio, weight = correct(config.correction, current, sampled)
    gains = weight * surrogate(config, log_ratio, advantages)
    (grad,) = torch.autograd.grad(gains.sum(), current)
    return gains.detach().tolist(), grad.tolist()


def transcribed_ppo(low: float, high: float) -> tuple[list[float], list[float]]:
    """PPO eq. 7, one token after the other, and its derivative by log pi."""
    gains, grads = [], []
    for new, old, a in zip(CURRENT, SAMPLED, ADVANTAGES, strict=True):
        r = math.exp(new - old)
        clipped = min(max(r, 1 - low), 1 + high)
        gains.append(min(r * a, clipped * a))
        grads.append(r * a if r * a <= clipped * a else 0.0)
    return gains, grads


@pytest.mark.parametrize(("clip_high", "high"), [(None, 0.2), (0.28, 0.28)])
def test_ppo_clip_is_its_equation(clip_high: float | None, high: float):
    got = gradient(PPOClip(clip=0.2, clip_high=clip_high), *tensors())
    for mine, theirs in zip(got, transcribed_ppo(0.2, high), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-12)


def test_without_a_correction_the_gradient_is_that_of_reinforce():
    for config in (PPOClip(correction=NoCorrection()), Reinforce(correction=NoCorrection())):
        gains, grads = gradient(config, *tensors())
        assert gains == pytest.approx(ADVANTAGES, abs=1e-12)
        assert grads == pytest.approx(ADVANTAGES, abs=1e-12)


def test_reinforce_with_behaviour_is_plain_importance_sampling():
    _, grads = gradient(Reinforce(correction=Behaviour()), *tensors())
    wanted = [math.exp(n - o) * a for n, o, a in zip(CURRENT, SAMPLED, ADVANTAGES, strict=True)]
    assert grads == pytest.approx(wanted, abs=1e-12)


def test_truncated_importance_weights_are_capped_and_carry_no_gradient():
    _, grads = gradient(Reinforce(correction=TruncatedIS(cap=2.0)), *tensors())
    wanted = [min(math.exp(n - o), 2.0) * a for n, o, a in zip(CURRENT, SAMPLED, ADVANTAGES, strict=True)]
    assert grads == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("config", [PPOClip(), Reinforce(), PPOClip(correction=TruncatedIS())])
def test_no_sampled_token_gives_a_loss_of_zero_and_no_nan(config: PPOClip | Reinforce):
    current = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    log_ratio, weight = correct(config.correction, current, torch.zeros(0, dtype=torch.float64))
    loss = (weight * surrogate(config, log_ratio, torch.zeros(0, dtype=torch.float64))).sum()
    loss.backward()
    assert loss.item() == 0.0
    tally = Tally()
    observe(tally, config, current.detach(), log_ratio.detach(), torch.zeros(0))
    assert all(math.isfinite(value) for value in tally.take(Ranks()).summary().values())


@pytest.mark.parametrize("difference", [100.0, -100.0, math.inf, -math.inf])
def test_an_overflowing_ratio_is_clamped_before_exp_and_counted(difference: float):
    current = torch.tensor([0.0], dtype=torch.float32, requires_grad=True)
    sampled = torch.tensor([-difference], dtype=torch.float32)
    advantages = torch.tensor([1.0])
    for config in (PPOClip(), Reinforce(), Reinforce(correction=TruncatedIS())):
        gains, grads = gradient(config, current, sampled, advantages)
        assert all(map(math.isfinite, gains + grads))
    tally = Tally()
    log_ratio = (current - sampled).detach()
    observe(tally, PPOClip(), log_ratio, log_ratio, advantages)
    summary = tally.take(Ranks()).summary()
    assert summary["saturated"] == 1
    assert summary["ratio_max"] == pytest.approx(math.exp(math.copysign(LOG_RATIO_LIMIT, difference)))
    assert all(math.isfinite(value) for value in summary.values())


def test_a_nan_log_prob_is_not_hidden():
    current = torch.tensor([math.nan], requires_grad=True)
    gains, _ = gradient(PPOClip(), current, torch.tensor([0.0]), torch.tensor([1.0]))
    assert math.isnan(gains[0])


def test_metrics_are_their_equations_however_the_tokens_are_split():
    current, sampled, advantages = tensors()
    log_ratio = (current - sampled).detach()
    tally = Tally()
    for part in (slice(0, 1), slice(1, 5), slice(5, 7)):
        observe(tally, PPOClip(clip=0.2, clip_high=0.28), log_ratio[part], log_ratio[part], advantages[part])
    got = tally.take(Ranks()).summary()
    ratios = [math.exp(x) for x in log_ratio.tolist()]
    n = len(ratios)
    assert got["kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / n)
    assert got["ess"] == pytest.approx(sum(ratios) ** 2 / (n * sum(r * r for r in ratios)))
    assert got["ratio_mean"] == pytest.approx(sum(ratios) / n)
    assert got["ratio_max"] == pytest.approx(max(ratios))
    outside = [(r > 1.28 and a > 0) or (r < 0.8 and a < 0) for r, a in zip(ratios, ADVANTAGES, strict=True)]
    assert got["clip_share"] == pytest.approx(sum(outside) / n)


def test_a_tally_starts_again_after_it_was_taken():
    tally = Tally()
    tally.add(rows=3)
    assert tally.take(Ranks()).sums["rows"] == 3
    assert tally.take(Ranks()).sums["rows"] == 0
