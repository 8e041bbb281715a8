"""Policy losses: the objective L(ratio, A) of each sampled token, before weights, signs and normalisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .base import Loss, function_of
from .pieces import Cispo, Gspo, PPOClip, Reinforce
from .sampled import Sampled, bounded_exp, row_mean


class Gains(NamedTuple):
    """`values`: what is to be maximised, with gradient. `clipped`: bool, where a clip changes the gradient. `[n]`."""

    values: Tensor
    clipped: Tensor


def gain(config: Loss, log_ratio: Tensor, sampled: Sampled) -> Gains:
    """The objective of each token; `log_ratio` `[n]` is log pi - log pi_prox, nats, with gradient."""
    return function_of(config)(config, log_ratio, sampled)  # type: ignore[no-any-return]


def ppo_clip(config: PPOClip, log_ratio: Tensor, sampled: Sampled) -> Gains:
    """min(r A, clip(r, 1 - clip, 1 + clip_high) A), and where A < 0 not below dual_clip A.

    PPO (arXiv 1707.06347) eq. 7, DAPO (arXiv 2503.14476) eq. 10, dual clip (arXiv 1912.09729).
    """
    gains = _clipped(config, bounded_exp(log_ratio), sampled.advantages)
    if config.dual_clip is None:
        return gains
    floor = config.dual_clip * sampled.advantages
    below = (sampled.advantages < 0) & (gains.values < floor)
    return Gains(torch.where(below, floor, gains.values), gains.clipped | below)


def reinforce(config: Reinforce, log_ratio: Tensor, sampled: Sampled) -> Gains:
    """Ratio times advantage. With pi_prox = stopgrad(pi) its gradient is A grad log pi (Williams 1992)."""
    return Gains(bounded_exp(log_ratio) * sampled.advantages, torch.zeros_like(log_ratio, dtype=torch.bool))


def gspo(config: Gspo, log_ratio: Tensor, sampled: Sampled) -> Gains:
    """min(s A, clip(s, 1 - clip, 1 + clip_high) A), s = exp(mean over the row's sampled tokens of log r_t).

    GSPO (arXiv 2507.18071) eqs. 5 and 7. Every token gets its row's value: under `sequence_mean` they add up to the
    paper's mean over rows. A row of several segments has one ratio, as it has one reward.
    """
    return _clipped(config, bounded_exp(row_mean(log_ratio, sampled.rows)), sampled.advantages)


def cispo(config: Cispo, log_ratio: Tensor, sampled: Sampled) -> Gains:
    """stopgrad(clip(r, 1 - clip, 1 + clip_high)) A log pi: CISPO (arXiv 2506.13585) eqs. 4 and 5."""
    ratio = bounded_exp(log_ratio.detach())
    low, high = 0.0 if config.clip is None else 1 - config.clip, 1 + config.clip_high
    values = ratio.clamp(low, high) * sampled.advantages * sampled.logprobs
    return Gains(values, (ratio < low) | (ratio > high))


def _clipped(config: PPOClip | Gspo, ratio: Tensor, advantages: Tensor) -> Gains:
    low = 1 - config.clip
    high = 1 + (config.clip if config.clip_high is None else config.clip_high)
    values = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    with torch.no_grad():
        clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    return Gains(values, clipped)
