"""Metrics to experiment trackers, beside `metrics.jsonl`, which is always written.

A tracker is imported when it is asked for; one that is not installed is a configuration error that says what to
install.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from streamrl_queue.errors import ConfigError


class TensorBoard(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="tensorboard"
):
    """TensorBoard event files in the run directory."""


class WandB(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="wandb"):
    """Weights & Biases."""

    project: str = "streamrl"
    """Project that the run appears in."""
    mode: str = "offline"
    """`offline` writes below the run directory, `online` sends."""


class MLflow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="mlflow"):
    """MLflow."""

    experiment: str = "streamrl"
    """Experiment that the run appears in."""
    uri: str | None = None
    """Tracking server; nothing means a SQLite file in the run directory."""


Tracker = TensorBoard | WandB | MLflow


class Sink(Protocol):
    """Where numbers go: one call per step."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def _require(module: str, tracker: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracking: {tracker} needs the module {error.name or module}, which is not installed; "
            f"pip install 'streamrl[tracking]', or leave {tracker} out of tracking"
        ) from None


class _TensorBoardSink:
    def __init__(self, run: Path) -> None:
        _require("tensorboard", "tensorboard")
        self._writer = _require("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandBSink:
    def __init__(self, tracker: WandB, run: Path, config: Mapping[str, Any]) -> None:
        wandb = _require("wandb", "wandb")
        self._run = wandb.init(
            project=tracker.project, name=run.name, dir=str(run), mode=tracker.mode, config=dict(config)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflowSink:
    def __init__(self, tracker: MLflow, run: Path, config: Mapping[str, Any]) -> None:
        mlflow = _require("mlflow", "mlflow")
        uri = tracker.uri or f"sqlite:///{run / 'mlflow.db'}"
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(tracker.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(tracker.experiment)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        for key, value in config.items():
            self._client.log_param(self._id, key, str(value)[:500])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _open(tracker: Tracker, run: Path, config: Mapping[str, Any]) -> Sink:
    if isinstance(tracker, TensorBoard):
        return _TensorBoardSink(run)
    if isinstance(tracker, WandB):
        return _WandBSink(tracker, run, config)
    return _MLflowSink(tracker, run, config)


@contextmanager
def tracking(trackers: Sequence[Tracker], run: Path, config: Mapping[str, Any]) -> Iterator[Sequence[Sink]]:
    """The sinks for `trackers`, closed afterwards.

    Raises:
        ConfigError: a tracker's package is not installed; names the extra.
    """
    with ExitStack() as stack:
        sinks = []
        for tracker in trackers:
            sink = _open(tracker, run, config)
            stack.callback(sink.close)
            sinks.append(sink)
        yield sinks
