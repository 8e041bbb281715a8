"""Which rows are trained at all: those that the current policy might have sampled too.

A row that is left out counts neither above nor below the line.
"""

from __future__ import annotations

from torch import Tensor

from .base import Rejection, function_of
from .pieces import GeometricRejection, SequenceRejection
from .sampled import Sampled, bounded_exp, row_mean, row_sum


def keep(config: Rejection, sampled: Sampled) -> Tensor:
    """Whether each token's row is trained, `[n]` bool; the same for all tokens of a row."""
    return function_of(config)(config, sampled)  # type: ignore[no-any-return]


def sequence(config: SequenceRejection, sampled: Sampled) -> Tensor:
    """Low <= prod_t r_t <= high over the row's sampled tokens (Liu et al. 2025)."""
    return _inside(row_sum(sampled.log_ratio().detach(), sampled.rows), config)


def geometric(config: GeometricRejection, sampled: Sampled) -> Tensor:
    """Low <= (prod_t r_t)^(1/n) <= high over the row's n sampled tokens (Liu et al. 2025)."""
    return _inside(row_mean(sampled.log_ratio().detach(), sampled.rows), config)


def _inside(log_ratio: Tensor, config: SequenceRejection | GeometricRejection) -> Tensor:
    ratio = bounded_exp(log_ratio)
    # Written so that a NaN is kept: it must reach the loss, which tells of it.
    return ~((ratio < config.low) | (ratio > config.high))
