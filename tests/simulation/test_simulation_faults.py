"""Faults by script and by rate: each does what it says, and the queue goes on."""

from __future__ import annotations

import pytest

from streamrl.cli import main
from streamrl.simulation.runner import Options, parse_seeds, run_seed
from streamrl.simulation.scenario import Scenario
from streamrl.simulation.world import Result, simulate
from streamrl_queue.errors import ConfigError

HOURS = 12 / 3600


def run(*script: str, faults: str = "none", seed: int = 3) -> Result:
    result = run_seed(Options(hours=HOURS, faults=faults, script=script), seed)
    assert result.failure is None, result.failure
    return result


def test_without_faults_nothing_is_refused_and_nobody_dies() -> None:
    result = run()
    assert result.faults == {}
    assert result.refused == {}
    assert result.steps > 0
    assert result.counts["trained"] > 0


def test_a_process_that_stood_still_longer_than_its_session_lives_is_fenced() -> None:
    results = [run("2:pause:producer-0:9", "2:pause:producer-1:9", seed=seed) for seed in range(4)]
    assert sum(result.late_writes for result in results) > 0


@pytest.mark.parametrize("process", ["broker-0", "producer-0", "engine-0", "scorer-0", "learner-0"])
def test_a_killed_process_is_survived(process: str) -> None:
    result = run(f"4:crash:{process}", f"7:crash:{process}")
    assert result.faults["crash"] >= 1


def test_a_broker_that_dies_in_the_middle_of_a_write_loses_nothing_it_promised() -> None:
    result = run("3:torn:broker-0", "5:torn:broker-0", "7:torn:broker-0", "9:power:broker-0")
    assert result.faults["torn"] >= 1


def test_a_partition_and_a_slow_process_are_survived() -> None:
    result = run("3:cut:learner-0:5", "4:slow:producer-0:6", "6:cut:broker-0:2")
    assert result.faults["cut"] >= 1


@pytest.mark.parametrize("fault", ["lose", "drop", "duplicate", "corrupt", "delay", "replay"])
def test_messages_may_be_lost_repeated_and_damaged(fault: str) -> None:
    result = run(faults=f"{fault}=0.03")
    assert result.faults[fault if fault != "delay" else "slow"] > 0


def test_a_failure_names_its_seed_its_rows_and_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from streamrl_queue.rows import Rows

    monkeypatch.setattr(Rows, "_unknown", lambda self, keys: list(keys))
    assert main(["simulate", "--seed", "0", "--hours", "0.004"]) == 1
    said = capsys.readouterr().out
    assert "FAILED" in said
    assert "a second group was made for key" in said
    assert "put " in said
    assert "again: streamrl simulate --seed 0 --engines 2 --producers 2 --hours 0.004 --faults random" in said


def test_many_seeds_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seed", "5:7", "--hours", "0.001"]) == 0
    assert "2 of 2 seeds passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--faults", "crush"], "crush: expected all, none, or some of crash, torn"),
        (["--faults", "crash=often"], "expected a number"),
        (["--at", "crash"], "expected SECOND:FAULT:PROCESS"),
        (["--at", "soon:crash:broker-0"], "must be seconds"),
        (["--seed", "5:5"], "FIRST below END"),
        (["--hours", "0"], "expected more than 0"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_seeds_are_a_number_or_a_range() -> None:
    assert list(parse_seeds("7")) == [7]
    assert list(parse_seeds("2:5")) == [2, 3, 4]
    with pytest.raises(ConfigError):
        parse_seeds("x")


def test_what_the_broker_lost_by_a_power_loss_was_promised_to_nobody() -> None:
    """Only with fsync is a reply a promise that power loss keeps; the model goes back to what the disk has."""
    fsync = [s for s in range(40) if Scenario.draw(s).durability == "fsync"][:3]
    for seed in fsync:
        scenario = Scenario.draw(seed, seconds=12.0, faults="power=1", script=("3:power:broker-0", "6:power:broker-0"))
        result = simulate(scenario)
        assert result.failure is None, result.failure
        assert result.faults["power"] >= 2
