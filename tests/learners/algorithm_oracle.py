"""The papers' equations, one token after the other, on scalars: what the vectorised pieces are compared with.

Nothing here is shared with the code under test but the structs that hold options. Scalars are 0-dimensional float64
tensors, so that autograd differentiates the transcription too; `.detach()` is the papers' stop-gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from streamrl_learners.algorithms.pieces import (
    Algorithm,
    Behaviour,
    Cispo,
    Decoupled,
    GeometricRejection,
    Gspo,
    LagDecay,
    LagMask,
    MaskedIS,
    NoCorrection,
    PPOClip,
    Reinforce,
    SequenceRejection,
    TruncatedIS,
)


class Token(NamedTuple):
    """One sampled token: log-probs in nats, its row's advantage, its lag in steps, the entropy where it was sampled."""

    new: Tensor
    old: float
    advantage: float
    lag: int = 0
    entropy: Tensor | float = 0.0


def objective(algorithm: Algorithm, rows: list[list[Token]]) -> tuple[Tensor, float]:
    """The sum of the loss over `rows`, and what it is divided by."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows:
        if isinstance(algorithm.lag, LagMask):
            row = [token for token in row if token.lag <= algorithm.lag.max_lag]
        if not row:
            # A constant counts rows, whatever is in them.
            count += algorithm.normalise_length or 0
            continue
        if not accepted(algorithm, row):
            continue
        gains = torch.zeros((), dtype=torch.float64)
        for token in row:
            age = max(1, token.lag) ** -algorithm.lag.power if isinstance(algorithm.lag, LagDecay) else 1.0
            gains = gains + age * (gain(algorithm, token, row) + algorithm.entropy * token.entropy)
        if algorithm.normalise == "sequence_mean":
            total, count = total - gains / len(row), count + 1
        elif algorithm.normalise == "token_mean":
            total, count = total - gains, count + len(row)
        else:
            total, count = total - gains, count + algorithm.normalise_length
    return total, count


def ratio_of(token: Token) -> Tensor:
    return (token.new - token.old).exp()


def product(row: list[Token]) -> Tensor:
    result = torch.ones((), dtype=torch.float64)
    for token in row:
        result = result * ratio_of(token)
    return result


def accepted(algorithm: Algorithm, row: list[Token]) -> bool:
    match algorithm.rejection:
        case SequenceRejection(low=low, high=high):
            return low <= product(row).item() <= high
        case GeometricRejection(low=low, high=high):
            return low <= product(row).item() ** (1 / len(row)) <= high
    return True


def gain(algorithm: Algorithm, token: Token, row: list[Token]) -> Tensor:
    """Weight * L(pi / pi_prox, A) of one token."""
    weight = importance(algorithm, token, row)
    a = token.advantage
    ratio = to_proximal(algorithm, token)
    match algorithm.loss:
        case Reinforce():
            return weight * ratio * a
        case PPOClip(clip=low, clip_high=high, dual_clip=dual):
            value = torch.min(ratio * a, min_max(ratio, 1 - low, 1 + (low if high is None else high)) * a)
            if dual is not None and a < 0:
                value = torch.max(value, torch.tensor(dual * a, dtype=torch.float64))
            return weight * value
        case Gspo(clip=low, clip_high=high):
            s = torch.ones((), dtype=torch.float64)
            for other in row:
                s = s * to_proximal(algorithm, other) ** (1 / len(row))
            return weight * torch.min(s * a, min_max(s, 1 - low, 1 + (low if high is None else high)) * a)
        case Cispo(clip=low, clip_high=high):
            bounded = min_max(ratio, 0.0 if low is None else 1 - low, 1 + high)
            return weight * bounded.detach() * a * token.new
    raise AssertionError(algorithm.loss)


def min_max(x: Tensor, low: float, high: float) -> Tensor:
    return torch.tensor(low, dtype=torch.float64) if x < low else torch.tensor(high, dtype=x.dtype) if x > high else x


def to_proximal(algorithm: Algorithm, token: Token) -> Tensor:
    """Pi / pi_prox of a token."""
    current = token.new.detach()
    match algorithm.correction:
        case Behaviour():
            return ratio_of(token)
        case Decoupled():
            return token.new.exp() / proximal(token)
    return token.new.exp() / current.exp()


def proximal(token: Token) -> Tensor:
    """The geometric mean of mu and pi, with the weight 1 / lag on mu; pi itself for a fresh token."""
    current = token.new.detach()
    if token.lag == 0:
        return current.exp()
    return torch.tensor(token.old, dtype=torch.float64).exp() ** (1 / token.lag) * current.exp() ** (1 - 1 / token.lag)


def importance(algorithm: Algorithm, token: Token, row: list[Token]) -> float:
    match algorithm.correction:
        case NoCorrection() | Behaviour():
            return 1.0
        case TruncatedIS(level=level, cap=cap):
            return min((ratio_of(token) if level == "token" else product(row)).item(), cap)
        case MaskedIS(level=level, low=low, high=high):
            ratio = (ratio_of(token) if level == "token" else product(row)).item()
            return ratio if low <= ratio <= high else 0.0
        case Decoupled(cap=cap):
            return min((proximal(token) / torch.tensor(token.old, dtype=torch.float64).exp()).item(), cap)
    raise AssertionError(algorithm.correction)
