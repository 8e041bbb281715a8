"""The command line as a person meets it: help, exit codes, and errors without tracebacks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import streamrl
from streamrl import cli


def test_help_answers_within_a_second_and_names_the_commands() -> None:
    seconds: list[float] = []
    # The machine may do something else for a moment; not three times.
    while len(seconds) < 3 and min(seconds, default=1.0) >= 1.0:
        started = time.monotonic()
        command = [sys.executable, "-m", "streamrl.cli", "--help"]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds.append(time.monotonic() - started)
    assert min(seconds) < 1.0
    assert all(command in out.stdout for command in ("launch", "config", "queue", "status"))


def test_a_configuration_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--dry-run", "queue.max_stalness=2"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "ConfigError: unknown key queue.max_stalness; did you mean queue.max_staleness?\n"


def test_a_dry_run_prints_configuration_and_roles_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["launch", "--dry-run", "learner.ranks=2", "producers=2", "engine.count=2"]) == 0
    out = capsys.readouterr().out
    assert "# roles: queue, learner-0, learner-1, engine-0, engine-1, producer-0, producer-1, scorer-0" in out
    assert "max_staleness:" in out
    assert list(tmp_path.iterdir()) == []


def test_config_prints_the_resolved_values_and_explain_the_meanings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "learner.steps=7"]) == 0
    assert "steps: 7" in capsys.readouterr().out
    assert cli.main(["config", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "queue.max_staleness: int (default 2)\n    The most optimizer steps" in out
    assert "learner.steps: int (default 40, demo.yaml: 70)" in out
    for arguments in (["learner.steps", "learner.steps=7"], ["learner.steps=7"]):
        assert cli.main(["config", "--explain", *arguments]) == 0
        assert "learner.steps: int (default 40, here: 7)" in capsys.readouterr().out


def test_without_a_command_there_is_help_and_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "launch" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("streamrl ")


def test_status_of_a_run_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


def test_the_public_names_are_these() -> None:
    assert sorted(streamrl.__all__) == [
        "AsyncioTransferQueue",
        "BlockingTransferQueue",
        "ConfigError",
        "RunConfig",
        "StreamRLError",
        "StreamingBatches",
        "Summary",
        "ToolCall",
        "TransferQueue",
        "run",
    ]
    for name in streamrl.__all__:
        assert getattr(streamrl, name).__name__
    with pytest.raises(AttributeError, match="it has AsyncioTransferQueue"):
        _ = streamrl.nothing


def test_the_part_folders_are_no_packages() -> None:
    top = Path(streamrl.__file__).parents[1]
    found = [part for part in ("queue", "agents", "producers", "learners") if (top / part / "__init__.py").exists()]
    assert found == [], "an __init__.py there would shadow the standard library's queue"
