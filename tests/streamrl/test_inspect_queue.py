"""`streamrl queue stats|peek|dead|requeue|verify`: with a broker that runs, and from the journal alone."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio
from inspect_support import (
    lose,
    made,
    publish,
    roll_out,
    run_directory,
    score,
    serving,
    tasks,
    train,
    trajectory,
    trouble,
    two_steps,
)

from streamrl import cli
from streamrl.runtime.alone import ADDRESS, served_address
from streamrl_queue import TransferQueue, audit
from streamrl_queue.nursery import run as run_trio
from streamrl_queue.schema import trajectory_batch


def live(tmp_path: Path, body: Callable[[TransferQueue, str], Awaitable[None]]) -> None:
    """Run `body` with a client and the address of a broker."""

    async def main() -> None:
        with trio.fail_after(30):
            async with serving(tmp_path) as (broker, queue):
                await body(queue, broker.address)

    run_trio(main)


async def command(*arguments: str) -> int:
    """One command, in a thread, while the broker serves."""
    return await trio.to_thread.run_sync(partial(cli.main, ["queue", *arguments]))


def found(capsys: pytest.CaptureFixture[str]) -> object:
    return json.loads(capsys.readouterr().out)


def test_stats_from_the_broker_and_from_its_journal_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[object] = []

    async def body(queue: TransferQueue, address: str) -> None:
        await two_steps(queue)
        await queue.put(tasks(1, start=50), members=4)
        assert await command("stats", address, "--json") == 0
        seen.append(found(capsys))

    live(tmp_path, body)
    assert cli.main(["queue", "stats", str(tmp_path / "journal"), "--json"]) == 0
    seen.append(found(capsys))
    first, second = seen
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert first.pop("journal_bytes") > 0
    assert second.pop("journal_bytes") > 0
    assert first == second
    assert (first["tasks"], first["trained"], first["ready"], first["version"], first["step"]) == (12, 8, 0, 3, 2)
    assert first["stages"]["rollout"] == {"ready": 4, "parked": 0, "leased": 0, "written": 8}
    assert cli.main(["queue", "stats", str(tmp_path / "journal")]) == 0
    assert "3 (after 2 steps); 3 begun, 3 committed" in capsys.readouterr().out


def test_peek_shows_the_order_of_hand_out_and_leases_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[object] = []

    async def body(queue: TransferQueue, address: str) -> None:
        await publish(queue)
        await queue.put(tasks(3), members=2)
        await queue.put(tasks(1, start=9), priority=5)
        assert await command("peek", address, "rollout", "--rows", "5", "--json") == 0
        seen.append(found(capsys))
        order = [row["row"] for row in seen[0]]  # type: ignore[attr-defined]
        assert order == [7, 1, 2, 3, 4]
        assert (await queue.statistics()).leased == 0
        lease = await queue.lease("rollout", rows=5)
        assert lease is not None
        assert list(lease.ids) == order[: len(lease.ids)]
        await queue.release(lease)
        assert await command("peek", address, "nothing") == 1
        assert "the stages are rollout" in capsys.readouterr().err

    live(tmp_path, body)
    assert cli.main(["queue", "peek", str(tmp_path / "journal"), "rollout", "--rows", "5", "--json"]) == 0
    assert found(capsys) == seen[0]


def test_peek_at_a_group_stage_shows_its_members(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def body(queue: TransferQueue, address: str) -> None:
        await publish(queue)
        await queue.put(tasks(1), members=2)
        await roll_out(queue, 2)
        lease = await queue.lease("reward", rows=2, at_least=2, wait=1)
        assert lease is not None
        await queue.release(lease)
        assert [keys.row for keys in await queue.peek("reward")] == [1, 2]
        assert await queue.peek("advantage") == ()
        assert await queue.peek("reward", 1) == (await queue.peek("reward"))[:1]
        assert (await queue.peek("reward"))[0].tokens == 6

    live(tmp_path, body)


def test_dead_names_reason_and_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, trouble)
    run = str(run_directory(tmp_path))
    assert cli.main(["queue", "dead", run, "--json"]) == 0
    lines = found(capsys)
    assert isinstance(lines, list)
    chosen = [(line["row"], line["end"], line["reason"], line["task"]) for line in lines]
    assert chosen == [(2, "dropped", "error_env", '{"i":101}'), (1, "dead", "rollout: its process ended", '{"i":100}')]
    assert cli.main(["queue", "dead", run, "--rows", "1"]) == 0
    assert "1 of 2 rows that died or were dropped" in capsys.readouterr().out


def test_dead_shows_the_last_line_of_an_error_within_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raising(queue: TransferQueue) -> None:
        await publish(queue)
        await queue.put(tasks(1))
        lease = await queue.lease("rollout", rows=1, wait=1)
        assert lease is not None
        error = 'Traceback (most recent call last):\n  File "env.py", line 3\nRuntimeError: the environment is broken'
        failed = msgspec.structs.replace(trajectory(), status="error_env", outcome=None, error=error)
        await queue.write(lease, trajectory_batch(lease.ids, [failed]))
        lease = await queue.lease("reward", rows=1, wait=1)
        assert lease is not None
        await queue.drop(lease, reason="error_env")

    made(tmp_path, raising)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["queue", "dead", str(run_directory(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "row 1  dropped: error_env  (train, " in out
    assert '     task  {"i":0}' in out
    assert "    error  RuntimeError: the environment is broken" in out
    assert "Traceback" not in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_requeue_puts_the_task_again_once_under_a_key_that_names_the_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body(queue: TransferQueue, address: str) -> None:
        await publish(queue)
        await queue.put(tasks(1, start=7), members=4)
        lease = await queue.lease("rollout", rows=1, wait=1)
        assert lease is not None
        await queue.drop(lease, reason="error_env")
        with serving_alone(tmp_path / "journal", address):
            assert await command("requeue", str(tmp_path / "journal"), "1") == 0
            assert "row 1 is put again as rows 5 to 8" in capsys.readouterr().out
            assert await command("requeue", str(tmp_path / "journal"), "1") == 0
            assert "row 1 was put again before, as rows 5 to 8" in capsys.readouterr().out
            assert await command("requeue", str(tmp_path / "journal"), "1", "2") == 1
            assert "row 2 is ready; only rows that died or were dropped" in capsys.readouterr().err
        assert (await queue.statistics()).tasks == 8
        lease = await queue.lease("rollout", rows=8, wait=1)
        assert lease is not None
        assert lease.batch is not None
        assert set(lease.batch.column("task").to_pylist()) == {b'{"i":7}'}

    live(tmp_path, body)
    puts = [entry.event.keys for entry in audit.events(tmp_path / "journal") if type(entry.event).__name__ == "Put"]
    assert puts == [("tasks/0/7",), ("tasks/0/7/again/1",)]


class serving_alone:
    """As if the broker at `address` had been started by `streamrl queue`: it holds the address file."""

    def __init__(self, directory: Path, address: str) -> None:
        self._file = (directory / ADDRESS).open("w+")
        self._file.write(address)
        self._file.flush()

    def __enter__(self) -> None:
        import fcntl

        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._file.close()


def test_requeue_without_a_broker_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = made(tmp_path, trouble)
    assert cli.main(["queue", "requeue", str(journal), "1"]) == 2
    assert "no broker is running" in capsys.readouterr().err
    assert cli.main(["queue", "requeue", "ipc:///nowhere", "1"]) == 2
    assert "needs the journal" in capsys.readouterr().err


def test_the_address_file_counts_only_while_its_broker_lives(tmp_path: Path) -> None:
    assert served_address(tmp_path) is None
    with serving_alone(tmp_path, "tcp://127.0.0.1:7001"):
        assert served_address(tmp_path) == "tcp://127.0.0.1:7001"
    assert served_address(tmp_path) is None


def test_a_broker_without_a_single_row_yet_is_found_by_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body(queue: TransferQueue, address: str) -> None:
        with serving_alone(tmp_path / "journal", address):
            assert await command("stats", str(tmp_path / "journal"), "--json") == 0
        report = found(capsys)
        assert isinstance(report, dict)
        assert report["tasks"] == 0

    live(tmp_path, body)


def test_verify_finds_a_whole_journal_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, two_steps, trouble)
    assert cli.main(["queue", "verify", str(run_directory(tmp_path)), "--json"]) == 0
    report = found(capsys)
    assert isinstance(report, dict)
    assert report["whole"]
    assert report["events"]["Committed"] == 2
    assert report["statistics"]["tasks"] == 11
    assert report["notes"] == []


def test_verify_reads_ledgers_and_snapshots_of_a_long_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def many_steps(queue: TransferQueue) -> None:
        await publish(queue)
        for step in range(1, 9):
            await queue.put(tasks(1, start=step), members=4)
            await roll_out(queue, 4, version=step)
            await score(queue, 4)
            await train(queue, step)
            await publish(queue, step, step)
            await queue.retire(step)

    made(tmp_path, many_steps, segment_bytes=1 << 14)
    assert cli.main(["queue", "verify", str(run_directory(tmp_path)), "--json"]) == 0
    report = found(capsys)
    assert isinstance(report, dict)
    assert report["files"]["ledger"] > 0
    assert report["files"]["snapshot"] == 2
    assert report["statistics"]["trained"] == 32
    snapshot = max((tmp_path / "journal").glob("*.snapshot"))
    data = bytearray(snapshot.read_bytes())
    data[40] ^= 1
    snapshot.write_bytes(data)
    assert cli.main(["queue", "verify", str(tmp_path)]) == 1
    assert f"{snapshot.name}, byte 0: the state is damaged" in capsys.readouterr().out.replace("\n", "")


def place_of(journal: Path, event: str, stage: str) -> tuple[Path, int, int]:
    """File, first byte and last byte of payload of the first such record."""
    for entry in audit.events(journal):
        if type(entry.event).__name__ == event and getattr(entry.event, "stage", "") == stage:
            assert entry.payload
            segment = journal / f"{entry.record >> 32:08d}.segment"
            start = entry.record & 0xFFFFFFFF
            payload = segment.read_bytes().index(bytes(entry.payload), start)
            return segment, start, payload
    raise AssertionError(event)


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def test_verify_names_file_byte_and_rows_of_damaged_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = made(tmp_path, two_steps)
    segment, start, payload = place_of(journal, "Written", "reward")
    flip(segment, payload + 100)
    assert cli.main(["queue", "verify", str(journal), "--json"]) == 1
    report = found(capsys)
    assert isinstance(report, dict)
    assert report["damage"] == [
        f"{segment}, byte {start}: the columns of Written are damaged; rows 1, 2, 3, 4",
    ]
    assert report["faults"] == [], "the event itself is whole, so the rows still add up"
    assert report["statistics"]["trained"] == 8
    assert cli.main(["trace", str(journal), "1"]) == 0, "what can be read is told"
    assert "reward" in capsys.readouterr().out


def test_verify_names_file_and_byte_of_a_damaged_event_and_goes_on_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = made(tmp_path, two_steps)
    segment, start, _ = place_of(journal, "Written", "rollout")
    flip(segment, start + 70)
    assert cli.main(["queue", "verify", str(journal), "--json"]) == 1
    report = found(capsys)
    assert isinstance(report, dict)
    assert len(report["damage"]) == 1
    assert report["damage"][0].startswith(f"{segment}, byte {start}: an event is damaged")
    assert report["events"]["Committed"] == 2, "what follows was read"


def test_a_torn_tail_is_a_note_and_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = made(tmp_path, two_steps)
    segment = max(journal.glob("*.segment"))
    whole = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(b"torn record")
    assert cli.main(["queue", "verify", str(journal)]) == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert f"byte {whole}: 11 bytes of a record that was not finished" in out


def test_serve_and_the_plain_form_are_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in (["queue"], ["queue", "serve"]):
        assert cli.main([*form, "--bind", "tcp://0.0.0.0:0", "--dir", str(tmp_path)]) == 1
        assert "needs a key" in capsys.readouterr().err
        assert cli.main([*form, "--bind", "tcp://127.0.0.1:0"]) == 2
        assert "expected --bind ADDRESS and --dir DIRECTORY" in capsys.readouterr().err


def test_a_dead_row_of_a_queue_alone_is_found_and_put_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Starts a broker in a process of its own: about a second."""
    import signal

    from test_cli_queue import end, start

    process, address = start(tmp_path)

    async def kill_a_row() -> None:
        import pyarrow as pa

        async with TransferQueue.connect(address, name="worker-0") as queue:
            await queue.put(pa.RecordBatch.from_pydict({"x": [1.5, 2.5]}), keys=["a", "b"])
            for _ in range(3):
                assert await queue.lease("work", rows=1) is not None
                await lose(queue)

    try:
        trio.run(kill_a_row)
        assert cli.main(["queue", "dead", str(tmp_path), "--json"]) == 0
        assert [(line["row"], line["key"]) for line in json.loads(capsys.readouterr().out)] == [(1, "a")]
        assert cli.main(["queue", "requeue", str(tmp_path), "1"]) == 0
        assert "row 1 is put again as row 3" in capsys.readouterr().out
        assert cli.main(["queue", "stats", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["dead"] == {"work: its process ended": 1}
        assert cli.main(["queue", "verify", str(tmp_path)]) == 0
        assert cli.main(["queue", "--bind", "tcp://127.0.0.1:0", "--dir", str(tmp_path)]) == 1
        assert f"belongs to the broker at {address}" in capsys.readouterr().err
    finally:
        assert end(process, signal.SIGTERM) == 143


def test_verify_names_the_segments_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = made(tmp_path, two_steps, segment_bytes=3 << 12)
    first = min(journal.glob("*.segment"))
    first.unlink()
    assert cli.main(["queue", "verify", str(journal), "--json"]) == 1
    report = found(capsys)
    assert isinstance(report, dict)
    assert f"{first} is missing: what happened in it is lost" in report["damage"]
