"""Keys on the command line: made once, read by their owner alone, shown nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from streamrl import cli
from streamrl.config import find_file, load_file
from streamrl.runtime.preflight import check_inputs
from streamrl.runtime.rundir import RunDirectory
from streamrl.settings import to_yaml
from streamrl_queue import TransferQueue
from streamrl_queue.errors import ConfigError, DeadlineExceeded
from streamrl_queue.keys import KEY_FILE, find_key, read_key, write_key


def test_a_key_file_is_its_owners_alone_and_its_key_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    assert cli.main(["keygen", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(read_key(file)) == 32
    assert file.read_text().strip() == read_key(file).hex()
    assert read_key(file).hex() not in capsys.readouterr().out


def test_a_key_that_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    cli.main(["keygen", str(file)])
    before = file.read_bytes()
    assert cli.main(["keygen", str(file)]) == 2
    assert file.read_bytes() == before
    error = capsys.readouterr().err
    assert "is there already" in error
    assert before.decode().strip() not in error
    assert cli.main(["keygen", str(tmp_path / "no" / "key")]) == 2


def test_without_a_file_the_key_is_printed_for_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keygen"]) == 0
    assert len(bytes.fromhex(capsys.readouterr().out.strip())) == 32


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_file_that_others_can_use_is_refused_with_what_to_do(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    write_key(file)
    key = read_key(file).hex()
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"expected mode 600, got {mode:o}: others can use it; chmod 600") as refused:
        read_key(file)
    assert key not in str(refused.value)


def test_a_file_that_is_no_key_is_refused_without_being_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text("hunter2")
    with pytest.raises(ConfigError, match="expected 32 bytes or 64 hexadecimal digits") as refused:
        read_key(file)
    assert "hunter2" not in str(refused.value)


def test_the_environment_names_the_key_file_where_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write_key(one)
    write_key(other)
    assert find_key(None) is None
    monkeypatch.setenv(KEY_FILE, str(other))
    assert find_key(None) == read_key(other)
    assert find_key(one) == read_key(one)


def test_a_runs_configuration_names_the_file_and_never_the_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    write_key(file)
    config = load_file(find_file(None), [f"queue.key_file={file}"])
    check_inputs(config, RunDirectory(tmp_path / "run"))
    shown = to_yaml(config) + repr(config)
    assert str(file) in shown
    for secret in (read_key(file).hex(), repr(read_key(file))):
        assert secret not in shown
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"queue\.key_file: key file .*chmod 600"):
        check_inputs(config, RunDirectory(tmp_path / "run"))


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_broker_with_a_key_file_serves_who_has_it_and_shows_it_to_nobody(
    tmp_path: Path, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    write_key(file)
    key = read_key(file)
    command = [sys.executable, "-m", "streamrl.cli", "queue", "serve", "--bind", "tcp://0.0.0.0:0"]
    command += ["--dir", str(tmp_path / "journal"), *(["--key-file", str(file)] if by == "option" else [])]
    environment = {**os.environ, **({KEY_FILE: str(file)} if by == "environment" else {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split("queue at ")[1].split(",")[0].replace("0.0.0.0", "127.0.0.1")

        async def visit() -> None:
            async with TransferQueue.connect(address, key=key) as queue:
                await queue.statistics()
            with pytest.raises(DeadlineExceeded):
                async with TransferQueue.connect(address, key=bytes(32), deadline=0.5):
                    pass

        trio.run(visit)
        assert cli.main(["queue", "stats", address, "--key-file", str(file)]) == 0
        out = capsys.readouterr().out
        # The stranger said Hello and, when nobody answered, Forget.
        assert "messages that were not for it: connection" in out
        listed = Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
    finally:
        process.terminate()
        said = "".join(process.communicate(timeout=10))
    assert "dropped a message of peer" in said
    for secret in (key.hex(), repr(key)):
        assert secret not in said + out
        assert secret.encode() not in listed


def test_a_public_queue_without_a_key_is_told_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["queue", "--bind", "tcp://0.0.0.0:0", "--dir", str(tmp_path)]) == 1
    assert "streamrl keygen FILE" in capsys.readouterr().err
