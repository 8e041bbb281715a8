"""`streamrl status RUN`: who waits for whom in a live run, its members, and the queue's counts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamrl_queue import Member, TransferQueue
from streamrl_queue.errors import ConfigError, DeadlineExceeded
from streamrl_queue.keys import find_key
from streamrl_queue.nursery import run as run_trio

from ..config import load_file
from . import plan
from .chain import SILENT, Facts, Link, chain
from .counts import conservation
from .facts import facts_of
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
    try:
        show(look(run), console)
    except DeadlineExceeded as error:
        console.print(waits_table([_no_queue(error)]))
    return 0


def status_data(name: str) -> dict[str, Any]:
    """The same for programs. `waits` is the chain of who waits for whom, `head` its last link in words."""
    run = find_run(name)
    if not run.alive:
        return {"run": run.path.name, "state": "ended", "outcome": _ended(run)}
    try:
        return {"run": run.path.name, "state": "running", **as_data(look(run))}
    except DeadlineExceeded as error:
        link = _no_queue(error)
        return {"run": run.path.name, "state": "running", "waits": [link], "head": str(link)}


def _no_queue(error: DeadlineExceeded) -> Link:
    """Everybody waits for a broker that does not answer."""
    return Link(plan.QUEUE, f"does not answer: {error}")


def look(run: RunDirectory) -> Facts:
    """What the members of a live run and its queue say.

    Raises:
        DeadlineExceeded: the queue does not answer.
    """
    config, launch = load_file(run.config), run.read_launch()
    names = [name for name in plan.role_names(config) if name != plan.QUEUE]

    async def ask() -> Facts:
        connection = TransferQueue.connect(
            launch.address, key=find_key(config.queue.key_file), role="status", deadline=CONNECT_SECONDS
        )
        async with connection as queue:
            with trio.move_on_after(CONNECT_SECONDS):
                return await facts_of(queue, names)
        raise DeadlineExceeded.waiting("what it knows", f"the queue at {launch.address}", CONNECT_SECONDS)

    facts = run_trio(ask)
    return replace(facts, members=[member for member in facts.members if member.role != "status"])


def show(facts: Facts, console: Console) -> None:
    """For people: who waits for whom, the members, where the rows are."""
    console.print(waits_table(chain(facts)))
    console.print(members_table(facts.members, facts.silent))
    console.print(conservation_table(conservation(facts.statistics)))
    for stage, at in facts.statistics.stages.items():
        parked = f"  parked {at.parked}" if at.parked else ""
        line = f"{stage:>10}  ready {at.ready}{parked}  leased {at.leased}  written {at.written}"
        console.print(line, highlight=False)


def as_data(facts: Facts) -> dict[str, Any]:
    """For programs. `waits` is the chain, its last link the head; seconds count up to now."""
    links = chain(facts)
    return {
        "waits": links,
        "head": str(links[-1]),
        "silent": facts.silent,
        "members": [_member_data(facts, member) for member in facts.members],
        "stages": facts.statistics.stages,
        "step": facts.statistics.step,
        "version": facts.statistics.version,
        "rows": conservation(facts.statistics),
        "full": facts.leased.full,
    }


def _member_data(facts: Facts, member: Member) -> dict[str, Any]:
    waits = [
        {"what": w.what, "row": w.row or None, "on": w.on or None, "seconds": facts.now - w.since} for w in member.waits
    ]
    return {
        "name": member.name,
        "role": member.role,
        "does": _does(member),
        "seconds": facts.now - member.since,
        "waits": waits,
        "gauges": _gauges(member),
    }


def waits_table(links: Iterable[Link]) -> Table:
    """Who waits for whom; where to look is the last line."""
    table = Table(title="who waits for whom", title_justify="left")
    for column in ("who", "waits for, or does", "for"):
        table.add_column(column, no_wrap=column != "waits for, or does")
    for link in links:
        table.add_row(link.who, Text(link.what), "" if link.seconds is None else f"{link.seconds:.0f} s")
    return table


def _ended(run: RunDirectory) -> str:
    """How a run that nobody holds came to its end."""
    words = LastWords.read(run.logs / "coordinator.error")
    if run.outcome is not None:
        return run.outcome
    if words is None:
        return "not running; it was killed, or stopped at once; continue it with --resume"
    return f"failed; continue it with --resume once this is mended\n{words.error}: {words.message}"


def members_table(members: Iterable[Member], silent: Iterable[str] = ()) -> Table:
    """One line per process, those without a session last; its numbers as the panel shows them."""
    table = Table(title="members", title_justify="left")
    for column in ("name", "does", "for", "numbers"):
        table.add_column(column, no_wrap=column == "name")
    now = time.time()
    for member in sorted(members, key=lambda m: m.name or ""):
        since = f"{max(0.0, now - member.since):.0f} s"
        numbers = Text("\n").join(Text(f"{name} {value}") for name, value in gauges(_gauges(member)))
        table.add_row(member.name or member.session, _does(member), since, numbers)
    for name in silent:
        table.add_row(name, Text(SILENT, style="red"), "", "")
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
