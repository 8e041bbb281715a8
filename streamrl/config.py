"""The configuration of a run: the parts' own structs, composed, and the checks that span several of them.

Imports without torch. Every key has a meaning that `streamrl config --explain` prints.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from streamrl_agents.config import RewardConfig, ToolFormatName
from streamrl_learners.algorithms.checks import reach
from streamrl_learners.algorithms.pieces import Algorithm, SoftOverlong
from streamrl_learners.config import LearnerConfig, ModelConfig, TinyModel, problems
from streamrl_producers.config import EmbeddedEngine, EngineConfig, RolloutConfig, SGLangEngine
from streamrl_queue.bounds import COUNT, PROCESSES, SECONDS, Range, check_bounds
from streamrl_queue.config import MOST_MEMBERS, Flow, QueueConfig, training_flow
from streamrl_queue.errors import ConfigError

from .settings import apply_override, build, parse_yaml, plain, set_value, to_yaml
from .tracking import Tracker


class TasksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tasks a run plays."""

    group_size: int = 8
    """Attempts at each training task; their mean reward is the baseline of the group."""
    eval_rows: int = 128
    """Tasks of each evaluation, one greedy attempt each; 0 evaluates nothing."""
    sampler: str | None = None
    """`module:function` or `file.py:function` that samples one task from a random.Random. Without it the
    environment's own `task` is used."""

    def __post_init__(self) -> None:
        check_bounds(self, "tasks", {"group_size": (1, MOST_MEMBERS), "eval_rows": (0, COUNT[1])})


_SUPERVISION_BOUNDS: Final[dict[str, Range]] = {
    "restarts": (0, COUNT[1]),
    "window_seconds": SECONDS,
    "start_seconds": SECONDS,
    "warm_start_seconds": SECONDS,
    "drain_seconds": (0, SECONDS[1]),
    "max_lost_share": (0, 1),
    "silent_seconds": (1, SECONDS[1]),
    "eval_seconds": SECONDS,
}


class SupervisionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How patient the run is with its processes."""

    restarts: int = 5
    """Restarts of each producer, engine and scorer that a signal killed, within `window_seconds`; one more ends the
    run. A process that raised an error is not restarted."""
    window_seconds: float = 600.0
    """A restart older than this is forgotten."""
    start_seconds: float = 120.0
    """Within this time after the start every role must have reported to the queue."""
    warm_start_seconds: float = 900.0
    """Within this time the learner must have published its first weights."""
    drain_seconds: float = 15.0
    """After a SIGTERM or Ctrl-C, and at the end of a run, a role gets this long to finish before it is killed."""
    max_lost_share: float = 0.5
    """The run ends with an error when more than this share of the training rows that ended was dropped or died."""
    silent_seconds: float = 30.0
    """A process that runs, but has had no session at the queue for this long after it had one, is killed; then the
    same follows as for any process that a signal killed."""
    eval_seconds: float = 120.0
    """Longest time without a finished row during an evaluation."""

    def __post_init__(self) -> None:
        check_bounds(self, "supervision", _SUPERVISION_BOUNDS)


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run."""

    name: str = "run"
    """Name of the run, and of its directory."""
    runs: str = "runs"
    """Directory that holds the run directories."""
    seed: int = 0
    """Seed of tasks, sampling and initial weights."""
    env: str
    """The environment: `module:Name` or `path/to/file.py:Name`, a class whose public methods are tools or an async
    function."""
    tool_format: ToolFormatName = "auto"
    """How the model writes tool calls: `hermes` (Qwen too), `llama3_json`, `pythonic`, `mistral`, `deepseek`, or `json`
    without any marks. `auto` reads it off the chat template."""
    producers: int = 1
    """Processes that play episodes."""
    scorers: int = 1
    """Processes that compute rewards and advantages."""
    tasks: TasksConfig = TasksConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    engine: EngineConfig = EmbeddedEngine()
    queue: QueueConfig = QueueConfig()
    algorithm: Algorithm = Algorithm()
    model: ModelConfig = TinyModel()
    learner: LearnerConfig = LearnerConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    tracking: tuple[Tracker, ...] = ()
    """Experiment trackers beside `metrics.jsonl`: a list of `{kind: tensorboard | wandb | mlflow, ...}`."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w][\w.-]*", self.name):
            raise ConfigError(f"name: expected letters, digits, '.', '_' or '-', got {self.name!r}")
        check_bounds(self, "", {"producers": PROCESSES, "scorers": PROCESSES})


def check(config: RunConfig) -> RunConfig:
    """`config` itself, when its parts fit together.

    Raises:
        ConfigError: a contradiction, with the names of both keys and what to change.
    """
    for problem in _contradictions(config):
        raise ConfigError(problem)
    return config


def _contradictions(config: RunConfig) -> Iterator[str]:
    rows, group, stale = config.learner.rows_per_step, config.tasks.group_size, config.queue.max_staleness
    yield from problems(config.algorithm, config.learner, config.model, max_staleness=stale, group_size=group)
    if config.queue.on_stale != "keep":
        yield from reach(config.algorithm, max_lag=stale)
    elif not config.algorithm.correction.corrects:
        yield (
            f"algorithm.correction: {tag(config.algorithm.correction)} with queue.on_stale: keep: rows of older "
            "policies would be trained as if they were fresh; use another correction (streamrl algorithms lists them), "
            "or on_stale wait or drop"
        )
    length = config.algorithm.length
    if isinstance(length, SoftOverlong) and length.max_tokens - length.buffer_tokens >= config.rollout.max_tokens:
        free = length.max_tokens - length.buffer_tokens
        yield (
            f"algorithm.length: soft_overlong takes nothing off rows of up to {free} tokens, but rollout.max_tokens "
            f"is {config.rollout.max_tokens}: it would never act; lower algorithm.length.max_tokens"
        )
    if config.queue.waiting_rows < rows:
        yield (
            f"queue.waiting_rows is {config.queue.waiting_rows} but learner.rows_per_step is {rows}: "
            f"the queue would be full before a step is; raise queue.waiting_rows"
        )
    if config.queue.waiting_rows < config.tasks.eval_rows:
        yield (
            f"queue.waiting_rows is {config.queue.waiting_rows} but tasks.eval_rows is {config.tasks.eval_rows}: "
            f"an evaluation would not fit; raise the first or lower the second"
        )
    if config.queue.partial_members is not None and config.queue.partial_members >= group:
        yield (
            f"queue.partial_members is {config.queue.partial_members} but tasks.group_size is {group}: a group has no "
            f"stragglers when all its members must be there; lower the first, or unset it and queue.straggler_seconds"
        )
    if config.rollout.max_tokens > config.engine.max_tokens:
        yield (
            f"rollout.max_tokens is {config.rollout.max_tokens} but engine.max_tokens is "
            f"{config.engine.max_tokens}: the engine could not hold such a row; lower the first or raise the second"
        )
    if config.learner.min_engines > config.engine.count:
        yield (
            f"learner.min_engines is {config.learner.min_engines} but engine.count is {config.engine.count}: "
            f"no weights could ever be published"
        )
    device, transfer = config.learner.device, config.learner.transfer
    nccl = transfer == "nccl" or (transfer == "auto" and device == "cuda")
    if nccl and "cpu" in (device, config.engine.device):
        yield (
            f"learner.transfer is {transfer}, learner.device {device} and engine.device {config.engine.device}: NCCL "
            f"carries weights between GPUs only; use learner.transfer=gloo"
        )
    if isinstance(config.engine, SGLangEngine) and (config.rollout.top_p < 1 or config.rollout.top_k):
        yield (
            f"rollout.top_p is {config.rollout.top_p} and rollout.top_k {config.rollout.top_k}, but engine.kind is "
            "sglang: its log-probs are those before top-p and top-k; use top_p=1 and top_k=0, or engine.kind: embedded"
        )
    if nccl and not isinstance(config.engine, EmbeddedEngine):
        yield (
            f"learner.transfer is {transfer} and learner.device {device}, but engine.kind is {tag(config.engine)}: "
            "weights reach a server's engine process by Gloo; use learner.transfer=gloo"
        )
    if config.rollout.temperature <= 0:
        yield (
            f"rollout.temperature is {config.rollout.temperature} but tasks.group_size is {group}: greedy attempts "
            f"at one task are all alike and teach nothing; use rollout.temperature=1.0"
        )
    if isinstance(config.model, TinyModel) and config.engine.max_tokens > config.model.max_positions:
        yield (
            f"engine.max_tokens is {config.engine.max_tokens} but model.max_positions is "
            f"{config.model.max_positions}: the model has no positions for such a row"
        )


def tag(struct: msgspec.Struct) -> str:
    """The kind of a member of a tagged union."""
    return str(struct.__struct_config__.tag)


Overrides = Sequence[str] | Mapping[str, Any]
"""`key.sub=value` each, the value in YAML; or values by dotted key."""


def resolve(data: Mapping[str, Any], overrides: Overrides = (), *, name: str | None = None) -> RunConfig:
    """The configuration that nested mappings, dotted overrides and a name come to, checked.

    Raises:
        ConfigError: an unknown key, a wrong value, or a contradiction.
    """
    merged = copy.deepcopy(dict(data))
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: expected a list of key.sub=value or a mapping, got {overrides!r}")
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            set_value(merged, key, copy.deepcopy(value), f"override {key}")
    else:
        for override in overrides:
            apply_override(merged, override)
    if name is not None:
        merged["name"] = name
    return check(build(RunConfig, merged))


def load_file(path: Path, overrides: Overrides = (), *, name: str | None = None) -> RunConfig:
    """The configuration in a YAML file; see `resolve`."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    data = parse_yaml(text, str(path)) or {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values at the top, got {type(data).__name__}")
    return resolve({"name": path.stem, **data}, overrides, name=name)


def flow_of(config: RunConfig) -> Flow:
    """The stages and bounds of the run's queue."""
    fewest = 2 if config.algorithm.advantage.compares else 1
    return training_flow(config.queue, rows_per_step=config.learner.rows_per_step, min_group_members=fewest)


def find_file(name: str | None) -> Path:
    """The configuration file of that name: as a path, else below `configs/` here, else one shipped with streamrl.

    Without a name, the demo's.

    Raises:
        ConfigError: naming the shipped configurations.
    """
    if name is not None and Path(name).is_file():
        return Path(name)
    file = f"{Path(name or 'demo').stem}.yaml"
    places = [Path("configs"), *_shipped()]
    for place in places if name is None or name in (file, Path(file).stem, f"configs/{file}") else ():
        if (place / file).is_file():
            return place / file
    shipped = sorted({path.stem for place in places for path in place.glob("*.yaml")})
    raise ConfigError(f"--config {name}: there is no such file; shipped with streamrl: {', '.join(shipped)}")


def _shipped() -> tuple[Path, ...]:
    """In an installed wheel beside this module, in a checkout at its top."""
    here = Path(__file__).parent
    return (here / "configs", here.parent / "configs")


__all__ = ["RunConfig", "check", "find_file", "flow_of", "load_file", "plain", "resolve", "tag", "to_yaml"]
