"""A server's process is awaited, watched, and leaves nothing behind; environments are made from pinned files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from streamrl_producers.config import SGLangEngine, VLLMEngine
from streamrl_producers.engines import install, process
from streamrl_queue.errors import ConfigError, DeadlineExceeded, EngineError

SECONDS = 30.0
# Starts a process of its own, says so, and lives on.
PARENT = """
    import pathlib, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(sys.argv[1]).write_text(str(child.pid))
    print("serves", flush=True)
    time.sleep(600)
"""


def server(path: Path, code: str = PARENT) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), str(path / "child")]


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


async def until_gone(pid: int) -> None:
    with trio.fail_after(SECONDS):
        while not gone(pid):
            await trio.sleep(0.01)


def run(path: Path, told: list[str], ready: Any, body: Any, seconds: float = SECONDS) -> None:
    async def main() -> None:
        with trio.fail_after(SECONDS * 2):
            started = process.running(told, os.environ, path / "log", ready=ready, seconds=seconds, name="the server")
            async with started:
                await body()

    trio.run(main)


def test_a_server_that_is_left_takes_everything_it_started_with_it(tmp_path: Path) -> None:
    pids: list[int] = []

    async def ready() -> bool:
        return (tmp_path / "log").read_text() == "serves\n"

    async def body() -> None:
        pids.append(int((tmp_path / "child").read_text()))
        assert not gone(pids[0])

    run(tmp_path, server(tmp_path), ready, body)
    trio.run(until_gone, pids[0])


def test_a_server_that_ends_while_it_is_awaited_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    code = "import sys; print('no such model'); sys.exit(3)"
    with pytest.raises(EngineError, match=r"exit code 3.*(?s:.*)no such model"):
        run(tmp_path, server(tmp_path, code), never, trio.sleep_forever)


def test_a_server_that_ends_while_it_serves_ends_the_block(tmp_path: Path) -> None:
    async def ready() -> bool:
        return True

    with pytest.raises(EngineError, match="exit code 4"):
        run(tmp_path, server(tmp_path, "import sys; sys.exit(4)"), ready, trio.sleep_forever)


def test_a_server_that_is_not_ready_in_time_is_told_and_ended(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    with pytest.raises(DeadlineExceeded, match=r"waited 0\.0 s for a sign of health from the server"):
        run(tmp_path, server(tmp_path), never, trio.sleep_forever, seconds=0)


def test_a_server_dies_with_its_parent_however_that_dies(tmp_path: Path) -> None:
    code = f"""
        import os, pathlib, sys, trio
        from streamrl_producers.engines import process
        async def ready():
            return pathlib.Path({str(tmp_path / "log")!r}).read_text() == "serves\\n"
        async def main():
            async with process.running(
                {server(tmp_path)!r}, os.environ, pathlib.Path({str(tmp_path / "log")!r}),
                ready=ready, seconds=30, name="it",
            ):
                print("up", flush=True)
                await trio.sleep_forever()
        trio.run(main)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, env={**os.environ}
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.send_signal(signal.SIGKILL)
    trio.run(until_gone, int((tmp_path / "child").read_text()))


@contextmanager
def cache(monkeypatch: pytest.MonkeyPatch, path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    yield path / "streamrl" / "engines"


def test_a_server_that_is_not_installed_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache(monkeypatch, tmp_path), pytest.raises(ConfigError, match="streamrl engines install sglang --cpu"):
        process.command(SGLangEngine(), tmp_path, 1)


def test_an_environment_that_was_not_finished_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cache(monkeypatch, tmp_path):
        install.environment("sglang", cpu=True).mkdir(parents=True)
        with pytest.raises(ConfigError, match="not installed"):
            install.installed_python("sglang", cpu=True)


def test_a_failed_installation_leaves_nothing_and_says_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache(monkeypatch, tmp_path):
        monkeypatch.setattr(install, "pip_arguments", lambda kind, cpu: [["no-such-command"]])
        with pytest.raises(EngineError, match="no-such-command"):
            install.install("sglang", cpu=False, say=lambda line: None)
        assert not install.environment("sglang", cpu=False).exists()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("cpu", [True, False])
def test_every_requirement_is_pinned(kind: install.Kind, cpu: bool) -> None:
    files = [call[-1] for call in install.pip_arguments(kind, cpu=cpu) if "--requirement" in call]
    lines = [line for file in files for line in Path(file).read_text().splitlines()]
    wanted = [line for line in lines if not line.startswith(("#", "--"))]
    assert wanted
    assert all("==" in line for line in wanted)


@pytest.mark.parametrize("config", [SGLangEngine(python="/py"), VLLMEngine(python="/py")])
def test_a_server_is_started_with_the_limits_of_the_configuration(
    config: SGLangEngine | VLLMEngine, tmp_path: Path
) -> None:
    told = process.command(
        msgspec.structs.replace(config, slots=7, max_tokens=99, arguments=("--more",)), tmp_path, 1234
    )
    assert told[0] == "/py"
    assert {"1234", "8", str(tmp_path), "--more"} <= set(told)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"urls": ("127.0.0.1:1",)}, "engine.urls"),
        ({"urls": ("http://a:1", "http://b:1")}, "engine.count"),
        ({"urls": ("http://a:1",), "python": "/py"}, "engine.python"),
        ({"device": "tpu"}, "engine.device"),
        ({"start_seconds": 0}, "engine.start_seconds"),
    ],
)
def test_a_servers_configuration_that_cannot_work_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SGLangEngine(**change)
