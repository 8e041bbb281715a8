"""What can be known to fail before anything is started: the user's own code, the model's files, the devices."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from streamrl_agents.agent import load_agent, load_object, place_of
from streamrl_agents.rewards import OUTCOME
from streamrl_agents.template import ChatTemplate
from streamrl_learners.config import HFModel
from streamrl_producers.config import EmbeddedEngine
from streamrl_producers.engines import process
from streamrl_queue.errors import ConfigError
from streamrl_queue.keys import find_key
from streamrl_queue.metrics import check_metrics

from ..base_model import model_weights
from ..config import RunConfig
from .coordinator import task_source
from .rundir import RunDirectory


def check(config: RunConfig, run: RunDirectory) -> None:
    """All of it, for a launch into `run`.

    Raises:
        ConfigError: naming the key, and the line of the user's code.
    """
    check_inputs(config, run)
    check_devices(config)
    check_server(config)


def check_inputs(config: RunConfig, run: RunDirectory) -> None:
    """Environment, tasks, reward functions and, unless the run has its base, the model directory. Samples one task.

    Raises:
        ConfigError: naming the key, and the line of the user's code.
    """
    with _field("queue.key_file"):
        find_key(config.queue.key_file)
    if config.queue.metrics is not None:
        with _field("queue.metrics"):
            check_metrics(config.queue.metrics)
    with _field("env"):
        agent = load_agent(config.env)
    with _field("tasks.sampler" if config.tasks.sampler else "env"):
        _check_task(config)
    for part in config.reward.parts:
        with _field("reward.parts"):
            if part != OUTCOME and not callable(load_object(part)):
                raise ConfigError(f"{part}: expected a function, got {type(load_object(part)).__name__}")
    if isinstance(config.model, HFModel) and not (run.base / "config.json").exists():
        model_weights(Path(config.model.path))
        with _field("model.path"):
            form, tools = config.tool_format, bool(agent.tools)
            template = ChatTemplate.load(config.model.path, tool_format=form, tools=tools)
        if agent.tools:
            template.needed_tool_format(agent.name)


def check_server(config: RunConfig) -> None:
    """The inference server that this run would start is installed, and what talks to it.

    Raises:
        ConfigError: with the command that installs it.
    """
    if isinstance(config.engine, EmbeddedEngine):
        return
    if importlib.util.find_spec("httpx2") is None:
        raise ConfigError(
            f"engine.kind: {config.engine.kind} needs httpx2, which this Python does not have; "
            "pip install 'streamrl[engines]'"
        )
    if not config.engine.urls:
        process.command(config.engine, Path(), 0)


def check_devices(config: RunConfig) -> None:
    """Imports torch only when something else than the CPU is asked for.

    Raises:
        ConfigError: this machine lacks a device; names the key.
    """
    asked = {"learner.device": config.learner.device, "engine.device": config.engine.device}
    for key, name in asked.items():
        if name != "cpu":
            _check_device(key, name)


def _check_device(key: str, name: str) -> None:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{key}: expected cpu, cuda or cuda:0, got {name!r}") from None
    # Counts without initialising CUDA, which would cost this process memory on the device.
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"{key}: {name}, but torch {torch.__version__} finds {count} CUDA devices here; use {key}=cpu"
        )


@contextmanager
def _field(key: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _check_task(config: RunConfig) -> None:
    source = task_source(config, "train")
    what = config.tasks.sampler or f"{config.env}: its task"
    try:
        task = source[0].task
        encoded = isinstance(task, dict) and msgspec.json.encode(task)
    except ConfigError:
        raise
    except Exception as error:  # supervision edge: the sampler is the user's code
        raise ConfigError(f"{what}(rng): expected a dict of JSON values, but it failed: {place_of(error)}") from error
    if not encoded:
        raise ConfigError(f"{what}(rng): expected a dict of JSON values, got {type(task).__name__}")
