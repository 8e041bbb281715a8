"""Rewards of one group -> advantages of its rows. numpy float64 only, so that any process may compute them.

All estimators here are relative to the group: a group whose rewards are all alike teaches nothing and gets
exact zeros. "Alike" is decided on max - min, before anything is divided: a standard deviation of equal floats
need not be 0 (seven times 0.35 in float32 gives 1.5e-4), and dividing by it makes noise look like signal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..config import AdvantageConfig, Grpo, Rloo

Floats: TypeAlias = npt.NDArray[np.float64]

# Rewards that differ by less than this share of their magnitude (or of 1) are equal: 1e-9 is far above the
# rounding of float64 sums (1e-16) and far below any difference between rewards that somebody means.
SAME_REWARD: Final = 1e-9


def group_advantages(config: AdvantageConfig, rewards: npt.ArrayLike) -> Floats:
    """Advantages `[rows]` of one group from its rewards `[rows]`, in units of reward (or of its deviation).

    Raises:
        ValueError: for a reward that is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards: expected finite floats, got {values.tolist()}")
    if len(values) < 2 or not has_variance(values):
        return np.zeros_like(values)
    return np.clip(ESTIMATORS[type(config)](config, values), -config.bound, config.bound)


def has_variance(rewards: Floats) -> bool:
    """Whether the rewards of a group differ by more than rounding."""
    return bool(np.ptp(rewards) > SAME_REWARD * max(1.0, float(np.abs(rewards).max())))


def grpo(config: Grpo, rewards: Floats) -> Floats:
    """(r_i - mean(r)) / std(r), population standard deviation; without the division for `scale: none`.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2; the division left out: Dr. GRPO (arXiv 2503.20783), section 3.
    """
    centred: Floats = rewards - rewards.mean()
    return centred / rewards.std() if config.scale == "std" else centred


def rloo(config: Rloo, rewards: Floats) -> Floats:
    """r_i - mean of the other rows = n / (n - 1) * (r_i - mean(r)). RLOO (arXiv 2402.14740), eq. 8."""
    n = len(rewards)
    advantages: Floats = (rewards - rewards.mean()) * (n / (n - 1))
    return advantages


ESTIMATORS: Final = {
    Grpo: cast(Callable[[AdvantageConfig, Floats], Floats], grpo),
    Rloo: cast(Callable[[AdvantageConfig, Floats], Floats], rloo),
}
