"""The driver of bench/queue.py, on few rows: what it measures is real, and what does not work is named."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import pytest

from bench.queues.command import main
from bench.queues.measure import Deadlines, place, started
from bench.queues.payload import Payload, WrongRow
from bench.queues.processes import SystemFailed, processes
from bench.queues.results import Results
from bench.queues.system import SYSTEMS
from bench.queues.targets import lines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CPU of other processes is read from /proc")

PYTHON = Path(sys.executable)
DEADLINES = Deadlines(start=30.0, measurement=30.0)


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose path is short enough for a socket."""
    return tmp_path_factory.mktemp("q")


@pytest.mark.parametrize("name", ["floor", "streamrl", "streamrl-mapped"])
def test_every_row_reaches_the_learner_and_costs_time_and_cpu(name: str, scratch: Path) -> None:
    with started(name, SYSTEMS[name], PYTHON, scratch, DEADLINES) as (bench, seconds, resident):
        found = {"pipeline": bench.pipeline(256), **bench.phases(64, 8)}
        assert bench.compared > 0
    assert seconds > 0
    assert (resident > 1 << 20) == (name != "floor"), "only what serves is counted"
    assert set(found) == {"pipeline", "put 8", "reward 8", "get 8"}
    for figures in found.values():
        assert figures.seconds > 0
        assert figures.cpu_seconds > 0
        assert {"producer", "reward", "learner"} <= set(figures.cpu_by_role)
    assert len(found["put 8"].latencies) == 8
    assert found["pipeline"].row_bytes == pytest.approx(10_250, rel=0.05)


def test_a_changed_byte_and_a_changed_reward_are_found() -> None:
    payload = Payload(pool=8)
    columns = {**payload.batch(4, 8), "reward": [uid * 0.5 + 1.0 for uid in range(4, 12)]}
    assert payload.check(columns) == 8
    wrong = columns["logprobs"][5].copy()
    wrong[-1] += 1.0
    with pytest.raises(WrongRow, match="row 9: logprobs"):
        payload.check({**columns, "logprobs": [*columns["logprobs"][:5], wrong, *columns["logprobs"][6:]]})
    with pytest.raises(WrongRow, match="row 4: reward"):
        payload.check({**columns, "reward": [0.0] * 8})


def test_a_row_that_does_not_arrive_is_missed(scratch: Path) -> None:
    with started("floor", SYSTEMS["floor"], PYTHON, scratch, DEADLINES) as (bench, _, _):
        learner = bench.roles["learner"]
        learner.tell(do="verify", first=0, rows=1)
        with pytest.raises(SystemFailed, match="expected rows 0 to 1 once each, got 0"):
            learner.answer(time.monotonic() + 10.0)


def test_a_peer_whose_packages_are_not_there_fails_with_their_name(scratch: Path) -> None:
    peer = SYSTEMS["transferqueue"]
    with (
        pytest.raises(SystemFailed, match="No module named 'transfer_queue'"),
        started("transferqueue", peer, PYTHON, scratch, DEADLINES),
    ):
        pass


def test_no_process_outlives_its_place(scratch: Path) -> None:
    with place("streamrl", SYSTEMS["streamrl"], PYTHON, scratch) as here:
        here.start("server").answer(time.monotonic() + 30.0)
        assert len(processes(here.mark)) == 1
    assert processes(here.mark) == set()


def test_the_command_measures_whom_it_is_asked_to_and_writes_all_figures(
    scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = scratch / "figures.json"
    asked = ["--only", "floor", "--quick", "--rounds", "1", "--seconds", "0.01", "--environments", str(scratch)]
    assert main([*asked, "--json", str(figures)], "") == 0
    assert "the floor" in capsys.readouterr().out
    visits = msgspec.json.decode(figures.read_bytes(), type=Results).visits
    assert set(visits["floor"][0].phases) >= {"put 1", "get 64"}
    assert main(["--only", "nothing"], "") == 2


def test_a_target_that_was_not_measured_counts_neither_as_reached_nor_as_missed() -> None:
    assert [line.what for line in lines(Results()) if line.measured is not None] == []
