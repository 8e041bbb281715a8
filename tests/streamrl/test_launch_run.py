"""Whole runs with every process: asynchrony as the journal tells it, killed processes, signals, resume.

Slow, because each run starts six processes of which two import torch, and makes a model: about 15 s.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from launch_support import SMALL, Launched, gone, until

import streamrl
from streamrl.config import find_file, load_file
from streamrl_queue import audit
from streamrl_queue import events as e
from streamrl_queue.batches import decode
from streamrl_queue.schema import arrays, spans

pytestmark = pytest.mark.slow

# What must be seen to overlap has to take time, however busy the machine: a step's rows come from many episodes of
# about a second, one after the other, and none of them is ready when the learner is.
SLOW_EPISODES = (f"env={Path(__file__).with_name('slow_lookup.py')}:SlowLookup", "rollout.concurrency=24")


class Story:
    """A run's journal, by what happened to which row."""

    def __init__(self, journal: Path) -> None:
        self.granted: dict[tuple[str, int], float] = {}
        self.written: dict[tuple[str, int], float] = {}
        self.learn: dict[int, list[tuple[float, tuple[int, ...]]]] = defaultdict(list)
        self.commits: dict[int, tuple[float, tuple[int, ...]]] = {}
        self.versions: dict[int, int] = {}
        self.version_commits: list[float] = []
        self.oldest: dict[int, int] = {}
        self.group: dict[int, int] = {}
        self.spans: dict[int, Any] = {}
        self.sampled_without_version = 0
        for event, _, payload in audit.events(journal):
            assert payload is not None, "a small journal is not compacted"
            self._take(event, payload)

    def _take(self, event: e.Event, payload: memoryview) -> None:
        if isinstance(event, e.Put):
            for i in range(len(event.lines) * event.members):
                self.group[event.first_row + i] = event.first_group + i // event.members
        elif isinstance(event, e.Granted):
            self.granted |= {(event.stage, row): event.at for row in event.rows}
            if event.stage == "learn":
                assert event.step is not None
                self.learn[event.step].append((event.at, event.rows))
        elif isinstance(event, e.Written):
            self.written |= {(event.stage, row): event.at for row in event.rows}
            if event.stage == "rollout":
                self._trajectories(event, payload)
        elif isinstance(event, e.Committed):
            self.commits[event.step] = (event.at, event.rows)
        elif isinstance(event, e.VersionBegun):
            self.versions[event.version] = event.step
        elif isinstance(event, e.VersionCommitted):
            self.version_commits.append(event.at)

    def _trajectories(self, event: e.Written, payload: memoryview) -> None:
        batch = decode(payload, "journal")
        self.oldest |= dict(zip(event.rows, event.oldest, strict=True))
        rows = batch.column("row").to_pylist()
        for row, mask, of_row in zip(rows, arrays(batch.column("mask")), spans(batch.column("versions")), strict=True):
            self.spans[row] = of_row
            first = int(mask.argmax()) if mask.any() else len(mask)
            self.sampled_without_version += bool(mask.any()) and (not of_row or of_row[0].start > first)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[streamrl.Summary, Path]:
    runs = tmp_path_factory.mktemp("runs")
    config = load_file(find_file("demo"), [*SMALL, *SLOW_EPISODES, f"runs={runs}"])
    return streamrl.run(config), runs / "small"


@pytest.fixture
def runs(tmp_path: Path, finished: tuple[streamrl.Summary, Path]) -> Path:
    """A directory for a run that starts from the model of the finished one, without a warm start."""
    shutil.copytree(finished[1] / "base", tmp_path / "small" / "base")
    return tmp_path


@pytest.fixture(scope="module")
def story(finished: tuple[streamrl.Summary, Path]) -> Story:
    return Story(finished[1] / "journal")


def test_a_run_from_python_ends_with_every_row_accounted_for(finished: tuple[streamrl.Summary, Path]) -> None:
    summary, run = finished
    assert summary.outcome == "finished"
    assert summary.steps == 10
    assert summary.rows_trained == 320
    rows = summary.conservation
    ended = rows["trained"] + rows["done"] + sum(rows["dropped"].values()) + sum(rows["dead"].values())
    assert rows["tasks"] == ended
    assert rows["waiting"] == rows["leased"] == rows["ready"] == 0
    assert len(summary.evaluations) == 2
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "reward.png", "journal", "checkpoints", "model"):
        assert (run / name).exists()
    assert not (run / "launch.json").exists()


def test_no_process_and_no_socket_outlives_a_run(finished: tuple[streamrl.Summary, Path]) -> None:
    _, run = finished
    logs = "".join(log.read_text() for log in (run / "logs").glob("*.log"))
    pids = [int(pid) for pid in re.findall(r" pid (\d+) starts", logs)]
    assert len(pids) == 5
    assert all(gone(pid) for pid in pids)


def test_rollouts_are_written_while_the_learner_is_inside_a_step(story: Story) -> None:
    rollouts = sorted(at for (stage, _), at in story.written.items() if stage == "rollout")
    inside = [
        step for step, (end, _) in story.commits.items() if any(story.learn[step][0][0] < at < end for at in rollouts)
    ]
    assert len(inside) >= 3


