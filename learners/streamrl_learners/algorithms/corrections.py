"""Corrections for rows that another policy sampled: which policy the ratio is taken to, and a weight per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .base import Correction, function_of
from .pieces import Behaviour, Decoupled, Level, MaskedIS, NoCorrection, TruncatedIS
from .sampled import LOG_RATIO_LIMIT, Sampled, bounded_exp, row_sum


class Corrected(NamedTuple):
    """`log_ratio`: log pi - log pi_prox, nats, with gradient. `weight`: without gradient. Both `[n]`."""

    log_ratio: Tensor
    weight: Tensor


def correct(config: Correction, sampled: Sampled) -> Corrected:
    """The ratio and weight of each token."""
    return function_of(config)(config, sampled)  # type: ignore[no-any-return]


def no_correction(config: NoCorrection, sampled: Sampled) -> Corrected:
    """pi_prox = stopgrad(pi), w = 1: the ratio is 1 and carries the gradient of log pi."""
    return Corrected(_to_itself(sampled), torch.ones_like(sampled.logprobs))


def behaviour(config: Behaviour, sampled: Sampled) -> Corrected:
    """pi_prox = mu, w = 1 (PPO, arXiv 1707.06347, with pi_old the policy that sampled)."""
    return Corrected(sampled.log_ratio(), torch.ones_like(sampled.logprobs))


def truncated_is(config: TruncatedIS, sampled: Sampled) -> Corrected:
    """pi_prox = stopgrad(pi), w_t = min(r, cap), where r is r_t, or prod_t r_t over the row (Ionides 2008, eq. 3)."""
    return Corrected(_to_itself(sampled), _ratio(config.level, sampled).clamp(max=config.cap))


def masked_is(config: MaskedIS, sampled: Sampled) -> Corrected:
    """pi_prox = stopgrad(pi), w_t = r where low <= r <= high, else 0; r is r_t, or prod_t r_t over the row.

    IcePop (arXiv 2510.18855) on tokens; masked IS (Liu et al. 2025) on rows. A token of weight 0 stays in the
    normaliser, because the indicator stands inside the expectation over what was sampled.
    """
    ratio = _ratio(config.level, sampled)
    return Corrected(_to_itself(sampled), ratio * ((ratio >= config.low) & (ratio <= config.high)))


def decoupled(config: Decoupled, sampled: Sampled) -> Corrected:
    """Log pi_prox = a log mu + (1 - a) log stopgrad(pi), w = min(pi_prox / mu, cap); a = 1 / lag, and 0 at lag 0.

    Decoupled PPO (arXiv 2110.00641): w * L(pi / pi_prox). The proximal policy is where pi was about one step ago,
    interpolated between the two policies that are known (A-3PO, arXiv 2512.06547). A fresh token has pi_prox = pi:
    then its weight is all there is, and corrects what the engine computes otherwise than the learner.
    """
    lags = sampled.lags.to(sampled.logprobs.dtype)
    share = torch.where(lags > 0, 1 / lags.clamp(min=1), 0.0)
    # Clamped first: 0 times an infinite ratio would be NaN.
    apart = sampled.log_ratio().detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    to_behaviour = (1 - share) * apart
    log_ratio = sampled.log_ratio() - to_behaviour
    return Corrected(log_ratio, bounded_exp(to_behaviour).clamp(max=config.cap))


def _to_itself(sampled: Sampled) -> Tensor:
    return sampled.logprobs - sampled.logprobs.detach()


def _ratio(level: Level, sampled: Sampled) -> Tensor:
    log_ratio = sampled.log_ratio().detach()
    return bounded_exp(row_sum(log_ratio, sampled.rows) if level == "sequence" else log_ratio)
