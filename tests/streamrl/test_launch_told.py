"""What a run tells about itself: lost rows and failed calls by their reasons, phases, and how it ended."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from inspect_support import FLOW, made, publish, roll_out, run_directory, score, tasks, train, trajectory
from rich.console import Console

from streamrl import cli
from streamrl.runtime import panel, status, summary
from streamrl.runtime.counts import CallErrors, call_errors
from streamrl.runtime.failure import LastWords
from streamrl.runtime.losses import account, calls_in, last_line, lives_in, losses_in
from streamrl.runtime.rundir import RunDirectory
from streamrl_queue import Member, Trajectory, TransferQueue
from streamrl_queue.messages import Statistics
from streamrl_queue.schema import trajectory_batch

TRACEBACK = (
    "Traceback (most recent call last):\n  File …\nstreamrl_queue.errors.EnvironmentFailed: reward: got 'False'\n"
)


def changed(**changes: object) -> Trajectory:
    return msgspec.structs.replace(trajectory(), **changes)


async def losing(queue: TransferQueue) -> None:
    """A group of which three rows raise, so that the fourth has nobody to be compared with; an evaluation row too."""
    await publish(queue)
    await queue.put(tasks(1), members=4)
    await queue.put(tasks(1, start=50), split="eval")
    lease = await queue.lease("rollout", rows=5, wait=1)
    assert lease is not None
    failed = changed(status="error_env", outcome=None, error=TRACEBACK)
    called = changed(error="tool get: ValueError: no shelf", metrics={"tool_errors": 2.0, "parse_errors": 1.0})
    await queue.write(lease, trajectory_batch(lease.ids, [failed, failed, failed, called, failed]))
    lease = await queue.lease("reward", rows=5, wait=1)
    assert lease is not None
    await queue.drop(lease, [row for row in lease.ids if row != 4], reason="error_env")


@pytest.fixture
def counts(tmp_path: Path) -> Statistics:
    seen: list[Statistics] = []

    async def ask(queue: TransferQueue) -> None:
        seen.append(await queue.statistics())

    made(tmp_path, losing, ask)
    return seen[0]


def test_losses_count_training_rows_alone_and_tell_the_last_error_of_each_reason(
    tmp_path: Path, counts: Statistics
) -> None:
    lives = lives_in(tmp_path / "journal", FLOW)
    assert lives is not None
    losses = losses_in(lives)
    assert str(losses) == (
        "3 of the 3 training rows that have ended were lost (3 error_env); the last error of each kind:\n"
        "    error_env: EnvironmentFailed: reward: got 'False'"
    )
    assert losses_in(lives, split="eval", rows=[5]).named() == "1 error_env"
    told = account(counts, losses, calls_in(lives)).splitlines()
    assert told[-2:] == [
        "tool errors: 2 in 1 of 5 episodes; the last: tool get: ValueError: no shelf",
        "parse errors: 1 in 1 of 5 episodes",
    ]


def test_without_a_journal_the_counts_are_told_and_what_is_in_them(tmp_path: Path, counts: Statistics) -> None:
    assert lives_in(tmp_path / "nowhere", FLOW) is None
    told = account(counts, None, CallErrors())
    assert told.startswith("3 of the 3 training rows that have ended were lost (those of evaluations counted too: 4 ")


def test_the_last_line_of_a_traceback_is_what_it_comes_to() -> None:
    assert last_line("a\n\nKeyError: 'x'\n") == "KeyError: 'x'"
    assert last_line("my.module.Broken: file.name: no") == "Broken: file.name: no"
    assert last_line("") == ""
    assert len(last_line("x" * 1000)) == 300


def test_failed_calls_are_summed_over_sessions_and_shown_in_the_summary(tmp_path: Path) -> None:
    one = {"episodes": 300.0, "tool_errors": 512.0, "tool_error_episodes": 256.0, "active": 3.0}
    calls = call_errors([one, one])
    assert calls.told() == {"tool errors": "1024 in 512 of 600 episodes"}
    result = summary.summarise(
        RunDirectory(tmp_path), outcome="finished", seconds=9.0, cpu_seconds=12.0, engine_idle=None, restarts={},
        conservation={}, resumed=True, calls=calls,
    )  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=100).print(summary.table(result))
    assert "1024 in 512 of 600 episodes" in out.getvalue()
    assert "time of this part" in out.getvalue()
    assert "means of the first and the last" in out.getvalue()


def test_an_evaluation_without_any_reward_says_so_and_can_be_read_again(tmp_path: Path) -> None:
    assert str(summary.Evaluation(step=0, reward=None, rows=0, failed=16)) == "no reward: all 16 tasks failed"
    assert str(summary.Evaluation(step=0, reward=0.5, rows=8, failed=2)) == "0.500 (8 tasks, 2 failed)"
    run = RunDirectory(tmp_path)
    run.metrics.write_text('{"event": "eval", "step": 0, "reward": null, "rows": 0, "failed": 16}\n')
    assert summary.read_metrics(run.metrics)[1][0].reward is None
    summary.plot(run)


def snapshot(phase: str, waits: str = "", **changes: object) -> panel.Snapshot:
    values: dict[str, object] = {
        "phase": phase,
        "waits": waits,
        "steps": 30,
        "step": 10,
        "version": 11,
        "roles": (panel.RoleView("learner-0", "loads the checkpoint"), panel.RoleView("engine-0", "waits for weights")),
        "rows": {"leased": 8, "ready": 3, "dropped": 25, "dead": 0},
        "depths": {},
        "rewards": (0.5, 0.7),
        "metrics": {"lag_mean": 1.5, "lag_max": 2, "tokens_per_second": 5000.0},
    }
    return panel.Snapshot(**(values | changes))  # type: ignore[arg-type]


def test_numbers_of_a_step_are_shown_only_while_steps_are_trained() -> None:
    assert panel.status_line(snapshot("waits for weights")) == "waits for weights  (learner-0: loads the checkpoint)"
    assert panel.status_line(snapshot("draining", "waits for engine-0")) == "draining  (waits for engine-0)"
    assert panel.status_line(snapshot("evaluating")).startswith("evaluating  (learner-0: ")


def test_the_line_shows_lost_rows_and_failed_calls_when_there_are_any() -> None:
    calls = CallErrors(episodes=9, tool_errors=4, tool_error_episodes=3)
    line = panel.status_line(snapshot("training", calls=calls))
    assert "leased 8 ready 3 dropped 25  5000 tokens/s  tool errors 4" in line
    assert "dead" not in line


def test_a_small_terminal_shows_step_reward_and_lag_first(tmp_path: Path) -> None:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, color_system=None, width=40, height=10)
    with panel.open_panel(terminal, "demo", tmp_path / "log") as live:
        live.update(snapshot("training"))
        shown = [line for line in out.getvalue().splitlines() if "step" in line]
    assert "step 10/30  reward 0.600  lag 1.5" in shown[0]


def test_gauges_that_say_nothing_are_left_out() -> None:
    values = {"busy_share": 0.265177, "tool_errors": 0.0, "parse_errors": 2.0, "tokens": 12345.0}
    assert panel.gauges(values) == [("busy share", "27%"), ("parse errors", "2"), ("tokens", "12.3k")]


def test_only_engines_are_ready_or_not_in_the_members_of_a_run() -> None:
    def member(name: str, role: str, ready: bool, **gauges: float) -> Member:
        return Member(f"{name}.x", name, role, None, ready, 3 if role == "engine" else None, "samples", 0.0, gauges)

    out = io.StringIO()
    found = [member("engine-0", "engine", True, busy_share=0.265177), member("scorer-0", "scorer", False, scored=8.0)]
    Console(file=out, width=80).print(status.members_table(found))
    text = out.getvalue()
    assert "samples, ready" in text
    assert "busy share 27%" in text
    assert "version 3" in text
    assert "not ready" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_status_of_a_run_that_failed_names_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_directory(tmp_path)
    assert cli.main(["status", str(run)]) == 0
    assert "not running; it was killed, or stopped at once; continue it with --resume" in capsys.readouterr().out
    logs = RunDirectory(run).logs
    logs.mkdir()
    LastWords("RoleFailed", "producer-0 ended with exit code 3", True).write(logs / "coordinator.error")
    assert cli.main(["status", str(run)]) == 0
    assert "failed; continue it with --resume" in (said := capsys.readouterr().out)
    assert "RoleFailed: producer-0 ended with exit code 3" in said


def test_rows_that_were_trained_count_as_written_by_the_learner(tmp_path: Path) -> None:
    async def body(queue: TransferQueue) -> None:
        await publish(queue)
        await queue.put(tasks(1), members=4)
        await roll_out(queue, 4)
        await score(queue, 4)
        await train(queue, 1)
        assert (await queue.statistics()).stages["learn"].written == 4
        await queue.reconcile(0)
        assert (await queue.statistics()).stages["learn"].written == 0

    made(tmp_path, body)