def test_weights_change_in_the_middle_of_running_episodes(story: Story) -> None:
    crossed = [
        row
        for (stage, row), end in story.written.items()
        if stage == "rollout" and any(story.granted[stage, row] < at < end for at in story.version_commits)
    ]
    assert crossed


def test_rows_exist_whose_tokens_come_from_several_versions_and_every_sampled_token_has_one(story: Story) -> None:
    assert story.sampled_without_version == 0
    assert any(len({span.version for span in of_row}) > 1 for of_row in story.spans.values())


def test_the_learner_takes_rows_before_the_rows_of_its_step_are_all_there(story: Story) -> None:
    early = [
        step
        for step, (_, rows) in story.commits.items()
        if story.learn[step][0][0] < max(story.written["advantage", row] for row in rows)
    ]
    assert early


def test_rewards_are_written_while_other_members_of_the_group_still_generate(story: Story) -> None:
    generated: dict[int, float] = defaultdict(float)
    for (stage, row), at in story.written.items():
        if stage == "rollout":
            generated[story.group[row]] = max(generated[story.group[row]], at)
    early = [
        row for (stage, row), at in story.written.items() if stage == "reward" and at < generated[story.group[row]]
    ]
    assert early


def test_no_row_is_trained_twice_or_staler_than_allowed(story: Story) -> None:
    trained = [row for _, rows in story.commits.values() for row in rows]
    assert len(trained) == len(set(trained)) == 320
    lags = [step - 1 - story.versions[story.oldest[row]] for step, (_, rows) in story.commits.items() for row in rows]
    assert min(lags) >= 0
    assert max(lags) <= 2


def test_a_killed_producer_engine_and_scorer_are_survived_and_nothing_is_lost(runs: Path) -> None:
    launched = Launched(runs, *SMALL, "learner.steps=24")
    for step, role in ((3, "producer-0"), (6, "engine-0"), (9, "scorer-0")):
        launched.reaches(step)
        os.kill(launched.pids(role)[-1], signal.SIGKILL)
    code, output = launched.end()
    assert code == 0, output
    summary = launched.summary()
    assert summary["outcome"] == "finished"
    assert summary["restarts"] == {"producer-0": 1, "engine-0": 1, "scorer-0": 1}
    rows = summary["conservation"]
    assert rows["trained"] == 24 * 32
    assert rows["dead"] == {}
    story = Story(launched.run / "journal")
    trained = [row for _, of_step in story.commits.values() for row in of_step]
    assert len(trained) == len(set(trained)) == 24 * 32
    assert all(gone(pid) for pid in launched.all_pids())


def test_ctrl_c_drains_and_checkpoints_and_resume_ends_as_if_nothing_had_happened(runs: Path) -> None:
    launched = Launched(runs, *SMALL)
    launched.reaches(5)
    launched.process.send_signal(signal.SIGINT)
    code, output = launched.end()
    assert code == 0, output
    assert "continue with: streamrl launch --resume --name small" in output
    assert launched.summary()["outcome"] == "interrupted by SIGINT"
    reached = launched.summary()["steps"]
    assert f"step-{reached:08d}" in os.listdir(launched.run / "checkpoints")
    assert all(gone(pid) for pid in launched.all_pids())

    again = Launched(runs, *SMALL, "--resume")
    code, output = again.end()
    assert code == 0, output
    summary = again.summary()
    assert summary["outcome"] == "finished"
    assert summary["rows_trained"] == 320
    trained = [row for _, rows in Story(again.run / "journal").commits.values() for row in rows]
    assert len(trained) == len(set(trained)) == 320


def test_a_second_signal_stops_at_once_and_leaves_no_process(runs: Path) -> None:
    launched = Launched(runs, *SMALL)
    launched.reaches(2)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.stdout is not None
    until(lambda: "draining" in launched.process.stdout.readline())  # type: ignore[union-attr]
    launched.process.send_signal(signal.SIGTERM)
    code, output = launched.end(seconds=5)
    assert code == 143, output
    assert all(gone(pid) for pid in launched.all_pids())


def test_roles_die_with_a_coordinator_that_was_killed(runs: Path) -> None:
    launched = Launched(runs, *SMALL)
    launched.reaches(1)
    pids = launched.all_pids()
    launched.process.kill()
    launched.end()
    until(lambda: all(gone(pid) for pid in pids), seconds=2)


def test_an_environment_that_raises_ends_the_run_with_its_name_and_no_reward(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "class Broken:\n"
        "    def reset(self, task):\n        raise RuntimeError('the environment is broken')\n"
        "    def reward(self):\n        return 1.0\n"
        "    @staticmethod\n    def task(rng):\n        return {}\n"
    )
    launched = Launched(tmp_path, *SMALL, f"env={tmp_path / 'broken.py'}:Broken", "tasks.eval_rows=0")
    code, output = launched.end()
    assert code == 1, output
    assert re.search(r"NoProgress: (\d+) of the \1 training rows that have ended were lost \(\1 error_env\)", output)
    assert "RuntimeError: the environment is broken" in output
    assert all(gone(pid) for pid in launched.all_pids())
