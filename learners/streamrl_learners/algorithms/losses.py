"""Policy losses: L(ratio, A) of each sampled token, before weights, signs and normalisation.

All tensors are `[tokens]` over sampled tokens only, as in `corrections`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import torch
from torch import Tensor

from ..config import AlgorithmConfig, PPOClip, Reinforce
from .corrections import bounded_exp


def surrogate(config: AlgorithmConfig, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """The objective of each token, to be maximised. `log_ratio` in nats, `advantages` one per token."""
    return SURROGATES[type(config)](config, log_ratio, advantages)


def clip_range(config: AlgorithmConfig) -> tuple[float, float]:
    """The interval of ratios in which a token's gradient passes whatever its advantage."""
    if not isinstance(config, PPOClip):
        return 0.0, float("inf")
    return 1 - config.clip, 1 + (config.clip if config.clip_high is None else config.clip_high)


def ppo_clip(config: PPOClip, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """min(r A, clip(r, 1 - clip, 1 + clip_high) A): PPO (arXiv 1707.06347) eq. 7, DAPO (arXiv 2503.14476) eq. 10."""
    low, high = clip_range(config)
    ratio = bounded_exp(log_ratio)
    return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def reinforce(config: Reinforce, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Ratio times advantage. With pi_prox = stopgrad(pi) its gradient is A grad log pi (Williams 1992, eq. 8)."""
    return bounded_exp(log_ratio) * advantages


_Surrogate = Callable[[AlgorithmConfig, Tensor, Tensor], Tensor]
SURROGATES: Final = {PPOClip: cast(_Surrogate, ppo_clip), Reinforce: cast(_Surrogate, reinforce)}
