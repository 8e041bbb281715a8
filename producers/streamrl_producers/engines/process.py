"""A server's process: started in its own environment, awaited, and ended with everything it started."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from streamrl_queue.errors import DeadlineExceeded, EngineError
from streamrl_queue.nursery import open_nursery

from .install import installed_python, server_environment
from .sglang import RESERVED_TOKENS

if TYPE_CHECKING:
    from ..config import SGLangEngine, VLLMEngine

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.5  # between two looks at a server that starts
SAY_SECONDS: Final = 10.0  # between two lines in the log that say what is awaited
STOP_SECONDS: Final = 5.0  # a server that ends in order needs one or two


def free_port() -> int:
    """A port of this host that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(config: SGLangEngine | VLLMEngine, model_dir: Path, port: int) -> list[str]:
    """How the server of `config` is started at `port`.

    Raises:
        ConfigError: it is not installed, and `engine.python` names no other Python.
    """
    cpu = config.device == "cpu"
    kind = config.kind
    python = config.python or str(installed_python(kind, cpu=cpu))
    # One more than the engine process lets in: the one token that proves life never queues.
    where = ["--host", "127.0.0.1", "--port", str(port), "--dtype", config.dtype]
    if kind == "sglang":
        # Weights come from the learner: what the server starts with does not matter.
        told = ["-m", "sglang.launch_server", "--model-path", str(model_dir), "--load-format", "dummy"]
        told += ["--skip-tokenizer-init", "--context-length", str(config.max_tokens + RESERVED_TOKENS)]
        told += ["--max-running-requests", str(config.slots + 1), "--device", "cpu" if cpu else "cuda"]
        if cpu:
            told += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            told += ["--disable-overlap-schedule", "--max-total-tokens", str((config.slots + 1) * config.max_tokens)]
    else:
        told = ["-m", "vllm.entrypoints.cli.main", "serve", str(model_dir), "--load-format", "dummy"]
        told += ["--served-model-name", "m", "--max-model-len", str(config.max_tokens)]
        told += ["--max-num-seqs", str(config.slots + 1), "--enable-scale-out"]
        told += ["--logprobs-mode", "processed_logprobs"]
        if cpu:
            told += ["--enforce-eager", "--worker-extension-cls", "streamrl_vllm.Extension"]
            told += ["--weight-transfer-config", '{"backend":"gloo"}']
    return [python, *told, *where, *config.arguments]


def variables(config: SGLangEngine | VLLMEngine) -> dict[str, str]:
    """The server's environment variables."""
    told = server_environment(config.kind, cpu=config.device == "cpu", threads=config.threads)
    if config.device.startswith("cuda:"):
        told["CUDA_VISIBLE_DEVICES"] = config.device.removeprefix("cuda:")
    return told


@asynccontextmanager
async def running(
    told: Sequence[str],
    environment: Mapping[str, str],
    log_file: Path,
    *,
    ready: Callable[[], Awaitable[bool]],
    seconds: float,
    name: str,
) -> AsyncIterator[None]:
    """A server that is ready; when it ends by itself the block is cancelled and EngineError raised.

    Raises:
        DeadlineExceeded: it was not ready within `seconds`. EngineError: it ended. Both with the end of its log.
    """
    process, write = _start(told, environment, log_file)
    log.info("%s: pid %d, its words are in %s", name, process.pid, log_file)
    try:
        ended = None
        async with open_nursery() as nursery:

            async def watch() -> None:
                nonlocal ended
                ended = await _exit_code(process)
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await _await(ready, seconds, name, log_file)
            yield
            nursery.cancel_scope.cancel()
        if ended is not None:
            raise EngineError(f"{name} ended with exit code {ended}; the end of {log_file}:\n{_tail(log_file)}")
    finally:
        with trio.CancelScope(shield=True):
            await _end(process)
        os.close(write)


def _start(told: Sequence[str], environment: Mapping[str, str], log_file: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The guarded process, and the pipe whose end is its end."""
    read, write = os.pipe()
    with log_file.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), str(read), *told],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(read,),
            env=dict(environment),
        )
    os.close(read)
    return process, write


async def _await(ready: Callable[[], Awaitable[bool]], seconds: float, name: str, log_file: Path) -> None:
    started, said = trio.current_time(), trio.current_time()
    while not await ready():
        now = trio.current_time()
        if now - started > seconds:
            error = DeadlineExceeded.waiting("a sign of health", name, seconds)
            raise DeadlineExceeded(f"{error}; the end of {log_file}:\n{_tail(log_file)}")
        if now - said > SAY_SECONDS:
            said = now
            log.info("waiting for %s to be ready, %.0f of %.0f s", name, now - started, seconds)
        await trio.sleep(POLL_SECONDS)
    log.info("%s is ready after %.0f s", name, trio.current_time() - started)


async def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server; what is left of its group after some seconds is killed."""
    if process.poll() is None:
        process.terminate()
        with trio.move_on_after(STOP_SECONDS):
            await _exit_code(process)
    # A group lives on in its members when its leader is gone.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


async def _exit_code(process: subprocess.Popen[bytes]) -> int:
    while (code := process.poll()) is None:
        await trio.sleep(POLL_SECONDS / 5)
    return code


def _tail(path: Path, lines: int = 15) -> str:
    """The last lines of a server's log, indented."""
    text = path.read_bytes()[-64 * 1024 :].decode("utf-8", "replace")
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (the log is empty)"
