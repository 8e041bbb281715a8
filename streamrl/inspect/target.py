"""What a person may name when they want to look at a queue: a run, a directory with a journal, or an address."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from streamrl_queue import audit
from streamrl_queue.config import Flow
from streamrl_queue.errors import ConfigError
from streamrl_queue.events import Configured, Event
from streamrl_queue.transport import ENCRYPTED

from ..runtime.alone import served_address
from ..runtime.rundir import RunDirectory

SCHEMES = ("tcp://", "ipc://", ENCRYPTED)


@dataclass(frozen=True)
class Target:
    """Where to look: `journal` is None for an address, `address` when no broker is running."""

    name: str
    journal: Path | None = None
    address: str | None = None
    run: RunDirectory | None = None

    def require_journal(self, what: str) -> Path:
        """Raises ConfigError when there is only an address."""
        if self.journal is None:
            raise ConfigError(f"{what}: needs the journal; give the run or the journal's directory, not {self.name}")
        return self.journal

    def require_address(self, what: str) -> str:
        """Raises ConfigError when no broker is running."""
        if self.address is None:
            raise ConfigError(f"{what}: no broker is running on {self.name}; start it first")
        return self.address

    def key_file(self) -> str | None:
        """The file of the queue's key, when the run's configuration names one."""
        if self.run is None:
            return None
        from ..config import load_file

        return load_file(self.run.config).queue.key_file

    def flow(self) -> Flow | None:
        """The stages that the journal's rows pass; None when it does not say."""
        if self.run is not None:
            from ..config import flow_of, load_file

            config = load_file(self.run.config)
            return flow_of(config)
        if self.journal is None:
            return None
        return known_flow(entry.event for entry in audit.events(self.journal))


def known_flow(events: Iterable[Event]) -> Flow | None:
    """The flow that the rows pass: the one that the journal's broker was given last. None when an event is lost."""
    flow = None
    for event in events:
        if isinstance(event, Configured):
            flow = event.flow
    return flow


def find(name: str) -> Target:
    """The target of that name.

    Raises:
        ConfigError: there is no such run and no such journal.
    """
    if name.startswith(SCHEMES):
        return Target(name, address=name)
    for path in (Path(name), Path("runs") / name):
        run = RunDirectory(path)
        if run.exists:
            return _run(name, run)
        if audit.exists(path) or served_address(path) is not None:
            parent = RunDirectory(path.resolve().parent)
            if parent.exists and parent.journal == path.resolve():
                return _run(name, parent)
            return Target(name, journal=path, address=served_address(path))
    raise ConfigError(f"{name}: expected a run, the directory of a journal, or an address like tcp://127.0.0.1:7001")


def _run(name: str, run: RunDirectory) -> Target:
    address = run.read_launch().address if run.alive and run.launch.exists() else None
    if not audit.exists(run.journal):
        raise ConfigError(
            f"{name}: {run.path} has no journal: the run has not put a task yet, or its queue.durability is memory, "
            "whose journal is gone with the run"
        )
    return Target(name, journal=run.journal, address=address, run=run)
