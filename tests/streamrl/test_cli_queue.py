"""`streamrl queue`: one broker alone, for people who want only the queue."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pyarrow as pa
import pytest
import trio

from streamrl import cli
from streamrl.inspect.reading import fold
from streamrl.inspect.target import find
from streamrl_queue import TransferQueue
from streamrl_queue.errors import ConfigError
from streamrl_queue.keys import read_key

KEY = bytes(range(32))


def start(directory: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """The broker's process and its address."""
    command = [sys.executable, "-m", "streamrl.cli", "queue", "--bind", "tcp://127.0.0.1:0", "--dir", str(directory)]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split("queue at ")[1].split(",")[0]


def end(process: subprocess.Popen[str], number: int) -> int:
    process.send_signal(number)
    process.communicate(timeout=10)
    return process.returncode


def test_rows_put_into_a_broker_alone_are_there_after_it_was_started_again(tmp_path: Path) -> None:
    async def put(address: str) -> None:
        async with TransferQueue.connect(address) as queue:
            receipt = await queue.put(pa.RecordBatch.from_pydict({"x": [1.0, 2.0]}), keys=["a", "b"])
            assert receipt.durability == "flush"

    async def take(address: str) -> list[float]:
        async with TransferQueue.connect(address) as queue:
            lease = await queue.lease("work", rows=2, at_least=2, wait=5)
            assert lease is not None
            assert lease.batch is not None
            return lease.batch.column("x").to_pylist()  # type: ignore[no-any-return]

    process, address = start(tmp_path)
    trio.run(put, address)
    assert end(process, signal.SIGTERM) == 143
    process, address = start(tmp_path)
    assert trio.run(take, address) == [1.0, 2.0]
    assert end(process, signal.SIGINT) == 0


def test_rows_of_stages_that_nobody_has_leased_yet_are_known_to_be_unfinished(tmp_path: Path) -> None:
    async def work(address: str) -> None:
        async with TransferQueue.connect(address) as queue:
            await queue.put(pa.RecordBatch.from_pydict({"x": [1.0, 2.0]}))
            lease = await queue.lease("first", rows=1)
            assert lease is not None
            await queue.write(lease, pa.RecordBatch.from_pydict({"row": pa.array(lease.ids, pa.uint64()), "y": [1]}))

    process, address = start(tmp_path, "--stages", "first,second")
    trio.run(work, address)
    end(process, signal.SIGKILL)
    assert fold(tmp_path, find(str(tmp_path)).flow()).by_split() == {"train": {"ready": 2}}


@pytest.mark.parametrize("stages", ["", "first,", " ,second"])
def test_a_stage_without_a_name_is_refused(stages: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["queue", "--bind", "tcp://127.0.0.1:0", "--dir", str(tmp_path / "journal"), "--stages", stages])
    assert ended.value.code == 2
    assert f"--stages: expected names with commas between them, got {stages!r}" in capsys.readouterr().err
    assert not (tmp_path / "journal").exists()


def test_a_public_address_without_a_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["queue", "--bind", "tcp://0.0.0.0:0", "--dir", str(tmp_path)]) == 1
    assert "needs a key" in capsys.readouterr().err


def test_its_metrics_are_where_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streamrl.cli", "queue", "--bind", "tcp://127.0.0.1:0", "--dir", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--metrics", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split("metrics at ")[1].strip()
        with urllib.request.urlopen(url, timeout=10) as page:
            assert b'streamrl_queue_stage_rows{stage="work",state="ready"} 0.0\n' in page.read()
        assert end(process, signal.SIGTERM) == 143


def test_metrics_that_other_hosts_could_read_are_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "journal"
    arguments = ["queue", "--bind", "tcp://127.0.0.1:0", "--dir", str(directory), "--metrics", "0.0.0.0:9464"]
    assert cli.main(arguments) == 2
    assert "0.0.0.0:9464 is reachable from other hosts" in capsys.readouterr().err
    assert not directory.exists()


def test_a_directory_that_cannot_be_written_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["queue", "--bind", "tcp://127.0.0.1:0", "--dir", "/proc/x"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: --dir /proc/x: cannot be used for a journal: ")


def test_an_address_in_use_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process, address = start(tmp_path / "one")
    assert cli.main(["queue", "--bind", address, "--dir", str(tmp_path / "two")]) == 1
    assert address in capsys.readouterr().err
    end(process, signal.SIGTERM)


def test_a_key_is_32_bytes_or_their_hexadecimal_digits(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(KEY)
    assert read_key(file) == KEY
    file.write_text(KEY.hex() + "\n")
    assert read_key(file) == KEY
    file.write_text("too short")
    with pytest.raises(ConfigError, match="expected 32 bytes or 64 hexadecimal digits"):
        read_key(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(tmp_path / "nothing")
