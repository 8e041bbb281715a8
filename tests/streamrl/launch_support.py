"""A small real run for tests: the demo with fewer and smaller steps."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

SMALL = (
    "name=small",
    "tasks.eval_rows=16",
    "learner.steps=10",
    "learner.rows_per_step=32",
    "learner.checkpoint_every=4",
    "learner.no_signal_steps=1000",
    "learner.micro_batch_tokens=256",
)

POLL_SECONDS = 0.02


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value of `holds`, looked at often."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, f"waited {seconds} s for {holds.__doc__ or holds}"
        time.sleep(POLL_SECONDS)
    return value


class Launched:
    """`streamrl launch` in a process of its own."""

    def __init__(self, runs: Path, *arguments: str) -> None:
        self.run = runs / "small"
        command = [sys.executable, "-m", "streamrl.cli", "launch", "--config", "demo", f"runs={runs}", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def steps(self) -> int:
        """How many steps `metrics.jsonl` has."""
        metrics = self.run / "metrics.jsonl"
        return metrics.read_bytes().count(b'"loss"') if metrics.exists() else 0

    def reaches(self, step: int) -> None:
        until(lambda: self.steps() >= step or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()[0]

    def pids(self, role: str) -> list[int]:
        """Process ids of a role, one for each time it was started."""
        log = self.run / "logs" / f"{role}.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [int(line.split(" pid ")[1].split()[0]) for line in lines if " pid " in line and line.endswith("starts")]

    def all_pids(self) -> list[int]:
        return [pid for log in (self.run / "logs").glob("*.log") for pid in self.pids(log.stem)]

    def end(self, seconds: float = 120.0) -> tuple[int, str]:
        """Exit code and output."""
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output

    def summary(self) -> dict[str, Any]:
        return msgspec.json.decode((self.run / "summary.json").read_bytes())  # type: ignore[no-any-return]


def gone(pid: int) -> bool:
    """Whether no such process runs; one that waits to be reaped by somebody counts as gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"
