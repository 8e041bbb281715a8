"""A tiny model for engines, and a real server that has it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
from engine_doubles import CONFIG, VOCAB

from streamrl_learners import tiny
from streamrl_producers.config import ServerEngine
from streamrl_producers.engines import process
from streamrl_producers.engines.server import ADAPTERS


def make_model(seed: int) -> Any:
    return tiny.make(CONFIG, seed).eval()


def model_directory(directory: Path) -> Path:
    """Files that a server starts from; the weights come later."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@contextmanager
def real_server(config: ServerEngine, directory: Path) -> Iterator[str]:
    """The URL of a server, started as a run starts its own."""
    port, ready, done = process.free_port(), threading.Event(), trio.Event()
    url = f"http://127.0.0.1:{port}"
    command = process.command(config, model_directory(directory / "base"), port)
    token: list[trio.lowlevel.TrioToken] = []
    errors: list[BaseException] = []

    async def serve() -> None:
        token.append(trio.lowlevel.current_trio_token())
        async with ADAPTERS[config.kind](url, vocab_size=VOCAB) as adapter:
            log = directory / "server.log"
            async with process.running(
                command, process.variables(config), log, ready=adapter.ready, seconds=config.start_seconds, name=url
            ):
                ready.set()
                await done.wait()

    def run() -> None:
        try:
            trio.run(serve)
        except BaseException as error:
            errors.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(config.start_seconds + 10)
        assert not errors, errors
        yield url
    finally:
        token[0].run_sync_soon(done.set)
        thread.join()
