"""Checkpoints that exist whole or not at all.

    checkpoints/step-00000010/   files of torch.distributed.checkpoint: weights, optimiser moments
                   COMPLETE      written last: the step, and every file with its size

A directory without a COMPLETE that fits its files is a crash that was caught in the act: it is never read, and
replaced when its step is saved again. DCP unpickles its own metadata, so only the run's own directory is read.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .files import replace_file, sync
from .model import WEIGHTS, save_tensors
from .ranks import Ranks

MARKER: Final = "COMPLETE"
# What an export replaces by its own weights.
WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth")
WEIGHT_INDEX: Final = ".index.json"


class Complete(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The marker of a complete checkpoint. `files` maps names to sizes in bytes."""

    step: int
    files: dict[str, int]


class Checkpoints:
    """The checkpoints of one run. All methods are collective."""

    def __init__(self, directory: Path, keep: int, ranks: Ranks) -> None:
        self.directory = directory
        self._keep = keep
        self._ranks = ranks

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        found = complete_steps(self.directory)[-1:] if self._ranks.leads else []
        answer = self._ranks.share(found if self._ranks.leads else None)
        return answer[0] if answer else None

    def save(self, step: int, policy: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        """Write weights, moments and step; when this returns, all of it survives a power loss."""
        path = self._path(step)
        if self._ranks.leads:
            self._remove(path)
            path.mkdir(parents=True)
        self._ranks.barrier()
        with _alone_on_purpose():
            save(_state(policy, optimiser), checkpoint_id=path, no_dist=self._ranks.world == 1)
        if self._ranks.leads:
            _complete(path, step)
            for old in complete_steps(self.directory)[: -self._keep]:
                self._remove(self._path(old))
        self._ranks.barrier()

    def load(self, step: int, policy: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        """Put weights and moments back as they were after `step`, whatever the number of ranks was then."""
        state = _state(policy, optimiser)
        with _alone_on_purpose():
            load(state, checkpoint_id=self._path(step), no_dist=self._ranks.world == 1)
        set_state_dict(policy, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    @staticmethod
    def _remove(path: Path) -> None:
        """Delete a checkpoint; the marker goes first, so that half of it is never taken for all of it."""
        (path / MARKER).unlink(missing_ok=True)
        if path.exists():
            sync(path)
            shutil.rmtree(path)


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """DCP warns a process that works alone that it does, even when it was told so (`no_dist`)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def complete_steps(directory: Path) -> list[int]:
    """The steps of all complete checkpoints in `directory`, ascending."""
    found = (read_marker(path) for path in directory.glob("step-*"))
    return sorted(marker.step for marker in found if marker)


def read_marker(path: Path) -> Complete | None:
    """The marker of the checkpoint at `path`, when it is there and every file has the size that it tells."""
    try:
        marker = msgspec.json.decode((path / MARKER).read_bytes(), type=Complete)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    sizes = {name: (path / name).stat().st_size for name in marker.files if (path / name).exists()}
    return marker if sizes == marker.files else None


def _complete(path: Path, step: int) -> None:
    """Make the files of a checkpoint durable, then say so."""
    files = [file for file in path.rglob("*") if file.is_file()]
    for file in files:
        sync(file)
    sync(path)
    sync(path.parent)
    marker = Complete(step, {str(file.relative_to(path)): file.stat().st_size for file in files})
    replace_file(path / MARKER, msgspec.json.encode(marker))


def _state(policy: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    model, moments = get_state_dict(policy, optimiser)
    return {"model": model, "optimiser": moments}


def export(tensors: dict[str, torch.Tensor], source: Path, target: Path) -> None:
    """Write a model directory that `from_pretrained` reads: `tensors`, and the other files of `source`."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix not in WEIGHT_SUFFIXES and not file.name.endswith(WEIGHT_INDEX):
            shutil.copyfile(file, target / file.name)
    save_tensors(tensors, target / WEIGHTS)
