"""`streamrl status RUN`: the members of a live run, what each does or waits for, and the queue's counts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import trio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamrl_queue import Member, TransferQueue
from streamrl_queue.errors import ConfigError
from streamrl_queue.keys import find_key

from ..config import load_file
from .counts import conservation
from .failure import LastWords
from .panel import gauges
from .rundir import RunDirectory
from .summary import conservation_table

CONNECT_SECONDS = 5.0


def find_run(name: str) -> RunDirectory:
    """A run by its directory, or by its name below `runs/`.

    Raises:
        ConfigError: when there is none.
    """
    for path in (Path(name), Path("runs") / name):
        if (path / "config.yaml").exists():
            return RunDirectory(path)
    raise ConfigError(f"status: there is no run {name}, neither as a directory nor below runs/")


def print_status(name: str) -> int:
    """Print who waits on whom and for how long; returns the exit code."""
    run = find_run(name)
    console = Console()
    if not run.alive:
        console.print(f"{run.path.name}: {_ended(run)}", highlight=False, markup=False, soft_wrap=True)
        return 0
    launch = run.read_launch()

    async def ask() -> None:
        connection = TransferQueue.connect(
            launch.address, key=find_key(load_file(run.config).queue.key_file), role="status", deadline=CONNECT_SECONDS
        )
        async with connection as queue:
            membership = await queue.members()
            counts = await queue.statistics()
        console.print(members_table([m for m in membership.members if m.role != "status"]))
        console.print(conservation_table(conservation(counts)))
        for stage, at in counts.stages.items():
            parked = f"  parked {at.parked}" if at.parked else ""
            line = f"{stage:>10}  ready {at.ready}{parked}  leased {at.leased}  written {at.written}"
            console.print(line, highlight=False)

    trio.run(ask)
    return 0


def _ended(run: RunDirectory) -> str:
    """How a run that nobody holds came to its end."""
    words = LastWords.read(run.logs / "coordinator.error")
    if run.outcome is not None:
        return run.outcome
    if words is None:
        return "not running; it was killed, or stopped at once; continue it with --resume"
    return f"failed; continue it with --resume once this is mended\n{words.error}: {words.message}"


def members_table(members: Iterable[Member]) -> Table:
    """One line per process; its numbers as the panel shows them."""
    table = Table(title="members", title_justify="left")
    for column in ("name", "does", "for", "numbers"):
        table.add_column(column, no_wrap=column == "name")
    now = time.time()
    for member in sorted(members, key=lambda m: m.name or ""):
        since = f"{max(0.0, now - member.since):.0f} s"
        numbers = Text("\n").join(Text(f"{name} {value}") for name, value in gauges(_gauges(member)))
        table.add_row(member.name or member.session, _does(member), since, numbers)
    return table


def _does(member: Member) -> str:
    """Only engines are ready or not: requests are routed to those that are."""
    activity = member.activity or ""
    if member.role != "engine":
        return activity
    return f"{activity}, {'ready' if member.ready else 'not ready'}" if activity else "not ready"


def _gauges(member: Member) -> dict[str, float]:
    version = {} if member.version is None else {"version": float(member.version)}
    return dict(sorted((version | dict(member.gauges)).items()))
