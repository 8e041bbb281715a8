"""The sampled tokens of one micro-batch: all that losses, corrections and rejections look at.

Tokens that nobody sampled are not in them, so no mask is needed and a NaN under a mask cannot leak in. A row is
never split over micro-batches, so sums over its tokens are whole.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

# exp(20) = 4.9e8: far beyond every clip and cap, and its square is still finite in float32.
LOG_RATIO_LIMIT: Final = 20.0


class Sampled(NamedTuple):
    """All `[n]`, the sampled tokens of all rows, one after another.

    `logprobs`: log pi, nats, with gradient. `behaviour`: log mu, nats. `advantages`: one per token. `rows` int64:
    which row a token belongs to, numbered from 0 without gaps. `lags`: steps taken since the version that sampled it.
    """

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    rows: Tensor
    lags: Tensor

    def log_ratio(self) -> Tensor:
        """Log pi - log mu `[n]`, nats, with gradient."""
        return self.logprobs - self.behaviour


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """The exponential of `log_ratio` clamped to +-LOG_RATIO_LIMIT, gradient 0 where the clamp acts; NaN stays NaN."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def saturated(log_ratio: Tensor) -> Tensor:
    """Where `bounded_exp` had to clamp, `[n]` bool."""
    return log_ratio.abs() > LOG_RATIO_LIMIT


def row_sum(values: Tensor, rows: Tensor) -> Tensor:
    """For each token the sum of `values` `[n]` over its row, `[n]`, with gradient."""
    # Each row has a token, so n sums are enough for all of them: their number need not be asked of the device.
    return torch.zeros_like(values).index_add(0, rows, values)[rows]


def row_mean(values: Tensor, rows: Tensor) -> Tensor:
    """For each token the mean of `values` `[n]` over its row, `[n]`, with gradient."""
    return row_sum(values, rows) / row_sum(torch.ones_like(values), rows)
