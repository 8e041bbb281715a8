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
from ..settings import differences, plain, to_yaml

FINISHED: Final = "finished"
"""The outcome of a run that trained all its steps."""

CHANGEABLE: Final = (
    "learner.steps",
    "producers",
    "scorers",
    "engine.count",
    "engine.urls",
    "engine.python",
    "engine.start_seconds",
    "supervision",
    "tracking",
    "learner.checkpoint_every",
    "learner.keep_checkpoints",
    "queue.key_file",
    "queue.metrics",
)
"""Keys that a resumed run may have other values of: what was trained so far does not depend on them."""


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
        with _usable(self.path):
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

    def refuse_if_alive(self, advice: str = "give this one another --name") -> None:
        """Raises ConfigError, with the owner's process id, when some process holds this directory."""
        if self.alive:
            raise ConfigError(f"{self.path} belongs to a run that is alive (pid {self.lock.read_text()}); {advice}")

    def configured(self, config: RunConfig) -> RunConfig:
        """`config` under the run's name."""
        return msgspec.structs.replace(config, name=self.path.name)

    def read_launch(self) -> Launch:
        """Raises ConfigError when no process of this run is alive."""
        if not self.launch.exists():
            raise ConfigError(f"{self.path} has no running processes (no {self.launch.name})")
        return msgspec.json.decode(self.launch.read_bytes(), type=Launch)

    def write_launch(self, launch: Launch) -> None:
        write_atomically(self.launch, msgspec.json.format(msgspec.json.encode(launch)))

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Hold this directory: a second launch into it is refused while the first lives.

        A directory that was made here goes away again when no `launch.json` was written: then no role was started,
        and the name stays free.
        """
        with _usable(self.path):
            made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            file = self.lock.open("a+")
        with file as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.refuse_if_alive()
                raise ConfigError(f"{self.path} was taken by another run just now; try again") from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            try:
                yield
            finally:
                if made and not self.launch.exists():
                    shutil.rmtree(self.path)
                self.launch.unlink(missing_ok=True)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"runs: {path} cannot be used: {error.strerror}; name a directory that can be written with runs=DIRECTORY"
        ) from None


def write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old file or the whole of the other, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    partial.replace(path)


def to_resume(config: RunConfig, *, named: bool) -> RunDirectory:
    """The run that `resume` means: the one of that name, or the newest of them when nobody asked for the name.

    Raises:
        ConfigError: there is none, or it is alive.
    """
    run = RunDirectory(Path(config.runs) / config.name)
    run = run if named else _newest(config, run)
    if not run.exists:
        raise ConfigError(f"--resume: there is no run in {run.path}; leave --resume out to start one")
    run.refuse_if_alive("it needs no --resume, or end it first")
    return run


def choose(config: RunConfig, *, resume: bool, named: bool) -> tuple[RunDirectory, str | None]:
    """The directory for this run, and a sentence for the user when it is not the plain `runs/<name>`.

    `named` says that the user asked for this name: a name that nobody asked for moves on to the next free one when
    its run has ended or is alive, and means the newest of them for `resume`.

    Raises:
        ConfigError: the directory belongs to a run that is alive, to another run, or to the same one and `resume` was
            not asked for; or there is nothing to resume.
    """
    if resume:
        run = to_resume(config, named=named)
        refuse_change(run, config)
        return run, None
    run = RunDirectory(Path(config.runs) / config.name)
    if not run.exists:
        return run, None
    if not named and (run.alive or run.outcome is not None):
        free = _next_free(config)
        what = "is alive" if run.alive else f"was {run.outcome}"
        return free, f"{run.path} has a run that {what}; this one goes to {free.path}"
    run.refuse_if_alive()
    refuse_difference(run, config)
    raise ConfigError(f"{run.path} has a run of the same configuration; use --resume to continue it, or another --name")


def refuse_difference(run: RunDirectory, config: RunConfig) -> None:
    """Raises ConfigError naming the first key in which the run's own configuration differs."""
    for key, there, here in differences(_comparable(load_file(run.config)), _comparable(config)):
        raise ConfigError(
            f"{run.path} belongs to another run: its {key} is {there!r}, yours is {here!r}; "
            f"use its configuration with --resume, or another --name"
        )


def refuse_change(run: RunDirectory, config: RunConfig) -> None:
    """Whether the run can go on as `config`.

    Raises:
        ConfigError: all its steps are trained, or a key differs that may not change.
    """
    own = load_file(run.config)
    for key, there, here in differences(_comparable(own), _comparable(config)):
        if not any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE):
            raise ConfigError(
                f"--resume: {key} is {there!r} in {run.path} and cannot become {here!r}; leave it out, or start a run "
                f"of another --name (what may change: {', '.join(CHANGEABLE)})"
            )
    steps = own.learner.steps
    if config.learner.steps < steps:
        raise ConfigError(
            f"--resume: learner.steps is {steps} in {run.path} and can only grow, got {config.learner.steps}"
        )
    if run.outcome == FINISHED and config.learner.steps == steps:
        raise ConfigError(
            f"--resume: the run in {run.path} has trained all its {steps} steps; "
            f"let it go on with learner.steps={2 * steps}, or start one of another --name"
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
