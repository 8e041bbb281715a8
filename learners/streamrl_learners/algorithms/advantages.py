"""Rewards of one group -> advantages of its rows. numpy float64 only, so that any process may compute them.

A group whose rewards are all alike teaches nothing where rows are compared, and gets exact zeros. "Alike" is decided
on max - min, before anything is divided: a standard deviation of equal floats need not be 0 (seven times 0.35 in
float32 gives 1.5e-4), and dividing by it makes noise look like signal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .base import Advantage, function_of
from .pieces import Grpo, ReinforcePlusPlus, Rloo

Floats: TypeAlias = npt.NDArray[np.float64]

# Rewards that differ by less than this share of their magnitude (or of 1) are equal: 1e-9 is far above the
# rounding of float64 sums (1e-16) and far below any difference between rewards that somebody means.
SAME_REWARD: Final = 1e-9


def group_advantages(config: Advantage, rewards: npt.ArrayLike) -> Floats:
    """Advantages `[rows]` of one group from its rewards `[rows]`, in units of reward (or of its deviation).

    Of a piece that standardises, these are the values that `standardised` makes advantages of.

    Raises:
        ValueError: for a reward that is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards: expected finite floats, got {values.tolist()}")
    if config.compares and (len(values) < 2 or not has_variance(values)):
        return np.zeros_like(values)
    advantages: Floats = function_of(config)(config, values)
    return advantages if config.standardises else np.clip(advantages, -config.bound, config.bound)


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


def reinforce_plus_plus(config: ReinforcePlusPlus, rewards: Floats) -> Floats:
    """r_i, or r_i - mean(r) of its group for `baseline: group`: to be standardised over the step.

    REINFORCE++ (arXiv 2501.03262), without its KL term: there is no reference policy.
    """
    return rewards - rewards.mean() if config.baseline == "group" else rewards


def standardised(
    config: Advantage,
    values: npt.ArrayLike,
    tokens: npt.ArrayLike,
    summed: Callable[[Sequence[float]], list[float]] = list,
) -> Floats:
    """(a_i - mean) / std over all sampled tokens of a step, within the bound; zeros where all are alike.

    REINFORCE++ (arXiv 2501.03262): mean and (population) deviation are over tokens, each of which has its row's value.

    Args:
        config: the piece; its `bound` is kept.
        values: `[rows]`, what `group_advantages` gave.
        tokens: `[rows]`, sampled tokens of each row.
        summed: adds sums up element by element over all ranks that hold rows of the step. Called twice.
    """
    a, n = np.asarray(values, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    count, total, size = summed([float(n.sum()), float(n @ a), float(n @ np.abs(a))])
    if not count:
        return np.zeros_like(a)
    mean = total / count
    (squares,) = summed([float(n @ np.square(a - mean))])
    deviation = math.sqrt(squares / count)
    if not deviation > SAME_REWARD * max(1.0, size / count):
        return np.zeros_like(a)
    return np.clip((a - mean) / deviation, -config.bound, config.bound)
