"""`streamrl queue`: one broker for people who want only the queue."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import trio

from streamrl_queue import open_broker, work_flow
from streamrl_queue.config import Durability
from streamrl_queue.errors import ConfigError

from .failure import first_error

KEY_BYTES = 32


def read_key(path: Path | None) -> bytes | None:
    """The key in a file: 32 raw bytes, or 64 hexadecimal digits.

    Raises:
        ConfigError: the file cannot be read or holds something else.
    """
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--key-file {path}: cannot be read: {error.strerror}") from None
    if len(data) != KEY_BYTES:
        try:
            data = bytes.fromhex(data.decode("ascii").strip())
        except ValueError:
            data = b""
    if len(data) != KEY_BYTES:
        raise ConfigError(f"--key-file {path}: expected {KEY_BYTES} bytes or {2 * KEY_BYTES} hexadecimal digits")
    return data


def run_broker(bind: str, directory: Path, durability: Durability, key: Path | None, say: Callable[[str], None]) -> int:
    """Serve until a signal; `say` is told the address once it is bound. The exit code is 0, or 143 for SIGTERM."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    secret = read_key(key)
    directory.mkdir(parents=True, exist_ok=True)

    async def serve() -> int:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            opened = open_broker(work_flow(), directory, bind=bind, durability=durability, key=secret)
            async with opened as broker:
                say(f"queue at {broker.address}, journal in {directory}")
                async for number in signals:
                    return 143 if number == signal.SIGTERM else 0
        return 0

    try:
        return trio.run(serve)
    except BaseExceptionGroup as group:
        raise first_error(group) from group
