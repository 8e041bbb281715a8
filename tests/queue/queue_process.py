"""A broker in a process of its own, for tests that kill it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SCRIPT = """
import sys, trio
from pathlib import Path
from streamrl_queue import QueueConfig, open_broker, training_flow

async def main(directory, bind, durability):
    flow = training_flow(QueueConfig(max_staleness=2, session_seconds=2.0, rollout_seconds=30.0), rows_per_step=8)
    async with open_broker(flow, Path(directory), bind=bind, durability=durability) as broker:
        print(broker.address, flush=True)
        await trio.sleep_forever()

trio.run(main, *sys.argv[1:])
"""

START_SECONDS = 20.0


class BrokerProcess:
    """Start, kill and start again, always at one address and on one journal."""

    def __init__(self, directory: Path, durability: str = "flush") -> None:
        self.directory = directory / "journal"
        self.address = f"ipc://{directory}/q.sock"
        self.durability = durability
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        arguments = [str(self.directory), self.address, self.durability]
        self._process = subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == self.address

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def running(directory: Path, durability: str = "flush") -> Iterator[BrokerProcess]:
    process = BrokerProcess(directory, durability)
    started = time.monotonic()
    process.start()
    assert time.monotonic() - started < START_SECONDS
    try:
        yield process
    finally:
        process.kill()
