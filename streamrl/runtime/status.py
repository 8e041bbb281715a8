"""`streamrl status RUN`: the members of a live run, what each does or waits for, and the queue's counts."""

from __future__ import annotations

import time
from pathlib import Path

import trio
from rich.console import Console
from rich.table import Table

from streamrl_queue import Member, TransferQueue
from streamrl_queue.errors import ConfigError

from .counts import conservation
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
        ended = run.outcome or "not running; continue it with --resume"
        console.print(f"{run.path.name}: {ended}", highlight=False)
        return 0
    launch = run.read_launch()

    async def ask() -> None:
        connection = TransferQueue.connect(launch.address, role="status", deadline=CONNECT_SECONDS)
        async with connection as queue:
            membership = await queue.members()
            counts = await queue.statistics()
        console.print(_members([m for m in membership.members if m.role != "status"]))
        console.print(conservation_table(conservation(counts)))
        for stage, at in counts.stages.items():
            console.print(f"{stage:>10}  ready {at.ready}  leased {at.leased}  written {at.written}", highlight=False)

    trio.run(ask)
    return 0


def _members(members: list[Member]) -> Table:
    table = Table(title="members", title_justify="left")
    for column in ("name", "ready", "version", "activity", "for", "gauges"):
        table.add_column(column)
    now = time.time()
    for member in sorted(members, key=lambda m: m.name or ""):
        gauges = "  ".join(f"{name} {value:g}" for name, value in sorted(member.gauges.items()))
        version = "–" if member.version is None else str(member.version)
        ready = "yes" if member.ready else "no"
        since = f"{max(0.0, now - member.since):.0f} s"
        table.add_row(member.name or member.session, ready, version, member.activity or "", since, gauges)
    return table
