"""The run directory: who owns it, what is in it, and where the sockets of its processes lie.

runs/<name>/
  config.yaml     the resolved configuration
  launch.json     the live run: broker address, process id; gone when the run has ended
  base/           tokenizer, chat template and model configuration that the run starts from
  journal/        the queue's journal
  checkpoints/    the learner's checkpoints
  model/          the trained model in Hugging Face's format
  logs/           one log per role
  metrics.jsonl   one line per step and per evaluation
  summary.json    what the run came to; there once it has ended in order
  reward.png      sampled reward by step, with the evaluations
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from streamrl_queue.errors import ConfigError

from ..config import RunConfig, load_file
from ..settings import first_difference, plain, to_yaml

FINISHED: Final = "finished"
"""The outcome of a run that trained all its steps."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How the processes of a live run find each other."""

    address: str
    sockets: str
    pid: int
    resume: bool = False
    # `host:port` at which learner ranks meet; None for a single rank.
    ranks: str | None = None


class RunDirectory:
    """Paths of one run, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.config = self.path / "config.yaml"
        self.launch = self.path / "launch.json"
        self.base = self.path / "base"
        self.journal = self.path / "journal"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.logs = self.path / "logs"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.lock = self.path / ".lock"
        self.plot = self.path / "reward.png"

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def exists(self) -> bool:
        return self.config.exists()

    @property
    def outcome(self) -> str | None:
        """How the run ended, in its summary's words; None while it runs, or when it ended without a summary."""
        if not self.summary.exists():
            return None
        return str(msgspec.json.decode(self.summary.read_bytes())["outcome"])

    @property
    def alive(self) -> bool:
        """Whether some process holds this directory now."""
        if not self.lock.exists():
            return False
        with self.lock.open("r") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def configured(self, config: RunConfig) -> RunConfig:
        """The run's own configuration where it has one, else `config` under the run's name."""
        return load_file(self.config) if self.exists else msgspec.structs.replace(config, name=self.path.name)

    def read_launch(self) -> Launch:
        """Raises ConfigError when no process of this run is alive."""
        if not self.launch.exists():
            raise ConfigError(f"{self.path} has no running processes (no {self.launch.name})")
        return msgspec.json.decode(self.launch.read_bytes(), type=Launch)

    def write_launch(self, launch: Launch) -> None:
        write_atomically(self.launch, msgspec.json.format(msgspec.json.encode(launch)))

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Hold this directory: a second launch into it is refused while the first lives."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{self.path} belongs to a run that is alive; give this one another --name") from None
            try:
                yield
            finally:
                self.launch.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old file or the whole of the other, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    partial.replace(path)


def choose(config: RunConfig, *, resume: bool, named: bool, trust: bool = False) -> tuple[RunDirectory, str | None]:
    """The directory for this run, and a sentence for the user when it is not the plain `runs/<name>`.

    `named` says that the user asked for this name: a name that nobody asked for moves on to the next free one when
    its run has ended or is alive, and means the newest of them for `resume`. `trust` resumes with the run's own
    configuration, whatever `config` says.

    Raises:
        ConfigError: the directory belongs to another run, or to the same one and `resume` was not asked for.
    """
    run = RunDirectory(Path(config.runs) / config.name)
    if resume:
        run = run if named else _newest(config, run)
        if not run.exists:
            raise ConfigError(f"--resume: there is no run in {run.path}; leave --resume out to start one")
        if run.outcome == FINISHED:
            raise ConfigError(f"--resume: the run in {run.path} has trained all its steps; start one of another --name")
        if not trust:
            refuse_difference(run, config)
        return run, None
    if not run.exists:
        return run, None
    if not named and (run.alive or run.outcome is not None):
        free = _next_free(config)
        what = "is alive" if run.alive else f"was {run.outcome}"
        return free, f"{run.path} has a run that {what}; this one goes to {free.path}"
    refuse_difference(run, config)
    raise ConfigError(f"{run.path} has a run of the same configuration; use --resume to continue it, or another --name")


def refuse_difference(run: RunDirectory, config: RunConfig) -> None:
    """Raises ConfigError naming the first key in which the run's own configuration differs."""
    theirs, ours = _comparable(load_file(run.config)), _comparable(config)
    difference = first_difference(theirs, ours)
    if difference:
        key, there, here = difference
        raise ConfigError(
            f"{run.path} belongs to another run: its {key} is {there!r}, yours is {here!r}; "
            f"use its configuration with --resume, or another --name"
        )


def _comparable(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in plain(config).items() if key not in ("name", "runs")}


def _numbered(config: RunConfig, number: int) -> RunDirectory:
    return RunDirectory(Path(config.runs) / (config.name if number == 1 else f"{config.name}-{number}"))


def _next_free(config: RunConfig) -> RunDirectory:
    number = 2
    while _numbered(config, number).exists:
        number += 1
    return _numbered(config, number)


def _newest(config: RunConfig, first: RunDirectory) -> RunDirectory:
    newest, number = first, 2
    while _numbered(config, number).exists:
        newest, number = _numbered(config, number), number + 1
    return newest


def prepare(run: RunDirectory, config: RunConfig) -> None:
    """Write the resolved configuration; `owned` must be held."""
    write_atomically(run.config, to_yaml(config).encode())


@contextmanager
def socket_directory() -> Iterator[Path]:
    """A private directory (0700) for this run's sockets, gone afterwards.

    Not inside the run directory: the path of a Unix socket has at most 107 bytes.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = runtime if os.path.isdir(runtime) and os.access(runtime, os.W_OK) and len(runtime) < 60 else None
    path = tempfile.mkdtemp(prefix="streamrl-", dir=parent or ("/tmp" if os.path.isdir("/tmp") else None))
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
