"""Experiment trackers: what they are told, and what a missing package says."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from streamrl.tracking import MLflow, TensorBoard, Tracker, WandB, tracking
from streamrl_queue.errors import ConfigError


@pytest.mark.parametrize("tracker", [TensorBoard(), WandB(), MLflow()])
def test_a_tracker_that_is_not_installed_is_refused_with_the_extra_to_install(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'streamrl\[tracking\]', or leave"),
        tracking([tracker], tmp_path, {}),
    ):
        pass


class FakeWandB(types.ModuleType):
    """Has the two calls of wandb that are used, with their signatures."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def init(self, *, project: str, name: str, dir: str, mode: str, config: dict[str, Any]) -> FakeWandB:
        self.begun = {"project": project, "name": name, "dir": dir, "mode": mode, "config": config}
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_a_tracker_gets_the_configuration_each_step_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = tmp_path / "first"
    with tracking([WandB(project="tools")], run, {"seed": 3}) as sinks:
        for sink in sinks:
            sink.log(1, {"reward_mean": 0.5})
    assert fake.begun == {
        "project": "tools",
        "name": "first",
        "dir": str(run),
        "mode": "offline",
        "config": {"seed": 3},
    }
    assert fake.logged == [(1, {"reward_mean": 0.5})]
    assert fake.finished
