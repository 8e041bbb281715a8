"""An environment is loaded by name, and one that cannot work is refused before an episode starts."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents_support import agent_of, play, tiny

from streamrl_agents import demonstrations
from streamrl_agents.agent import load_agent
from streamrl_queue.errors import ConfigError

COUNTER = '''
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Step:
    amount: int

class Counter:
    def reset(self, task: dict) -> str:
        self.total = task.get("start", 0)
        return "count"

    def add(self, step: Step) -> int:
        """Add an amount.

        Args:
            step: how much.
        """
        self.total += step.amount
        return self.total

    def reward(self) -> float:
        return float(self.total)

    @staticmethod
    def task(rng):
        return {"start": rng.randint(1, 9)}

async def talk(task, chat):
    return float((await chat.say("number?")).text)

def task(rng):
    return {"from": "module"}

NUMBER = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_env.py"
    path.write_text(COUNTER)
    return path


def test_a_class_in_a_file_plays(file: Path) -> None:
    agent = load_agent(f"{file}:Counter")
    call = '<tool_call>{"name": "add", "arguments": {"step": {"amount": 4}}}</tool_call>'
    trajectory = play(agent, call, "done", task={"start": 1})
    assert (agent.name, trajectory.status, trajectory.outcome) == ("Counter", "completed", 5.0)
    assert agent.tools[0]["function"]["description"] == "Add an amount."
    assert 1 <= agent.sample_task(random.Random(0))["start"] <= 9


def test_a_function_in_a_file_plays_and_its_module_samples_the_tasks(file: Path) -> None:
    agent = load_agent(f"{file}:talk")
    assert play(agent, "7").outcome == 7.0
    assert agent.sample_task(random.Random(0)) == {"from": "module"}
    assert agent.tools == []


def test_a_file_is_loaded_once(file: Path) -> None:
    assert load_agent(f"{file}:Counter")._kind is load_agent(f"{file}:Counter")._kind  # type: ignore[attr-defined]


def test_a_module_is_loaded_by_name() -> None:
    agent = load_agent("streamrl_agents.environments.calc:Calc")
    assert repr(agent) == "<ClassAgent Calc, tools: calculator>"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("Lookup", "expected module:Name or path/to/file.py:Name"),
        ("streamrl_agents.nowhere:X", "streamrl_agents.nowhere: no such module"),
        ("nowhere.py:X", "no such file"),
        ("streamrl_agents.environments.lookup:Lookip", "has no Lookip; did you mean Lookup?"),
        ("streamrl_agents.environments.lookup:MAX_CALLS", "expected a class or an async function(task, chat), got int"),
    ],
)
def test_a_spec_that_names_nothing_says_what_to_write(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_agent(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("code", "line", "error"),
    [
        ("import not_installed_anywhere", 1, "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("x = 1\nclass X\n", 2, "SyntaxError: expected ':'"),
        ("import json\njson.loads('nothing')", 2, "JSONDecodeError: Expecting value"),
        ("raise SystemExit('no')", 1, "SystemExit: no"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_with_line_and_error_each_time(
    tmp_path: Path, code: str, line: int, error: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(code)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            load_agent(f"{path}:X")
        assert str(caught.value).startswith(f"{path} cannot be imported: {path}:{line}: {error}")


def test_an_error_in_a_module_that_the_environment_imports_is_told_at_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper_of_env.py").write_text("\n\n1 / 0")
    (tmp_path / "env_with_helper.py").write_text("import helper_of_env")
    with pytest.raises(ConfigError, match=r"env_with_helper cannot be imported: .*helper_of_env\.py:3: ZeroDivision"):
        load_agent("env_with_helper:X")


def test_a_class_without_reset_or_reward_is_refused() -> None:
    class NoReset:
        def reward(self) -> float:
            return 0.0

    class NoReward:
        def reset(self, task: dict[str, Any]) -> str:
            return ""

    with pytest.raises(ConfigError, match=r"NoReset: expected a method reset\(self, task\), found none"):
        agent_of(NoReset)
    with pytest.raises(ConfigError, match="NoReward: expected a method reward"):
        agent_of(NoReward)


def test_a_reward_may_ask_only_for_what_there_is() -> None:
    class Env:
        def reset(self, task: dict[str, Any]) -> str:
            return "go"

        def reward(self, anser: str) -> float:
            return 0.0

    with pytest.raises(ConfigError, match=r"Env\.reward: expected parameters out of answer, messages, task; got anser"):
        agent_of(Env)


def test_a_reward_gets_answer_messages_and_task_by_name() -> None:
    class Env:
        def reset(self, task: dict[str, Any]) -> list[dict[str, str]]:
            return [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

        async def reward(self, task: dict[str, Any], messages: list[dict[str, Any]], answer: str) -> float:
            assert [m["role"] for m in messages] == ["system", "user", "assistant"]
            return float(answer == task["right"])

    assert play(Env, "yes", task={"right": "yes"}).outcome == 1.0


def test_an_agent_without_tasks_or_demonstrations_says_what_is_missing() -> None:
    class Env:
        def reset(self, task: dict[str, Any]) -> str:
            return ""

        def reward(self) -> float:
            return 0.0

    with pytest.raises(ConfigError, match=r"expected a function task\(rng\) -> dict"):
        agent_of(Env).sample_task(random.Random(0))
    with pytest.raises(ConfigError, match="a warm start needs demonstrate"):
        demonstrations.play(agent_of(Env), tiny(), random.Random(0), False)


def test_importing_the_agents_pulls_in_neither_torch_nor_transformers() -> None:
    modules = "agent, chat, config, conversation, demonstrations, episode, rewards, template, tools, vocabulary"
    code = (
        f"import sys; from streamrl_agents import {modules}; "
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
