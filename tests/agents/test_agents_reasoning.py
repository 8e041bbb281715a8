"""A data set of reasoning-gym is an environment: one seed is one task, and its own scores are the rewards."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import types
from typing import Any, ClassVar

import pytest
from agents_support import play

from streamrl_agents.agent import Agent, ClassAgent, load_agent
from streamrl_agents.environments.reasoning import ReasoningGym
from streamrl_queue.errors import ConfigError

MODULE = "streamrl_agents.environments.reasoning"


class Doubles:
    """A data set with the interface of reasoning-gym's: twice a number that follows from the seed."""

    salt = 0

    def __init__(self, seed: int, limit: int) -> None:
        assert limit > 0, "limit must be positive"
        self.number = (seed + self.salt) % limit

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert index == 0
        return {"question": f"Twice {self.number}?", "answer": str(2 * self.number), "metadata": {"n": self.number}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        assert answer is not None
        distance = abs(int(answer) - 2 * entry["metadata"]["n"])  # raises on what is no number
        return 1.0 if distance == 0 else 0.01


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    def create_dataset(name: str, *, size: int, seed: int, limit: int = 1000) -> Doubles:
        assert (name, size) == ("doubles", 1)
        return Doubles(seed, limit)

    fake = types.ModuleType("reasoning_gym")
    fake.factory = types.SimpleNamespace(DATASETS={"doubles": None, "chain_sum": None})  # type: ignore[attr-defined]
    fake.create_dataset = create_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", fake)
    return fake


@pytest.fixture
def doubles(package: types.ModuleType) -> Agent:
    return load_agent(f"{MODULE}:doubles")


def test_a_data_set_is_addressed_by_its_name(doubles: Agent) -> None:
    assert (repr(doubles), doubles.tools) == ("<ClassAgent doubles, tools: none>", [])


def test_a_task_follows_from_its_seed_alone(doubles: Agent) -> None:
    first, again, other = (doubles.sample_task(random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert first["question"] == f"Twice {first['seed'] % 1000}?"


@pytest.mark.parametrize(
    ("text", "score"),
    [("42", 1.0), ("Hm. <answer> 42\n</answer>", 1.0), ("<answer>1</answer> or <answer>42</answer>", 1.0), ("7", 0.01)],
)
def test_the_reward_is_the_data_sets_score_of_the_final_answer(doubles: Agent, text: str, score: float) -> None:
    trajectory = play(doubles, text, task={"seed": 21, "question": "Twice 21?"})
    assert (trajectory.status, trajectory.outcome, trajectory.turns) == ("completed", score, 1)


def test_a_score_that_fails_is_an_error_and_not_a_reward_of_zero(doubles: Agent) -> None:
    trajectory = play(doubles, "no idea", task={"seed": 21, "question": "Twice 21?"})
    assert (trajectory.status, trajectory.outcome) == ("error_env", None)
    assert "invalid literal for int()" in (trajectory.error or "")


def test_a_data_set_that_gives_another_question_for_the_seed_is_an_error(
    doubles: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = doubles.sample_task(random.Random(0))
    monkeypatch.setattr(Doubles, "salt", 1)
    trajectory = play(doubles, "0", task=task)
    assert trajectory.status == "error_env"
    assert "PYTHONHASHSEED=0" in (trajectory.error or "")


def test_settings_and_prompt_are_class_attributes(package: types.ModuleType) -> None:
    class Small(ReasoningGym):
        dataset = "doubles"
        settings: ClassVar = {"limit": 5}
        system = ""

    task = Small.task(random.Random(3))
    assert task["question"] == f"Twice {task['seed'] % 5}?"
    assert Small().reset(task) == [{"role": "user", "content": task["question"]}]


def test_settings_that_the_data_set_refuses_are_refused_when_the_class_is_made(package: types.ModuleType) -> None:
    for settings, message in (({"limits": 5}, "unexpected keyword"), ({"limit": 0}, "limit must be positive")):
        with pytest.raises(ConfigError, match=rf"Wrong\.settings: doubles refuses .*{message}"):
            type("Wrong", (ReasoningGym,), {"dataset": "doubles", "settings": settings})


def test_an_unknown_data_set_names_those_that_are_close(package: types.ModuleType) -> None:
    with pytest.raises(ConfigError, match="no data set chain_sums; did you mean chain_sum"):
        load_agent(f"{MODULE}:chain_sums")


def test_the_base_class_alone_says_how_to_name_a_data_set() -> None:
    with pytest.raises(ConfigError, match=r"ReasoningGym\.dataset: expected the name of a data set"):
        ClassAgent(ReasoningGym, "ReasoningGym").sample_task(random.Random(0))


def test_a_missing_package_is_refused_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"chain_sum needs reasoning-gym .*pip install 'streamrl\[envs\]'"):
        load_agent(f"{MODULE}:chain_sum")


REAL = """
import random, sys
from agents_support import play
from streamrl_agents.agent import load_agent

agent = load_agent("streamrl_agents.environments.reasoning:chain_sum")
task = agent.sample_task(random.Random(4))
sum = task["question"].rpartition(":")[2].removesuffix("=")
right = eval(sum, {})
for answer in (right, right + 1):
    print(play(agent, f"{sum}. <answer>{answer}</answer>", task=task).outcome)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is not installed: pip install 'streamrl[envs]'",
)
def test_the_real_package_plays_an_episode() -> None:
    """In a process of its own: the package's import takes seconds and is not clean of warnings."""
    done = subprocess.run(
        [sys.executable, "-c", REAL], capture_output=True, text=True, timeout=120, cwd=__file__.rpartition("/")[0]
    )
    assert done.stdout.split() == ["1.0", "0.0"], done.stderr
