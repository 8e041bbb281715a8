"""The environment that the README shows works as it is printed there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch_support import SMALL

import streamrl
from streamrl import cli
from streamrl.config import find_file, load_file
from streamrl_agents.agent import load_agent

README = Path(streamrl.__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> str:
    code = re.search(r"`warehouse\.py`:\n\n```python\n(.*?)```", README.read_text(), re.S)
    assert code is not None
    file = tmp_path_factory.mktemp("readme") / "warehouse.py"
    file.write_text(code[1])
    return f"{file}:Warehouse"


def test_its_two_methods_are_the_tools_and_their_docstrings_the_descriptions(environment: str) -> None:
    tools = {tool["function"]["name"]: tool["function"]["description"] for tool in load_agent(environment).tools}
    assert tools == {"locate": "Find the shelf of an item.", "count": "Count what lies on a shelf."}


def test_its_function_form_has_tasks_and_demonstrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"`sums\.py`:\n\n```python\n(.*?)```\n\n    streamrl (.*?)\n", README.read_text(), re.S)
    assert found is not None
    (tmp_path / "sums.py").write_text(found[1])
    monkeypatch.chdir(tmp_path)
    assert cli.main([*found[2].split(), "--dry-run"]) == 0
    assert "env: sums.py:my_agent" in capsys.readouterr().out
    assert load_agent("sums.py:my_agent").demonstrate is not None


@pytest.mark.slow
def test_it_is_learned(environment: str, tmp_path: Path) -> None:
    """Slow: a whole run, about 25 s; 0.75 was seen after as many steps."""
    overrides = [*SMALL, "learner.steps=20", "learner.rows_per_step=64", f"env={environment}", f"runs={tmp_path}"]
    summary = streamrl.run(load_file(find_file("demo"), overrides))
    assert summary.reward_before is not None
    assert summary.reward_after is not None
    assert summary.reward_after - summary.reward_before > 0.2
