"""`streamrl queue`: one broker for people who want only the queue."""

from __future__ import annotations

import fcntl
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

import trio

from streamrl_queue import open_broker, work_flow
from streamrl_queue.config import Durability, Recovery
from streamrl_queue.errors import ConfigError, JournalError
from streamrl_queue.keys import find_key
from streamrl_queue.metrics import check_metrics, serve_metrics

from .failure import first_error

ADDRESS: Final = "broker.address"
"""File beside the journal: where its broker listens, held locked while it does."""


def run_broker(
    bind: str,
    directory: Path,
    durability: Durability,
    key: Path | None,
    say: Callable[[str], None],
    *,
    stages: Sequence[str] = ("work",),
    recovery: Recovery = "stop",
    metrics: str | None = None,
) -> int:
    """Serve until a signal; `say` is told the address once it is bound. The exit code is 0, or 143 for SIGTERM."""
    if metrics is not None:
        check_metrics(metrics)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    secret = find_key(key)

    async def serve() -> int:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            opened = open_broker(
                work_flow(stages), directory, bind=bind, durability=durability, recovery=recovery, key=secret
            )
            async with opened as broker, serve_metrics(broker, metrics) as url:
                address.write(broker.address)
                address.flush()
                say(f"queue at {broker.address}, journal in {directory}{f', metrics at {url}' if url else ''}")
                async for number in signals:
                    return 143 if number == signal.SIGTERM else 0
        return 0

    try:
        with _owned(directory) as address:
            return trio.run(serve)
    except BaseExceptionGroup as group:
        raise first_error(group) from group


@contextmanager
def _owned(directory: Path) -> Iterator[TextIO]:
    """The open address file of a journal that no other broker has."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        address = (directory / ADDRESS).open("a+")
    except OSError as error:
        raise ConfigError(
            f"--dir {directory}: cannot be used for a journal: {error.strerror}; name a directory that can be written"
        ) from None
    with address as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise JournalError(f"{directory} belongs to the broker at {file.read()}; it must end first") from None
        file.truncate(0)
        yield file


def served_address(directory: Path) -> str | None:
    """Where the broker of this journal listens; None when none was started by `streamrl queue` or it has ended."""
    try:
        with (directory / ADDRESS).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read() or None
    except FileNotFoundError:
        pass
    return None
