"""Corrections for rows that another policy sampled: which policy the ratio is taken to, and a weight per token.

All tensors are `[tokens]`: the sampled tokens of a micro-batch, one after another. Tokens that nobody sampled
are not in them, so no mask is needed and a NaN under a mask cannot leak in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor

from ..config import Behaviour, CorrectionConfig, NoCorrection, TruncatedIS

# exp(20) = 4.9e8 nats: far beyond every clip and cap, and its square is still finite in float32.
LOG_RATIO_LIMIT: Final = 20.0


class Corrected(NamedTuple):
    """`log_ratio`: log pi - log pi_prox, nats, with gradient. `weight`: without gradient. Both `[tokens]`."""

    log_ratio: Tensor
    weight: Tensor


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """The exponential of `log_ratio` clamped to +-LOG_RATIO_LIMIT, gradient 0 where the clamp acts; NaN stays NaN."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def saturated(log_ratio: Tensor) -> Tensor:
    """Where `bounded_exp` had to clamp, `[tokens]` bool."""
    return log_ratio.abs() > LOG_RATIO_LIMIT


def correct(config: CorrectionConfig, logprobs: Tensor, behaviour: Tensor) -> Corrected:
    """The ratio and weight of each token, from the current (with gradient) and the behaviour log-probs, nats."""
    return CORRECTIONS[type(config)](config, logprobs, behaviour)


def no_correction(config: NoCorrection, logprobs: Tensor, behaviour: Tensor) -> Corrected:
    """pi_prox = stopgrad(pi), w = 1: the ratio is 1 and carries the gradient of log pi."""
    return Corrected(logprobs - logprobs.detach(), torch.ones_like(logprobs))


def behaviour_correction(config: Behaviour, logprobs: Tensor, behaviour: Tensor) -> Corrected:
    """pi_prox = pi_behaviour, w = 1 (PPO, arXiv 1707.06347, with pi_old the policy that sampled)."""
    return Corrected(logprobs - behaviour, torch.ones_like(logprobs))


def truncated_is(config: TruncatedIS, logprobs: Tensor, behaviour: Tensor) -> Corrected:
    """pi_prox = stopgrad(pi), w = min(stopgrad(pi / pi_behaviour), cap) (Ionides 2008, eq. 3)."""
    weight = bounded_exp(logprobs.detach() - behaviour).clamp(max=config.cap)
    return Corrected(logprobs - logprobs.detach(), weight)


_Correction = Callable[[CorrectionConfig, Tensor, Tensor], Corrected]
CORRECTIONS: Final = {
    NoCorrection: cast(_Correction, no_correction),
    Behaviour: cast(_Correction, behaviour_correction),
    TruncatedIS: cast(_Correction, truncated_is),
}
