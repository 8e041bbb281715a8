"""Which processes a configuration comes to."""

from __future__ import annotations

import importlib.util
import sys

from streamrl_queue.errors import ConfigError

from ..config import RunConfig
from .rundir import RunDirectory
from .supervisor import RoleSpec

NEEDED = ("torch", "transformers", "tokenizers", "safetensors")
"""What the learner and engines import."""


def require_installed() -> None:
    """Raises ConfigError when a package that the roles of this machine need is missing, with the command to get it."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"engines and the learner need {', '.join(missing)}, which this Python does not have; "
            f"pip install 'streamrl[train]'"
        )


QUEUE = "queue"
"""The broker's name."""


def learner_names(config: RunConfig) -> tuple[str, ...]:
    return tuple(f"learner-{rank}" for rank in range(config.learner.ranks))


def role_names(config: RunConfig) -> tuple[str, ...]:
    """All roles, in the order in which they are started."""
    counts = {"engine": config.engine.count, "producer": config.producers, "scorer": config.scorers}
    workers = (f"{kind}-{i}" for kind, count in counts.items() for i in range(count))
    return (QUEUE, *learner_names(config), *workers)


def role_specs(config: RunConfig, run: RunDirectory) -> tuple[RoleSpec, ...]:
    """How to start each role, and what its supervisor forgives."""
    return tuple(_spec(name, config, run) for name in role_names(config))


def _spec(name: str, config: RunConfig, run: RunDirectory) -> RoleSpec:
    kind = name.rpartition("-")[0]
    threads = {"learner": config.learner.threads, "engine": config.engine.threads}.get(kind, 1)
    return RoleSpec(
        name=name,
        command=(sys.executable, "-m", "streamrl.runtime.role", name, "--run", str(run.path)),
        log=run.logs / f"{name}.log",
        restarts=config.supervision.restarts if _is_restarted(name, config) else 0,
        window=config.supervision.window_seconds,
        # The leading rank serves joining engines until it is told to stop; the others end before it.
        ends=kind == "learner" and name != "learner-0",
        # Libraries size their thread pools when they are loaded, before any setting of ours could reach them.
        environment={"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"},
    )


def _is_restarted(name: str, config: RunConfig) -> bool:
    """Workers hold nothing; the broker stands where its journal stood, unless that was in memory."""
    if name == QUEUE:
        return config.queue.durability != "memory"
    return name.rpartition("-")[0] in ("engine", "producer", "scorer")
