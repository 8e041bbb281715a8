"""Stalls that are planted in a real run are found from `status --json` alone: its head names who is at fault.

Slow, because a run starts six processes, two of which import torch, and makes a model: about 15 s.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launch_support import SMALL, Launched, until
from stalling import PLACE

from streamrl import cli

pytestmark = pytest.mark.slow

HERE = Path(__file__).with_name("stalling.py")
# Nothing that is stopped here is ended by a deadline; a session without heartbeat is over soon.
PATIENT = (
    *SMALL,
    f"env={HERE}:Stalling",
    f"reward.parts={{outcome: 1.0, '{HERE}:judge': 1.0}}",
    "reward.score_seconds=600",
    "rollout.tool_seconds=600",
    "rollout.episode_seconds=600",
    "queue.scoring_seconds=600",
    "queue.rollout_seconds=600",
    "queue.session_seconds=2",
    "queue.waiting_rows=64",
    "supervision.silent_seconds=600",
    "tasks.eval_rows=0",
    "model.warm_start={clean_steps: 40, sloppy_steps: 10, batch: 16, learning_rate: 4e-3}",
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PLACE, str(tmp_path))
    return tmp_path


@contextmanager
def launched(runs: Path, *overrides: str) -> Iterator[Launched]:
    run = Launched(runs, *PATIENT, *overrides)
    try:
        yield run
    finally:
        for pid in run.all_pids():
            if os.path.exists(f"/proc/{pid}"):
                os.kill(pid, signal.SIGCONT)
        run.process.send_signal(signal.SIGINT)
        run.end()


class Status:
    """`streamrl status --json` of one run."""

    def __init__(self, run: Launched, capsys: pytest.CaptureFixture[str]) -> None:
        self.run = run
        self.capsys = capsys
        self.last: dict[str, Any] = {}

    def ask(self) -> dict[str, Any]:
        assert self.run.process.poll() is None, self.run.process.communicate()[0]
        assert cli.main(["status", str(self.run.run), "--json"]) == 0
        self.last = json.loads(self.capsys.readouterr().out)
        return self.last

    def finds(self, pattern: str) -> list[str]:
        """The names along the chain, once its head is `pattern`."""
        until(lambda: re.fullmatch(pattern, self.ask()["head"]))
        return [link["who"] for link in self.last["waits"]]


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    os.kill(pids[-1], signal.SIGSTOP)
    yield
    os.kill(pids[-1], signal.SIGCONT)


@contextmanager
def standing(file: Path) -> Iterator[None]:
    file.touch()
    yield
    file.unlink()


def test_what_stands_still_in_a_run_is_the_head_of_what_status_tells(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with launched(place, "learner.steps=100000") as run:
        status = Status(run, capsys)
        run.reaches(1)
        # A worker that returns nothing: the episodes of one tool.
        with standing(place / "tool"):
            who = status.finds(r"producer-0: row \d+: tool `get` for \d+ s")
            assert who[:2] == ["coordinator", "learner-0"]
            assert re.fullmatch(r"group \d+", who[2])
        run.reaches(run.steps() + 2)
        # A scorer that does not come back.
        with standing(place / "scorer"):
            assert status.finds(rf"scorer-0: row \d+: scores with {HERE}:judge for \d+ s")[1] == "learner-0"
        run.reaches(run.steps() + 2)
        # Processes that are there and do nothing.
        with stopped(run.pids("engine-0")):
            status.finds(r"engine-0: is silent: it has no session at the queue for \d+ s")
        run.reaches(run.steps() + 2)
        with stopped(run.pids("scorer-0")):
            assert status.finds(r"scorer-0: is silent: .*")[-2:] == ["queue", "scorer-0"]
        run.reaches(run.steps() + 2)
        with stopped(run.pids("queue")):
            assert status.finds(r"queue: does not answer: .*") == ["queue"]
        run.reaches(run.steps() + 2)
        # The last, because its rows are given away meanwhile, which ends it when it goes on.
        with stopped(run.pids("learner-0")):
            assert status.finds(r"learner-0: is silent: .*") == ["coordinator", "learner-0"]


def test_a_run_that_stands_still_says_so_and_ends_with_who_waited_for_whom(place: Path) -> None:
    (place / "tool").touch()
    run = Launched(place, *PATIENT, "supervision.stall_alarm_seconds=6", "supervision.stall_seconds=14")
    code, output = run.end()
    (place / "tool").unlink()
    assert code == 1
    quiet = r"no step was committed for \d+ s"
    assert re.search(rf"DeadlineExceeded: step \d+: {quiet}, which is more than supervision.stall_seconds", output)
    assert re.search(r"who waited for whom: .*learner-0: waits for rows of step \d+: .*: tool `get` for \d+ s", output)
    log = (run.run / "logs" / "coordinator.log").read_text()
    assert re.search(rf"stall: {quiet}; coordinator: training: .*; producer-0: row \d+: tool `get`", log)
    events = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
    alarm = next(event for event in events if event.get("event") == "stall")
    assert alarm["seconds"] >= 6
    assert alarm["chain"][-1]["who"] == "producer-0"
