"""Divergence from another policy, and entropy: what is taken off, or added to, the objective."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Estimator: TypeAlias = Literal["k1", "k2", "k3"]


class Divergence(NamedTuple):
    """Three estimates of KL(p || q) at each token `[n]`, nats; with gradient where the log-probs have one."""

    k1: Tensor
    k2: Tensor
    k3: Tensor


def divergence(log_ratio: Tensor) -> Divergence:
    """Estimates of KL(p || q) from `log_ratio` `[n]` = log q - log p at tokens that p sampled, nats.

    k1 = -log r, unbiased, may be negative. k2 = (log r)^2 / 2, biased, its gradient is that of KL at p = q.
    k3 = r - 1 - log r, unbiased, never negative. Schulman 2020, http://joschu.net/blog/kl-approx.html. Not clamped:
    who takes log ratios from elsewhere clamps them first.
    """
    return Divergence(-log_ratio, log_ratio.square() / 2, log_ratio.exp() - 1 - log_ratio)


def reference_penalty(estimator: Estimator, logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(pi || pi_ref) at each token `[n]`, nats, of tokens that pi sampled; with the gradient of `logprobs`.

    In a loss, beta times its normalised sum is added (GRPO, arXiv 2402.03300, eqs. 3 and 4, with k3). In a reward,
    beta times it, without gradient, is taken off the reward of each token (Ouyang et al. 2022, arXiv 2203.02155,
    eq. 2, with k1).
    """
    estimate: Tensor = getattr(divergence(reference - logprobs), estimator)
    return estimate


def entropy(logits: Tensor) -> Tensor:
    """-sum_v p_v log p_v `[n]`, nats, of the distributions with `logits` `[n, vocabulary]`; with gradient.

    Entropy bonus: Williams and Peng 1991, doi 10.1080/09540099108946587; A3C, arXiv 1602.01783, section 4. A logit
    of -inf is a token of probability 0, which adds 0.
    """
    logs = logits.log_softmax(-1)
    # 0 * -inf would be NaN.
    return -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1)
