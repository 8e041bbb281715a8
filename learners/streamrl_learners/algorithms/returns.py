"""Rewards within a row -> advantages of its tokens: for flows whose rows carry a reward per turn or per token.

numpy float64 only. The rows of streamrl's own training flow carry one reward each, and no values: nothing in the
configuration names these functions. They are for a stage or a learner of one's own.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.uint8]


def gae(rewards: Floats, values: Floats, mask: Mask, *, gamma: float = 1.0, lam: float = 0.95) -> Floats:
    """Generalised advantage estimates `[tokens]`, in units of reward; NaN where `mask` is 0.

    delta_t = r_t + gamma V(t+1) - V(t), A_t = delta_t + gamma lam A(t+1): GAE, arXiv 1506.02438, eqs. 11, 12 and 16.
    t goes over sampled tokens only: the next state of the last token of a turn is the first token of the next one,
    after the tool has answered. After the last token V = 0. The return of a token, for the critic, is A_t + V_t.

    Args:
        rewards: `[tokens]`, what came after each sampled token.
        values: `[tokens]`, the critic's value of the state in which each token was sampled.
        mask: `[tokens]`, 1 where the policy sampled the token; what stands elsewhere is not looked at.
        gamma: discount per sampled token.
        lam: 0 is the one-step error, 1 the return less the value.

    Raises:
        ValueError: arrays of different lengths.
    """
    _one_length(rewards=rewards, values=values, mask=mask)
    advantages = np.full(len(mask), np.nan)
    after, next_value = 0.0, 0.0
    for t in np.flatnonzero(mask)[::-1]:
        after = rewards[t] + gamma * next_value - values[t] + gamma * lam * after
        advantages[t], next_value = after, values[t]
    return advantages


def rewards_to_go(rewards: Floats, mask: Mask, *, gamma: float = 1.0) -> Floats:
    """sum_k gamma^k r_(t+k) over sampled tokens `[tokens]`; NaN where `mask` is 0. Per-token rewards without a critic.

    REINFORCE with reward to go (Sutton and Barto 2018, section 13.3): GAE at lam 1 with values of 0.
    """
    return gae(rewards, np.zeros(len(mask)), mask, gamma=gamma, lam=1.0)


def at_turn_ends(rewards: Floats, mask: Mask) -> Floats:
    """One reward per turn `[turns]` -> rewards per token `[tokens]`: each at the last token of its turn, else 0.

    A turn is a run of sampled tokens. Turn-level credit: arXiv 2505.11821.

    Raises:
        ValueError: another number of rewards than of turns.
    """
    sampled = np.asarray(mask) != 0
    ends = np.flatnonzero(sampled & ~np.append(sampled[1:], False))
    if len(ends) != len(rewards):
        raise ValueError(f"rewards: expected one for each of {len(ends)} turns, got {len(rewards)}")
    placed = np.zeros(len(sampled))
    placed[ends] = rewards
    return placed


def _one_length(**arrays: npt.NDArray[np.generic]) -> None:
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"expected arrays of one length, got {lengths}")
