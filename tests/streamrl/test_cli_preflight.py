"""What a launch and a dry run refuse before anything is started: one line each, and no directory left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from streamrl import cli
from streamrl.config import find_file, load_file
from streamrl.runtime import preflight
from streamrl_queue.errors import ConfigError

ENV = """
from datetime import datetime
import random

class NoTask:
    def reset(self, task): return ""
    def reward(self): return 0.0

class NoReset:
    def reward(self): return 0.0

class ListTask(NoTask):
    @staticmethod
    def task(rng): return [1]

class ObjectTask(NoTask):
    @staticmethod
    def task(rng):
        return {"x": object()}

class FailingTask(NoTask):
    @staticmethod
    def task(rng):
        return {"x": [][0]}

class NoHint(ObjectTask):
    def tool(self, x):
        '''A tool.'''

class Tools(NoTask):
    def look(self) -> str:
        '''Look.'''

    @staticmethod
    def task(rng): return {}

class NoDocs(ObjectTask):
    def tool(self, x: int): ...

async def talk(task, chat): return 0.0

def numbers(rng): return {"x": rng.random()}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "broken.py").write_text("class X\n")
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a launch says, which is what the dry run says."""
    said = []
    for dry in ([], ["--dry-run"]):
        assert cli.main(["launch", *dry, "--name", "one", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        said.append(err.removeprefix("ConfigError: "))
    assert said[0] == said[1]
    assert said[0].count("\n") == 1
    return said[0].rstrip("\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken.py:X", "broken.py:1: SyntaxError: expected ':'"),
        ("nothing.py:X", "env: nothing.py: no such file"),
        ("env.py:NoReset", "env: NoReset: expected a method reset(self, task), found none"),
        ("env.py:NoHint", "env: tool tool: parameter x: expected a type hint, got none"),
        ("env.py:NoDocs", "env: tool tool: expected a docstring, which the model reads; got none"),
        ("env.py:ListTask", "env: ListTask.task: expected a dict, got list"),
        ("env.py:ObjectTask", "env: env.py:ObjectTask: its task(rng): expected a dict of JSON values, but it failed"),
        ("env.py:FailingTask", "env.py:24: IndexError: list index out of range"),
        ("env.py:NoTask", "found none; write a static method task(rng) in the class, or name one with tasks.sampler="),
        ("env.py:talk", "found none; write task(rng) at module level beside it, or name one with tasks.sampler="),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert said in refusal(capsys, f"env={name}")
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("queue.metrics=0.0.0.0:9464", "queue.metrics: metrics address 0.0.0.0:9464 is reachable from other hosts"),
        ("tasks.sampler=env.py:number", "tasks.sampler: env.py: has no number; did you mean numbers?"),
        (
            "tasks.sampler=env.py:random",
            "tasks.sampler: env.py:random(rng): expected a dict of JSON values, but it failed",
        ),
        ("model={kind: hf, path: nowhere}", "model.path: expected a model's directory on this machine, found none at"),
        ("reward.parts={env.py:numers: 1}", "reward.parts: env.py: has no numers; did you mean numbers?"),
    ],
)
def test_a_key_that_names_what_is_not_there_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    assert refusal(capsys, override).startswith(said)


def test_tools_are_refused_where_the_chat_template_does_not_show_how_they_are_called(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bpe = Tokenizer(models.BPE(vocab={"a": 0, "<end>": 1}, merges=[]))
    bpe.save(str(here / "tokenizer.json"))
    (here / "config.json").write_text("{}")
    (here / "model.safetensors").write_bytes(b"")
    (here / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (here / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    model = ("env=env.py:Tools", "model={kind: hf, path: .}")
    assert refusal(capsys, *model).startswith("tool_format: Tools has tools, but the chat template does not show")
    assert cli.main(["launch", "--dry-run", *model, "tool_format=json"]) == 0
    assert "tool_format: json" in capsys.readouterr().out
    (here / "chat_template.jinja").unlink()
    assert refusal(capsys, *model).startswith("model.path: .: expected chat_template.jinja, or chat_template in")


def test_a_function_agent_runs_with_a_sampler_that_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--dry-run", "env=env.py:talk", "tasks.sampler=env.py:numbers"]) == 0
    assert "env.py:numbers" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["learner.device", "engine.device"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_started(
    here: Path, capsys: pytest.CaptureFixture[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["launch", f"{key}=cuda", "learner.transfer=gloo"]) == 2
    assert f"{key}: cuda, but torch" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_runs_that_cannot_be_written_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "runs=/proc/foo"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: runs: /proc/foo/demo cannot be used: ")


def test_resume_puts_the_overrides_on_the_runs_own_configuration(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "runs" / "first").mkdir(parents=True)
    assert (
        cli.main(["config", "env=env.py:talk", "tasks.sampler=env.py:numbers", "learner.steps=20", "name=first"]) == 0
    )
    (here / "runs" / "first" / "config.yaml").write_text(capsys.readouterr().out)
    assert cli.main(["launch", "--dry-run", "--resume", "--name", "first", "learner.steps=40"]) == 0
    out = capsys.readouterr().out
    assert "env: env.py:talk" in out
    assert "steps: 40" in out
    assert cli.main(["launch", "--resume", "--name", "first", "seed=3"]) == 2
    assert "--resume: seed is 0 in" in capsys.readouterr().err


def test_a_server_that_is_not_installed_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = load_file(find_file(None), ["engine.kind=vllm"])
    with pytest.raises(ConfigError, match="streamrl engines install vllm --cpu"):
        preflight.check_server(config)


def test_a_server_needs_what_talks_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load_file(find_file(None), ["engine={kind: sglang, urls: ['http://127.0.0.1:1'], max_tokens: 128}"])
    with pytest.raises(ConfigError, match=r"streamrl\[engines\]"):
        preflight.check_server(config)
