"""Processes of a system under test: started with a mark, counted with all that they start, ended to the last one."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
MARK: Final = "STREAMRL_BENCH_MARK"
# After its input has ended a process may take this long to leave.
LEAVE_SECONDS: Final = 10.0
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class SystemFailed(Exception):
    """A system does not install, start, answer in time, or deliver what was put. It is left out from here on."""


class Child:
    """One role's process and its two pipes."""

    def __init__(
        self, what: str, command: list[str], mark: str, log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.what = what
        self.log = log
        environment = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(variables or {})}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._rest = b""

    def tell(self, **command: Any) -> None:
        """Send one command."""
        try:
            _pipe(self._process.stdin).write(json.dumps(command).encode() + b"\n")
            _pipe(self._process.stdin).flush()
        except BrokenPipeError:
            raise SystemFailed(self._ended()) from None

    def answer(self, deadline: float) -> dict[str, Any]:
        """The next answer, at the latest at `deadline` on the monotonic clock."""
        output = _pipe(self._process.stdout).fileno()
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                raise SystemFailed(f"{self.what} did not answer in time; see {self.log}")
            data = os.read(output, 1 << 20)
            if not data:
                raise SystemFailed(self._ended())
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> str:
        try:
            code = self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{self.what} closed its pipes; see {self.log}"
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip(" |+-")]
        return f"{self.what} ended with {code}: {lines[-1] if lines else 'without a word'}"

    def leave(self) -> None:
        """End its input, and wait for it a while."""
        for pipe in (self._process.stdin, self._process.stdout):
            _pipe(pipe).close()
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


@contextmanager
def ends_all(mark: str) -> Iterator[None]:
    """Whatever carries the mark, or was started by what does, is gone after the block."""
    try:
        yield
    finally:
        end_all(mark)


def end_all(mark: str) -> None:
    """Kill whatever carries the mark, until nothing does."""
    while marked := processes(mark):
        for pid in marked:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def processes(mark: str) -> set[int]:
    """Living processes that carry the mark in their environment, and their descendants."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state == "Z":
                continue
            parents[int(entry.name)] = int(parent)
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    # A process that changed its title has lost its environment, but not its parent.
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a process with all its threads, those that ended too."""
    try:
        # The clock that clock_getcpuclockid(3) names.
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def cpu_by_process(mark: str) -> dict[int, float]:
    """CPU seconds of every process of a system."""
    return {pid: cpu_seconds(pid) for pid in processes(mark)}


def resident_bytes(pids: set[int]) -> int:
    """Memory that processes have in use, what they share counted in each."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total
