"""One run from beginning to end: prepare its directory, start the roles, conduct, drain, sum up.

Everything runs below one nursery; the first error ends the run, and no process outlives it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from rich.console import Console

from streamrl_agents.agent import load_agent
from streamrl_queue import Statistics, TransferQueue
from streamrl_queue.errors import DeadlineExceeded, NoProgress, StreamRLError
from streamrl_queue.keys import find_key

from ..base_model import write_base
from ..config import RunConfig, flow_of, load_file, plain, resolve
from ..inspect.queues import stand
from ..tracking import tracking
from . import plan, preflight, rundir, summary
from .chain import told as links_told
from .coordinator import Coordinator
from .counts import conservation
from .failure import LastWords, first_error
from .losses import account, calls_in, lives_in, losses_in
from .panel import Panel, open_panel
from .rundir import Launch, RunDirectory
from .summary import conservation_table
from .supervisor import Role, Supervisor, supervisor


class Interrupted(Exception):
    """A signal asked the run to end; `number` is the signal."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class _Signals:
    """First signal: drain. Second, or a first one before there is anything to drain: kill everything and leave."""

    def __init__(self, roles: Supervisor, panel: Panel) -> None:
        self.first: int | None = None
        self.work: trio.CancelScope | None = None
        self._roles = roles
        self._panel = panel

    async def listen(self, task_status: trio.TaskStatus[None]) -> None:
        """Consumes SIGINT and SIGTERM, produces a drain, then the end. Waits for, and is unblocked by, a signal."""
        if threading.current_thread() is not threading.main_thread():
            task_status.started()
            return
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if self.work is None or self.first is not None:
                    self._roles.kill_all()
                    raise Interrupted(number)
                self.first = number
                self._panel.note(f"{signal.Signals(number).name}: draining; once more to stop at once")
                self.work.cancel()


async def conduct(
    config: RunConfig, run: RunDirectory, *, resume: bool, console: Console
) -> tuple[summary.Summary, int | None]:
    """Run to the end; returns the summary and the signal that ended the run early, if one did."""
    started, cpu = time.monotonic(), _cpu_seconds()
    with (
        run.owned(),
        rundir.socket_directory() as sockets,
        open_panel(console, run.path.name, run.logs / "coordinator.log") as panel,
        tracking(config.tracking, run.path, plain(config)) as sinks,
    ):
        launched = _prepare(config, run, sockets, resume)
        coordinator: Coordinator | None = None
        try:
            async with _started(config, run, launched, panel) as (coordinator, signals):
                coordinator.sinks = sinks
                await _work(coordinator, signals)
        except BaseExceptionGroup as group:
            raise _told(first_error(group), run, coordinator, console) from group
        ended_by = signals.first
        assert coordinator.statistics is not None
        if ended_by is not None:
            summary.plot(run)
        restarts = {r.spec.name: r.starts - 1 for r in coordinator.roles.roles.values() if r.starts > 1}
        result = summary.summarise(
            run,
            outcome=rundir.FINISHED if ended_by is None else f"interrupted by {signal.Signals(ended_by).name}",
            seconds=time.monotonic() - started,
            cpu_seconds=_cpu_seconds() - cpu,
            engine_idle=coordinator.engine_idle(),
            restarts=restarts,
            conservation=conservation(coordinator.statistics),
            resumed=resume,
            calls=coordinator.calls(),
        )
    summary.save(run, result)
    return result, ended_by


def _told(error: BaseException, run: RunDirectory, coordinator: Coordinator | None, console: Console) -> BaseException:
    """The error that ends the run, with what may lie behind it; left for `status`, below the rows of the run."""
    if not isinstance(error, Exception) or isinstance(error, Interrupted):
        return error
    if coordinator is not None and (counts := _last_counts(coordinator)) is not None:
        if counts.tasks:
            console.print(conservation_table(conservation(counts)))
        lives = lives_in(run.journal, flow_of(coordinator.config))
        losses, calls = (losses_in(lives), calls_in(lives)) if lives else (None, coordinator.calls())
        told = account(counts, losses, calls)
        if isinstance(error, NoProgress):
            error = NoProgress(told)
        elif _ran_dry(error, coordinator):
            chain = [f"who waited for whom: {links_told(coordinator.links)}"] if coordinator.links else []
            error = type(error)("\n".join([str(error), *chain, *([told] if told else [])]))
    LastWords.of(error).write(last_words(run))
    return error


def _last_counts(coordinator: Coordinator) -> Statistics | None:
    """Where the rows are now that every process is gone; as they were last seen when the journal cannot tell."""
    try:
        return stand(coordinator.run.journal, flow_of(coordinator.config)).statistics()
    except StreamRLError:
        return coordinator.statistics


def _ran_dry(error: Exception, coordinator: Coordinator) -> bool:
    """Whether a role found nothing to learn, or waited in vain: the reason lies elsewhere."""
    words = [LastWords.read(role.spec.last_words) for role in coordinator.roles.roles.values()]
    names = {NoProgress.__name__, DeadlineExceeded.__name__}
    return isinstance(error, DeadlineExceeded) or any(w is not None and w.error in names for w in words)


