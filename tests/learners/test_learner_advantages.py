"""Advantages against direct transcriptions of their equations, and the rewards that broke other systems."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_learners.advantage_worker import advantages_of
from streamrl_learners.algorithms.advantages import group_advantages
from streamrl_learners.config import Grpo, Rloo

REWARDS = [0.0, 1.0, 0.25, -3.0, 0.5]


def transcribed_grpo(rewards: list[float], std: bool) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)) if std else 1.0
    return [(r - mean) / deviation for r in rewards]


def transcribed_rloo(rewards: list[float]) -> list[float]:
    out = []
    for i, r in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        out.append(r - math.fsum(others) / len(others))
    return out


@pytest.mark.parametrize("std", [False, True])
def test_grpo_is_its_equation(std: bool):
    got = group_advantages(Grpo(scale="std" if std else "none"), REWARDS)
    np.testing.assert_allclose(got, transcribed_grpo(REWARDS, std), rtol=0, atol=1e-12)


def test_rloo_is_its_equation():
    np.testing.assert_allclose(group_advantages(Rloo(), REWARDS), transcribed_rloo(REWARDS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", [Grpo(), Grpo(scale="std"), Rloo()])
@pytest.mark.parametrize(
    "rewards",
    [[0.35] * 7, [0.1 + 0.2] * 4 + [0.3] * 4, list(np.float32([0.1] * 9)), [1e6 / 3] * 5, [0.0] * 4, [1.0], []],
)
def test_rewards_that_differ_by_rounding_only_teach_nothing(config: Grpo | Rloo, rewards: list[float]):
    assert group_advantages(config, rewards).tolist() == [0.0] * len(rewards)


def test_a_lone_success_keeps_its_distance_from_the_others():
    assert group_advantages(Rloo(), [0.35] * 7 + [0.95])[-1] == pytest.approx(0.60)


@pytest.mark.parametrize("config", [Grpo(scale="std"), Grpo(), Rloo()])
@pytest.mark.parametrize("rewards", [[1.0, 0, 0, 0], [1e-3, 0, 0, 0], [1e12, 0, 0, 0], [1.0] + [0.0] * 1000])
def test_advantages_are_bounded(config: Grpo | Rloo, rewards: list[float]):
    assert np.abs(group_advantages(config, rewards)).max() <= 10


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12), st.floats(-10, 10))
def test_a_shift_of_all_rewards_changes_no_advantage(rewards: list[float], shift: float):
    config = Grpo(bound=1e9)
    before, after = (group_advantages(config, np.asarray(rewards) + s) for s in (0.0, shift))
    np.testing.assert_allclose(before, after, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float):
    with pytest.raises(ValueError, match="expected finite floats"):
        group_advantages(Grpo(), [0.0, bad])


def test_groups_are_compared_among_themselves_in_any_order():
    batch = pa.RecordBatch.from_pydict({"row": [5, 1, 4, 2], "group": [9, 3, 9, 3], "reward": [1.0, 0.0, 0.0, 4.0]})
    got = advantages_of(Rloo(), batch)
    assert got.column("row").to_pylist() == [5, 1, 4, 2]
    assert got.column("advantage").to_pylist() == [1.0, -4.0, -1.0, 4.0]


def test_the_advantage_worker_and_the_configuration_need_no_torch():
    modules = ("advantage_worker", "config", "tiny")
    code = f"import sys\nfrom streamrl_learners import {', '.join(modules)}\nprint('torch' in sys.modules)"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "False"
