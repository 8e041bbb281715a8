"""What a token counts by its own lag: the steps that the learner has taken since the version that sampled it.

A trajectory has several versions when weights changed while it ran: its head may be stale and its tail fresh.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .base import Lag, function_of
from .pieces import LagDecay, LagMask

Lags: TypeAlias = npt.NDArray[np.int64]
Weights: TypeAlias = npt.NDArray[np.float64]


def lag_weights(config: Lag | None, lags: Lags) -> Weights:
    """The weight of each token `[tokens]` from its lag `[tokens]` in steps; 0 is as if nobody had sampled it."""
    return np.ones(len(lags)) if config is None else function_of(config)(config, lags)


def lags_up_to(most: int) -> Lags:
    """0, 1, … `most`."""
    return np.arange(most + 1)


def mask(config: LagMask, lags: Lags) -> Weights:
    """w_t = 1 where lag_t <= max_lag, else 0."""
    return (lags <= config.max_lag).astype(np.float64)


def decay(config: LagDecay, lags: Lags) -> Weights:
    """w_t = max(1, lag_t)^-power: staleness-aware SGD (arXiv 1511.05950) divides the step by the staleness."""
    weights: Weights = np.maximum(1, lags).astype(np.float64) ** -config.power
    return weights