def last_words(run: RunDirectory) -> Path:
    """Where the error lies that ended the run."""
    return run.logs / "coordinator.error"


def _prepare(config: RunConfig, run: RunDirectory, sockets: Path, resume: bool) -> Launch:
    rundir.prepare(run, config)
    run.summary.unlink(missing_ok=True)
    last_words(run).unlink(missing_ok=True)
    write_base(config, load_agent(config.env), run.base)
    launched = Launch(
        address=f"ipc://{sockets}/queue",
        sockets=str(sockets),
        pid=os.getpid(),
        resume=resume,
        ranks=f"127.0.0.1:{_free_port()}" if config.learner.ranks > 1 else None,
    )
    run.write_launch(launched)
    return launched


@asynccontextmanager
async def _started(
    config: RunConfig, run: RunDirectory, launched: Launch, panel: Panel
) -> AsyncIterator[tuple[Coordinator, _Signals]]:
    """A coordinator with all its roles started: the broker first, then the others at once."""
    coordinator: Coordinator | None = None

    async def died(role: Role, again: bool) -> None:
        if again:
            panel.note(f"{role.spec.name} (pid {role.pid}) was killed; started again")
            # A broker that is gone cannot be told anything; it holds no leases.
            if coordinator is not None and role.spec.name != plan.QUEUE:
                await coordinator.forget(role.spec.name)

    async with supervisor(died) as roles:
        signals = _Signals(roles, panel)
        await roles.nursery.start(signals.listen)
        broker, *others = plan.role_specs(config, run)
        roles.start(broker)
        for spec in others:
            roles.start(spec)
        connection = TransferQueue.connect(
            launched.address,
            key=find_key(config.queue.key_file),
            role="coordinator",
            name="coordinator",
            deadline=config.supervision.start_seconds,
        )
        async with connection as queue:
            if launched.resume:
                await queue.release_absent()
            with queue.waiting("starting") as wait:
                coordinator = Coordinator(config, run, queue, roles, panel, wait)
                yield coordinator, signals
        await roles.stop([roles.roles["queue"]], config.supervision.drain_seconds)
        roles.nursery.cancel_scope.cancel()


async def _work(coordinator: Coordinator, signals: _Signals) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(coordinator.watch)
        with trio.CancelScope() as signals.work:
            await coordinator.train()
        finished = signals.first is None
        async with trio.open_nursery() as ending:
            if finished:
                # Importing matplotlib takes as long as the roles take to end.
                ending.start_soon(trio.to_thread.run_sync, summary.plot, coordinator.run)
            await coordinator.drain(finished=finished)
        nursery.cancel_scope.cancel()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def launch(config: RunConfig, run: RunDirectory, *, resume: bool, console: Console) -> int:
    """Run from the command line: shows the summary; returns the exit code.

    0 finished or drained after Ctrl-C, 143 drained after SIGTERM, 130 or 143 stopped at once.
    """
    try:
        result, ended_by = _trio_run(config, run, resume, console)
    except KeyboardInterrupt:
        return 130
    except Interrupted as stop:
        console.print(f"stopped at once; continue with: streamrl launch --resume --name {run.path.name}")
        return 128 + stop.number
    summary.show(result, console)
    if ended_by is not None:
        console.print(f"continue with: streamrl launch --resume --name {run.path.name}", soft_wrap=True)
    return 143 if ended_by == signal.SIGTERM else 0


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    name: str | None = None,
    resume: bool = False,
    console: Console | None = None,
) -> summary.Summary:
    """Train, and return how it went: the same as `streamrl launch`, from Python.

    `config` is a RunConfig, nested mappings with the same keys, or a YAML file. `overrides` go on top: dotted keys with
    their values, or `key.sub=value` as on the command line. Without a `console` nothing is printed. A signal that ends
    the run early is in the summary's `outcome`.

    Raises:
        ConfigError: before anything is started.
        StreamRLError: the first error of the run, by name.
    """
    if isinstance(config, str | Path):
        config = load_file(Path(config), overrides, name=name)
    else:
        config = resolve(config if isinstance(config, Mapping) else plain(config), overrides, name=name)
    directory, _ = rundir.choose(config, resume=resume, named=name is not None)
    silent = console or Console(quiet=True)
    result, _ = _trio_run(directory.configured(config), directory, resume, silent)
    return result


def _trio_run(
    config: RunConfig, run: RunDirectory, resume: bool, console: Console
) -> tuple[summary.Summary, int | None]:
    async def main() -> tuple[summary.Summary, int | None]:
        return await conduct(config, run, resume=resume, console=console)

    plan.require_installed()
    preflight.check(config, run)
    try:
        return trio.run(main)
    except BaseExceptionGroup as group:
        raise first_error(group) from group
