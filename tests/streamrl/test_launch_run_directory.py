"""Run directories: whose they are, what a second launch is told, where sockets go; tasks by number; summaries."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from streamrl.config import RunConfig, resolve
from streamrl.runtime import panel, summary
from streamrl.runtime.rundir import Launch, RunDirectory, choose, prepare, socket_directory
from streamrl.runtime.tasks import TaskSource, derive_seed
from streamrl_queue.errors import ConfigError

BASE = ["model.max_positions=2048"]


def config_in(tmp_path: Path, *overrides: str) -> RunConfig:
    return resolve({"env": "m:E", "name": "demo", "runs": str(tmp_path)}, [*BASE, *overrides])


def started(config: RunConfig, *, finished: bool = False) -> RunDirectory:
    run = RunDirectory(Path(config.runs) / config.name)
    with run.owned():
        prepare(run, config)
        run.write_launch(Launch(address="ipc://a", sockets="/tmp/a", pid=1))
    if finished:
        run.summary.write_text('{"outcome": "finished"}')
    return run


def test_a_directory_of_another_configuration_is_refused_with_the_first_key_that_differs(tmp_path: Path) -> None:
    started(config_in(tmp_path))
    with pytest.raises(
        ConfigError, match=r"its learner\.steps is 40, yours is 41; use its configuration with --resume"
    ):
        choose(config_in(tmp_path, "learner.steps=41"), resume=False, named=True)


def test_a_run_may_be_resumed_with_more_steps_and_other_processes_and_nothing_else(tmp_path: Path) -> None:
    started(config_in(tmp_path))
    for override in ("learner.steps=41", "producers=2", "engine.count=2", "supervision.restarts=1", "scorers=2"):
        assert choose(config_in(tmp_path, override), resume=True, named=True)[0].path.name == "demo"
    with pytest.raises(
        ConfigError, match=r"learner\.rows_per_step is 64 in .*demo and cannot become 128; leave it out"
    ):
        choose(config_in(tmp_path, "learner.rows_per_step=128"), resume=True, named=True)
    with pytest.raises(ConfigError, match=r"learner\.steps is 40 in .*demo and can only grow, got 39"):
        choose(config_in(tmp_path, "learner.steps=39"), resume=True, named=True)


def test_a_finished_run_goes_on_when_it_is_given_more_steps(tmp_path: Path) -> None:
    started(config_in(tmp_path), finished=True)
    with pytest.raises(ConfigError, match=r"has trained all its 40 steps; let it go on with learner\.steps=80"):
        choose(config_in(tmp_path), resume=True, named=True)
    assert choose(config_in(tmp_path, "learner.steps=41"), resume=True, named=True)[0].path.name == "demo"


def test_the_same_configuration_again_is_refused_until_resume_is_asked_for(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run = started(config)
    with pytest.raises(ConfigError, match="use --resume to continue it, or another --name"):
        choose(config, resume=False, named=True)
    assert choose(config, resume=True, named=True)[0].path == run.path


def test_a_name_that_nobody_asked_for_moves_on_past_finished_runs_and_says_so(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    started(config, finished=True)
    run, said = choose(config, resume=False, named=False)
    assert run.path.name == "demo-2"
    assert said is not None
    assert "demo-2" in said


def test_resume_without_a_name_continues_the_newest_run(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    started(config, finished=True)
    with pytest.raises(ConfigError, match="has trained all its 40 steps"):
        choose(config, resume=True, named=False)
    started(config_in(tmp_path, "name=demo-2"))
    assert choose(config, resume=True, named=False)[0].path.name == "demo-2"


def test_resume_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run in"):
        choose(config_in(tmp_path), resume=True, named=True)


def test_a_directory_whose_run_is_alive_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "demo")
    code = (
        "import sys; from pathlib import Path; from streamrl.runtime.rundir import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1])).owned(): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert run.alive
    says = rf"belongs to a run that is alive \(pid {holder.pid}\); give this one another --name"
    with pytest.raises(ConfigError, match=says), run.owned():
        pass
    config = config_in(tmp_path)
    prepare(run, config)
    for other in (config, config_in(tmp_path, "learner.steps=41")):
        with pytest.raises(ConfigError, match=says):
            choose(other, resume=False, named=True)
    with pytest.raises(ConfigError, match=rf"is alive \(pid {holder.pid}\); it needs no --resume"):
        choose(config, resume=True, named=True)
    holder.communicate("")
    assert not run.alive


def test_a_launch_that_fails_before_any_role_has_started_leaves_the_name_free(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    run = RunDirectory(tmp_path / "demo")

    def launch(*, starts: bool) -> None:
        with run.owned():
            prepare(run, config)
            if starts:
                run.write_launch(Launch(address="ipc://a", sockets="/tmp/a", pid=1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch(starts=False)
    assert list(tmp_path.iterdir()) == []
    for starts in (True, False):
        with pytest.raises(ZeroDivisionError):
            launch(starts=starts)
        assert run.exists, "what was trained stays"
        assert not run.launch.exists()


@pytest.mark.parametrize("runs", ["/proc/foo", "FILE"])
def test_runs_that_cannot_be_written_are_refused_by_name(tmp_path: Path, runs: str) -> None:
    (tmp_path / "file").touch()
    run = RunDirectory(Path(runs.replace("FILE", str(tmp_path / "file"))) / "demo")
    with pytest.raises(ConfigError, match=r"runs: .*/demo cannot be used: .*; name a directory"), run.owned():
        pass


def test_sockets_lie_in_a_private_directory_with_a_short_path_that_goes_away() -> None:
    with socket_directory() as sockets:
        assert sockets.stat().st_mode & 0o777 == 0o700
        assert len(str(sockets / "producer-1000-4194304")) <= 107
        (sockets / "queue").touch()
    assert not sockets.exists()


def tasks(seed: int = 1, split: str = "train") -> TaskSource:
    return TaskSource("m:E", lambda rng: {"n": rng.randint(0, 10**9)}, seed=seed, split=split)


def test_a_task_is_the_same_whenever_and_in_whatever_order_it_is_asked_for() -> None:
    one, other = tasks(), tasks()
    later = other[7]
    assert [task.task for task in one.take(0, 8)][7] == later.task
    assert later.index == 7
    assert later.key == "train-tasks/0/7"


def test_tasks_differ_between_numbers_seeds_and_splits() -> None:
    drawn = [tasks()[0], tasks()[1], tasks(seed=2)[0], tasks(split="eval")[0]]
    assert len({json.dumps(task.task) for task in drawn}) == 4


def test_a_seed_does_not_depend_on_the_process() -> None:
    assert derive_seed(1, "train", 7) == 1581262420791404315
    assert random.Random(derive_seed("a")).random() != random.Random(derive_seed("b")).random()


def entry(step: int, **values: float) -> str:
    return json.dumps({"step": step, "reward_mean": 0.1 * step, "lag_mean": 1.0, "lag_max": 2, "tokens": 100,
                       "seconds": 0.5, "idle_share": 0.25, **values})  # fmt: skip


def finished_run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    lines = [
        json.dumps({"event": "eval", "step": 0, "reward": 0.0, "rows": 8}),
        *(entry(step) for step in range(1, 11)),
        entry(10, reward_mean=0.9),
        json.dumps({"event": "eval", "step": 10, "reward": 1.0, "rows": 8}),
    ]
    run.metrics.write_text("\n".join(lines) + '\n{"step": 11, "rew')
    return run


def summary_of(run: RunDirectory) -> summary.Summary:
    counts: dict[str, Any] = {"tasks": 90, "trained": 80, "done": 8, "dropped": {"run ended": 2}, "dead": {}}
    return summary.summarise(
        run, outcome="finished", seconds=9.0, cpu_seconds=12.0, engine_idle=None, restarts={}, conservation=counts
    )


def test_the_summary_compares_first_and_last_steps_and_counts_a_step_trained_again_once(tmp_path: Path) -> None:
    result = summary_of(finished_run(tmp_path))
    assert result.steps == 10
    assert result.reward_before == pytest.approx(0.3)
    assert result.reward_after == pytest.approx((0.6 + 0.7 + 0.8 + 0.9 + 0.9) / 5)
    assert [e.reward for e in result.evaluations] == [0.0, 1.0]
    assert result.tokens_per_second == pytest.approx(200.0)
    assert result.lag_max == 2
    assert result.engine_idle is None


def test_what_is_unknown_is_shown_as_unknown_and_not_as_zero(tmp_path: Path) -> None:
    result = summary_of(RunDirectory(tmp_path))
    assert result.reward_before is None
    assert result.lag_mean is None
    out = io.StringIO()
    summary.show(result, Console(file=out, width=100))
    assert "– → –" in out.getvalue()


def test_the_summary_is_shown_saved_and_drawn(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    result = summary_of(run)
    out = io.StringIO()
    summary.show(result, Console(file=out, width=100))
    assert "0.000 → 1.000" in out.getvalue()
    assert "dropped: run ended" in out.getvalue()
    summary.save(run, result)
    assert json.loads(run.summary.read_text())["reward_before"] == pytest.approx(0.3)
    summary.plot(run)
    assert run.plot.read_bytes().startswith(b"\x89PNG")


def snapshot(step: int) -> panel.Snapshot:
    return panel.Snapshot(
        phase="training",
        steps=10,
        step=step,
        version=step,
        roles=(
            panel.RoleView("engine-0", "samples", 0.0, True, {"busy_share": 0.5}),
            panel.RoleView("learner-0", "waits for rows", 7.0, True, {}),
        ),
        rows={"leased": 8, "ready": 3},
        depths={"learn": 3},
        rewards=(0.1, 0.5),
        metrics={"lag_mean": 1.5, "lag_max": 2, "tokens_per_second": 5000.0},
    )


def test_without_a_terminal_there_are_plain_lines_and_notes_are_kept(tmp_path: Path) -> None:
    out = io.StringIO()
    log = tmp_path / "logs" / "coordinator.log"
    with panel.open_panel(Console(file=out, force_terminal=False), "demo", log) as lines:
        lines.update(snapshot(3))
        lines.note("engine-0 (pid 1) was killed; started again")
    first, second = out.getvalue().splitlines()
    assert "step 3/10  reward 0.300  lag 1.5 (max 2)  version 3  leased 8 ready 3  5000 tokens/s" in first
    assert second.endswith("engine-0 (pid 1) was killed; started again")
    assert log.read_text().endswith("engine-0 (pid 1) was killed; started again\n")


def test_on_a_terminal_there_is_a_box_for_each_role(tmp_path: Path) -> None:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=120, height=40)
    with panel.open_panel(terminal, "demo", tmp_path / "log") as live:
        live.update(snapshot(3))
    assert all(title in out.getvalue() for title in ("queue", "engine-0", "learner-0", "waits for rows (7 s)"))


def test_before_the_first_step_a_line_says_who_does_what() -> None:
    assert panel.status_line(snapshot(0)) == "training  (engine-0: samples, learner-0: waits for rows)"


def test_a_sparkline_has_a_bar_for_each_of_the_last_values() -> None:
    assert panel.sparkline([0.0, 0.5, 1.0, 7.0, -1.0]) == "▁▅██▁"
    assert len(panel.sparkline([0.5] * 100, width=10)) == 10
