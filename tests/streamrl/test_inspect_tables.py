"""A run's journal as tables, for Python and for SQL."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from inspect_support import made, run_directory, trouble, two_steps

import streamrl.inspect
from streamrl import cli
from streamrl.inspect.sql import run
from streamrl.inspect.tables import EVENTS, ROWS, STEPS, VERSIONS
from streamrl_queue.errors import ConfigError, JournalError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps whose broker has ended."""
    directory = tmp_path_factory.mktemp("run")
    made(directory, two_steps, trouble)
    return run_directory(directory)


def test_rows_have_one_line_each_with_state_step_lag_reward_and_times(trained: Path) -> None:
    rows = streamrl.inspect.read_rows(trained)
    assert rows.schema == ROWS
    lines = {line["row"]: line for line in rows.to_pylist()}
    assert len(lines) == 11
    first = lines[1]
    assert {name: first[name] for name in ("state", "step", "lag", "reward", "advantage", "status", "tokens")} == {
        "state": "trained",
        "step": 1,
        "lag": 0,
        "reward": 1.0,
        "advantage": 0.5,
        "status": "completed",
        "tokens": 6,
    }
    assert json.loads(first["task"]) == {"i": 0}
    assert dict(first["reward_parts"]) == {"outcome": 1.0}
    times = [first[name] for name in ("born", "rollout_started", "written", "scored", "trained", "ended")]
    assert times == sorted(times)
    assert (lines[9]["state"], lines[9]["reason"], lines[9]["attempts"]) == ("dead", "rollout: its process ended", 2)
    assert lines[9]["reward"] is None, "unknown is null, never 0"
    assert lines[10]["ended"] is not None
    assert lines[11]["ended"] is None


def test_events_versions_and_steps_are_tables_too(trained: Path) -> None:
    tables = streamrl.inspect.read_tables(str(trained))
    assert {name: table.schema for name, table in tables.items()} == {
        "rows": ROWS,
        "events": EVENTS,
        "versions": VERSIONS,
        "steps": STEPS,
    }
    places = [(line["segment"], line["byte"]) for line in tables["events"].to_pylist()]
    assert places == sorted(places), "in the order of the journal"
    assert tables["versions"].column("committed").null_count == 0
    assert tables["steps"].column("rows").to_pylist() == [4, 4]


def test_sql_answers_over_all_tables(trained: Path) -> None:
    names, lines = run(
        "select state, count(*) n, avg(lag) lag from rows where split = 'train' group by state",
        streamrl.inspect.read_tables(trained),
    )
    assert names == ["state", "n", "lag"]
    assert lines == [("trained", 8, 0.5)]
    _, lines = run(
        "select r.row, epoch(s.committed - r.born) >= 0 from rows r join steps s using (step) where r.row = 5",
        streamrl.inspect.read_tables(trained),
    )
    assert lines == [(5, True)]


def test_no_column_needs_quotes(trained: Path) -> None:
    tables = streamrl.inspect.read_tables(trained)
    for name, table in tables.items():
        for column in table.schema.names:
            assert run(f"select {column} from {name} order by {column} limit 1", tables)[0] == [column]


def test_a_query_names_tables_and_never_variables_of_the_process(trained: Path) -> None:
    secret = pa.table({"x": [1]})
    assert len(secret) == 1
    with pytest.raises(ConfigError, match="secret"):
        run("select * from secret", streamrl.inspect.read_tables(trained))


def test_the_command_prints_a_table_csv_and_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = "select row, state, reward, born from rows where row in (1, 9) order by row"
    assert cli.main(["sql", str(trained), query]) == 0
    assert "2 rows" in capsys.readouterr().out
    assert cli.main(["sql", str(trained), query, "--csv"]) == 0
    lines = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert [line[:3] for line in lines] == [["row", "state", "reward"], ["1", "trained", "1.0"], ["9", "dead", ""]]
    assert cli.main(["sql", str(trained), query, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[1] | {"born": None} == {"row": 9, "state": "dead", "reward": None, "born": None}


def test_without_a_query_tables_and_columns_are_listed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", str(trained), "--json"]) == 0
    listed = {(line["table"], line["column"]): line["type"] for line in json.loads(capsys.readouterr().out)}
    assert listed["rows", "lag"] == "bigint"
    assert listed["events", "happened"] == "timestamp"
    assert {table for table, _ in listed} == {"rows", "events", "versions", "steps"}


def test_a_wrong_query_is_refused_with_the_words_of_duckdb(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", str(trained), "select laag from rows"]) == 2
    assert "laag" in capsys.readouterr().err


def test_without_duckdb_the_extra_is_named(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert cli.main(["sql", str(trained), "select 1"]) == 2
    assert "streamrl[inspect]" in capsys.readouterr().err
    assert cli.main(["sql", str(trained)]) == 0, "the list needs no database"


def test_what_is_no_run_and_no_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a run, the directory of a journal, or an address"):
        streamrl.inspect.read_rows(tmp_path)
    with pytest.raises(ConfigError, match="needs the journal"):
        streamrl.inspect.read_rows("tcp://127.0.0.1:1")
    (tmp_path / "00000001.segment").write_bytes(b"\x31LRS" + bytes(100))
    with pytest.raises(JournalError, match="another release"):
        streamrl.inspect.read_rows(tmp_path)


def test_inspection_has_these_names() -> None:
    assert sorted(streamrl.inspect.__all__) == dir(streamrl.inspect)
    for name in streamrl.inspect.__all__:
        assert getattr(streamrl.inspect, name).__name__ == name
    with pytest.raises(AttributeError, match="it has Life"):
        _ = streamrl.inspect.nothing
