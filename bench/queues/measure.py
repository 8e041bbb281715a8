"""The driver: starts one system, runs the pipeline and the phases, takes time and CPU, checks what arrived."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

import msgspec

from .processes import Child, SystemFailed, cpu_by_process, end_all, ends_all, processes, resident_bytes
from .system import Entry

ROLES: Final = ("reward", "learner", "producer")
PUT_ROWS: Final = 64
GET_ROWS: Final = 32
WARM_UP_ROWS: Final = 256
# A measurement of few rows is noise; one of many holds up the others.
FEWEST_ROWS: Final = 128
MOST_ROWS: Final = 16384
# In a phase all rows are put before the first is taken, and streamrl's broker bounds how many may wait.
MOST_WAITING: Final = 4096
# Episodes that a producer plays at once, each of which puts its row when it ends.
ROWS_IN_FLIGHT: Final = 64
LEAST_IN_FLIGHT: Final = 4
# A put or get of one row costs up to so much more than one of a batch, so its phases take fewer.
SHARE: Final[Mapping[int, float]] = {64: 0.5, 8: 0.25, 1: 0.0625}


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. `latencies` are those of its operations, in seconds."""

    rows: int
    row_bytes: float
    seconds: float
    cpu_seconds: float
    cpu_by_role: dict[str, float] = {}
    latencies: list[float] = []

    @property
    def rate(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds

    @property
    def megabytes(self) -> float:
        """10^6 bytes per second."""
        return self.rate * self.row_bytes / 1e6

    @property
    def cost(self) -> float:
        """CPU microseconds per row, of all processes."""
        return self.cpu_seconds / self.rows * 1e6


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """What one start of a system gave. Phases by their name and batch size, as `put 64`."""

    start_seconds: float
    resident_bytes: int
    pipeline: Figures
    phases: dict[str, Figures]
    compared: int


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds after which a system counts as failed."""

    start: float = 180.0
    measurement: float = 120.0


class Bench:
    """A started system: its server and its three roles."""

    def __init__(self, mark: str, server: Child, roles: Mapping[str, Child], row_bytes: float, seconds: float) -> None:
        self._mark = mark
        self._names = {server.pid: "server", **{child.pid: name for name, child in roles.items()}}
        self.roles = roles
        self._row_bytes = row_bytes
        self._seconds = seconds
        self._first = 0
        self.compared = 0

    def pipeline(self, rows: int, put: int = PUT_ROWS, get: int = GET_ROWS) -> Figures:
        """All roles at once; from the first put to the learner's last row."""
        before = cpu_by_process(self._mark)
        for role in ("reward", "learner"):
            self.roles[role].tell(do="get", rows=rows, size=get, ahead=-1)
        self.roles["producer"].tell(do="put", first=self._first, rows=rows, size=put, in_flight=0)
        answers = self._answers("producer", "reward", "learner")
        figures = self._figures(rows, before, answers["producer"]["began"], answers["learner"])
        self._verify(rows)
        return figures

    def phases(self, rows: int, size: int) -> dict[str, Figures]:
        """One role after the other, one operation after the other: put, reward, get."""
        commands: dict[str, dict[str, Any]] = {
            "put": {"role": "producer", "do": "put", "first": self._first, "in_flight": 1},
            "reward": {"role": "reward", "do": "get", "ahead": 0},
            "get": {"role": "learner", "do": "get", "ahead": 0},
        }
        found = {}
        for name, command in commands.items():
            role = command.pop("role")
            before = cpu_by_process(self._mark)
            # The reward worker is here to get the rows on, not to be measured at every size.
            self.roles[role].tell(rows=rows, size=GET_ROWS if name == "reward" else size, **command)
            answer = self._answers(role)[role]
            found[f"{name} {size}"] = self._figures(rows, before, answer["began"], answer)
        self._verify(rows)
        return found

    def pipelined_puts(self, rows: int, size: int) -> Figures:
        """Puts as a producer makes them that plays many episodes at once; the rows are taken away again."""
        in_flight = max(LEAST_IN_FLIGHT, ROWS_IN_FLIGHT // size)
        before = cpu_by_process(self._mark)
        self.roles["producer"].tell(do="put", first=self._first, rows=rows, size=size, in_flight=in_flight)
        answer = self._answers("producer")["producer"]
        figures = self._figures(rows, before, answer["began"], answer)
        for role in ("reward", "learner"):
            self.roles[role].tell(do="get", rows=rows, size=GET_ROWS, ahead=0)
            self._answers(role)
        self._verify(rows)
        return figures

    def _figures(self, rows: int, before: Mapping[int, float], began: float, answer: dict[str, Any]) -> Figures:
        spent: dict[str, float] = {}
        for pid, seconds in cpu_by_process(self._mark).items():
            name = self._names.get(pid, "daemons")
            spent[name] = spent.get(name, 0.0) + seconds - before.get(pid, 0.0)
        return Figures(
            rows=rows,
            row_bytes=self._row_bytes,
            seconds=answer["ended"] - began,
            cpu_seconds=sum(spent.values()),
            cpu_by_role=spent,
            latencies=answer["seconds"],
        )

    def _answers(self, *roles: str) -> dict[str, dict[str, Any]]:
        deadline = time.monotonic() + self._seconds
        return {role: self.roles[role].answer(deadline) for role in roles}

    def _verify(self, rows: int) -> None:
        """All rows came, with the bytes that were put. After the clock has stopped."""
        for role in ("reward", "learner"):
            self.roles[role].tell(do="verify", first=self._first, rows=rows)
            self.compared += self._answers(role)[role]["compared"]
        self._first += rows


class Place:
    """A directory for one start of a system, and the processes that run there."""

    def __init__(self, name: str, entry: Entry, python: Path, scratch: Path, where: Path, stack: ExitStack) -> None:
        self.name = name
        self.where = where
        self.mark = uuid4().hex
        self._python = python
        self._log = scratch / f"{name}.log"
        self._variables = {key: value.format(where=where) for key, value in entry.variables.items()}
        self._stack = stack
        stack.enter_context(ends_all(self.mark))

    def start(self, role: str, *address: str) -> Child:
        """One process of the system; it ends with the place at the latest."""
        command = [str(self._python), "-m", "bench.queues.role", self.name, role, str(self.where), *address]
        child = Child(f"the {role} of {self.name}", command, self.mark, self._log, self._variables)
        self._stack.callback(child.leave)
        return child


@contextmanager
def place(name: str, entry: Entry, python: Path, scratch: Path) -> Iterator[Place]:
    """Where one start of the system may keep its files: on disk, or in memory."""
    memory = entry.files == "shm" and Path("/dev/shm").is_dir()
    where = Path(tempfile.mkdtemp(prefix="queue-", dir="/dev/shm" if memory else scratch))
    try:
        with ExitStack() as stack:
            here = Place(name, entry, python, scratch, where, stack)
            try:
                yield here
            except SystemFailed:
                # The others may wait for the one that failed, and would not hear of the end.
                end_all(here.mark)
                raise
    finally:
        shutil.rmtree(where, ignore_errors=True)


class Started(NamedTuple):
    """A system that runs, the seconds its server took to start, and the bytes that its processes then had."""

    bench: Bench
    seconds: float
    resident_bytes: int


@contextmanager
def started(name: str, entry: Entry, python: Path, scratch: Path, deadlines: Deadlines) -> Iterator[Started]:
    """The system with all its roles.

    Raises:
        SystemFailed: it does not start in time.
    """
    with place(name, entry, python, scratch) as here:
        began = time.monotonic()
        deadline = began + deadlines.start
        server = here.start("server")
        address = server.answer(deadline)["address"]
        seconds = time.monotonic() - began
        resident = resident_bytes(processes(here.mark) - ({server.pid} if entry.wrapped else set()))
        roles = {role: here.start(role, address) for role in ROLES}
        sizes = [child.answer(deadline)["row_bytes"] for child in roles.values()]
        yield Started(Bench(here.mark, server, roles, sizes[0], deadlines.measurement), seconds, resident)


def visit(name: str, entry: Entry, python: Path, scratch: Path, *, seconds: float, sizes: tuple[int, ...]) -> Visit:
    """Start the system, measure every figure once, each for about `seconds`, and stop it."""
    with started(name, entry, python, scratch, Deadlines()) as (bench, start_seconds, resident):
        bench.pipeline(WARM_UP_ROWS)
        rate = bench.pipeline(WARM_UP_ROWS).rate
        pipeline = bench.pipeline(rows_for(rate, seconds))
        phases: dict[str, Figures] = {}
        for size in sizes:
            rows = min(rows_for(pipeline.rate, seconds * SHARE[size]), MOST_WAITING)
            phases |= bench.phases(rows, size)
            if entry.module == "ours":
                phases[f"put {size}, several in flight"] = bench.pipelined_puts(rows, size)
        return Visit(
            start_seconds=start_seconds,
            resident_bytes=resident,
            pipeline=pipeline,
            phases=phases,
            compared=bench.compared,
        )


def rows_for(rate: float, seconds: float) -> int:
    """How many rows last about so long, in whole batches."""
    rows = min(max(rate * seconds, FEWEST_ROWS), MOST_ROWS)
    return max(int(rows) // PUT_ROWS, 1) * PUT_ROWS


__all__ = ["Bench", "Deadlines", "Figures", "SystemFailed", "Visit", "rows_for", "started", "visit"]
