"""Advantages against direct transcriptions of their equations, and the rewards that broke other systems."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_learners.advantage_worker import advantages_of
from streamrl_learners.algorithms.advantages import group_advantages, standardised
from streamrl_learners.algorithms.pieces import Grpo, ReinforcePlusPlus, Rloo

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


def transcribed_plus_plus(groups: list[list[float]], tokens: list[int], baseline: bool, bound: float) -> list[float]:
    """REINFORCE++: the advantage of every token, one after the other, less their mean, by their deviation."""
    values = [r - (math.fsum(group) / len(group) if baseline else 0.0) for group in groups for r in group]
    each = [value for value, n in zip(values, tokens, strict=True) for _ in range(n)]
    mean = math.fsum(each) / len(each)
    deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in each) / len(each))
    return [max(-bound, min(bound, (value - mean) / deviation)) for value in values]


@given(
    st.lists(st.lists(st.integers(-6, 6), min_size=2, max_size=4), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
    st.sampled_from(["none", "group"]),
    st.integers(0, 20),
)
def test_reinforce_plus_plus_is_its_equation_on_any_ranks(groups, rng, baseline, cut):
    config = ReinforcePlusPlus(baseline=baseline, bound=1.5)
    values = [a for group in groups for a in group_advantages(config, [r / 4 for r in group]).tolist()]
    tokens = [rng.randint(0, 5) for _ in values]
    if np.ptp([v for v, n in zip(values, tokens, strict=True) if n] or [0.0]) < 1e-9:
        assert standardised(config, values, tokens).tolist() == [0.0] * len(values)
        return
    wanted = transcribed_plus_plus([[r / 4 for r in group] for group in groups], tokens, baseline == "group", 1.5)
    np.testing.assert_allclose(standardised(config, values, tokens), wanted, atol=1e-9)

    with ThreadPoolExecutor(2) as ranks:
        halves = ((values[:cut], tokens[:cut]), (values[cut:], tokens[cut:]))
        summed = all_reduce(2)
        parts = list(ranks.map(lambda half: standardised(config, *half, summed).tolist(), halves))
    np.testing.assert_allclose(parts[0] + parts[1], wanted, atol=1e-9)


def all_reduce(world: int) -> Callable[[Sequence[float]], list[float]]:
    """Adds up what as many threads say, as ranks do."""
    barrier, said = Barrier(world), list[Sequence[float]]()

    def summed(numbers: Sequence[float]) -> list[float]:
        said.append(numbers)
        barrier.wait(timeout=10)
        total = [sum(column) for column in zip(*said[-world:], strict=True)]
        barrier.wait(timeout=10)
        return total

    return summed


def test_equal_rewards_of_a_step_teach_nothing_however_they_are_rounded():
    assert standardised(ReinforcePlusPlus(), [float(np.float32(1e6 / 3))] * 7, [3] * 7).tolist() == [0.0] * 7
    assert standardised(ReinforcePlusPlus(), [], []).tolist() == []
    assert standardised(ReinforcePlusPlus(), [1.0, 2.0], [0, 0]).tolist() == [0.0, 0.0]


def test_a_reward_alone_in_its_group_is_kept_where_nothing_is_compared():
    assert group_advantages(ReinforcePlusPlus(), [3.0]).tolist() == [3.0]
    assert group_advantages(ReinforcePlusPlus(baseline="group"), [3.0]).tolist() == [0.0]
    # No bound yet: it is one of the standardised advantage.
    assert group_advantages(ReinforcePlusPlus(), [300.0, 300.0]).tolist() == [300.0, 300.0]


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
    modules = ("advantage_worker", "algorithms.pieces", "algorithms.checks", "config", "tiny")
    code = f"import sys; {'; '.join(f'import streamrl_learners.{m}' for m in modules)}\nprint('torch' in sys.modules)"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "False"
