"""What long rows lose of their reward, before it is compared with others."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .base import Length, function_of
from .pieces import SoftOverlong

Floats: TypeAlias = npt.NDArray[np.float64]


def length_penalty(config: Length | None, tokens: npt.NDArray[np.int64]) -> Floats:
    """What is added to the rewards `[rows]` of rows of so many tokens `[rows]`; never above 0."""
    return np.zeros(len(tokens)) if config is None else function_of(config)(config, tokens)


def soft_overlong(config: SoftOverlong, tokens: npt.NDArray[np.int64]) -> Floats:
    """0 up to max - buffer tokens, -scale from max on, a straight line between: DAPO (arXiv 2503.14476) eq. 13."""
    over = (tokens - (config.max_tokens - config.buffer_tokens)) / config.buffer_tokens
    penalty: Floats = -config.scale * np.clip(over, 0.0, 1.0)
    return penalty
