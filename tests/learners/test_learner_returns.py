"""Rewards per token and per turn become advantages as their equations say; what nobody sampled is passed over."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_learners.algorithms.returns import at_turn_ends, gae, rewards_to_go

number = st.floats(-5, 5)
tokens = st.lists(st.tuples(number, number, st.booleans()), min_size=1, max_size=10)
discount = st.floats(0, 1)


def columns(steps: list[tuple[float, float, bool]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, values and mask; NaN where nobody sampled."""
    rewards, values = (np.array([step[i] if step[2] else math.nan for step in steps]) for i in (0, 1))
    return rewards, values, np.array([step[2] for step in steps], np.uint8)


@given(tokens, discount, discount)
def test_gae_is_the_sum_of_discounted_errors(steps: list[tuple[float, float, bool]], gamma: float, lam: float):
    """Eq. 16 as a sum, where the code goes backwards."""
    taken = [step for step in steps if step[2]]
    values = [v for _, v, _ in taken] + [0.0]
    errors = [r + gamma * values[t + 1] - values[t] for t, (r, _, _) in enumerate(taken)]
    wanted = [sum((gamma * lam) ** k * errors[t + k] for k in range(len(taken) - t)) for t in range(len(taken))]
    got = gae(*columns(steps), gamma=gamma, lam=lam)
    mask = np.array([step[2] for step in steps])
    assert got[mask].tolist() == pytest.approx(wanted, abs=1e-9)
    assert np.isnan(got[~mask]).all()


@given(tokens, discount)
def test_rewards_to_go_are_discounted_over_sampled_tokens(steps: list[tuple[float, float, bool]], gamma: float):
    rewards, _, mask = columns(steps)
    taken = [step[0] for step in steps if step[2]]
    wanted = [sum(gamma**k * r for k, r in enumerate(taken[t:])) for t in range(len(taken))]
    assert rewards_to_go(rewards, mask, gamma=gamma)[mask == 1].tolist() == pytest.approx(wanted, abs=1e-9)


def test_a_row_in_which_nothing_was_sampled_has_no_advantages():
    nothing = np.zeros(3, np.uint8)
    assert np.isnan(gae(np.full(3, math.nan), np.full(3, math.nan), nothing)).all()
    assert len(gae(np.zeros(0), np.zeros(0), nothing[:0])) == 0
    assert at_turn_ends(np.zeros(0), nothing).tolist() == [0.0] * 3


def test_one_token_is_its_reward_less_its_value():
    assert gae(np.array([2.0]), np.array([0.5]), np.array([1], np.uint8)).tolist() == [1.5]


def test_the_reward_of_a_turn_stands_at_its_last_token():
    mask = np.array([0, 1, 1, 0, 0, 1, 0, 1], np.uint8)
    assert at_turn_ends(np.array([1.0, 2.0, 3.0]), mask).tolist() == [0, 0, 1, 0, 0, 2, 0, 3]
    got = rewards_to_go(at_turn_ends(np.array([1.0, 2.0, 3.0]), mask), mask)
    assert got[mask == 1].tolist() == [6, 6, 5, 3]


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="expected arrays of one length"):
        gae(np.zeros(2), np.zeros(3), np.ones(3, np.uint8))
    with pytest.raises(ValueError, match="one for each of 1 turns, got 2"):
        at_turn_ends(np.zeros(2), np.ones(3, np.uint8))
