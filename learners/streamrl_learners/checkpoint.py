"""Checkpoints that exist whole or not at all.

    checkpoints/step-00000010/   files of torch.distributed.checkpoint: weights, optimiser moments
                   COMPLETE      written last: the step, and every file with its size and BLAKE3 digest

A directory without a COMPLETE that fits its files is a crash that was caught in the act, or damaged: it is never
read, and replaced when its step is saved again. Sizes tell which checkpoints are kept; a checkpoint to resume from
is read whole and must have its digests, or the one before it is taken. DCP unpickles its own metadata, so only the
run's own directory is read.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from blake3 import blake3
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from streamrl_queue.errors import ConfigError

from .files import replace_file, sync
from .model import WEIGHTS, save_tensors
from .ranks import Ranks

log: Final = logging.getLogger(__name__)

MARKER: Final = "COMPLETE"
# What an export replaces by its own weights.
WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth")
WEIGHT_INDEX: Final = ".index.json"


class Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one file of a checkpoint holds; `blake3` in hexadecimal."""

    bytes: int
    blake3: str


class Complete(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The marker of a complete checkpoint. `files` maps names to contents."""

    step: int
    files: dict[str, Content]


class Checkpoints:
    """The checkpoints of one run. All methods are collective."""

    def __init__(self, directory: Path, keep: int, ranks: Ranks) -> None:
        self.directory = directory
        self._keep = keep
        self._ranks = ranks

    def newest(self) -> int | None:
        """The step of the newest sound checkpoint: complete, and every byte as it was written.

        Names those that are newer and not sound in warnings.
        """
        found = self._newest_sound() if self._ranks.leads else []
        answer = self._ranks.share(found if self._ranks.leads else None)
        return answer[0] if answer else None

    def save(self, step: int, policy: nn.Module, optimiser: torch.optim.Optimizer) -> int:
        """Write weights, moments and step; when this returns, all of it survives a power loss.

        Returns the step of the oldest checkpoint that stays: rows of later steps are still needed to go on from it.
        """
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
        kept = complete_steps(self.directory)[:1] if self._ranks.leads else None
        return self._ranks.share(kept)[0]

    def forget_oldest(self) -> int | None:
        """Remove the oldest complete checkpoint, unless it is the only one; the step of the oldest that stays."""
        if self._ranks.leads:
            for old in complete_steps(self.directory)[:-1][:1]:
                self._remove(self._path(old))
        kept = self._ranks.share(complete_steps(self.directory)[:1] if self._ranks.leads else None)
        return kept[0] if kept else None

    def load(self, step: int, policy: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        """Put weights and moments back as they were after `step`, whatever the number of ranks was then.

        Raises:
            ConfigError: when they do not fit this model and optimiser, or torch cannot read them.
        """
        state = _state(policy, optimiser)
        with _alone_on_purpose(), _named(self._path(step)):
            load(state, checkpoint_id=self._path(step), no_dist=self._ranks.world == 1)
            set_state_dict(policy, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])

    def _newest_sound(self) -> list[int]:
        """One step, or none."""
        for path in sorted(self.directory.glob("step-*"), reverse=True):
            marker = read_marker(path)
            flaw = "is not complete" if marker is None else _flaw(path, marker)
            if marker is not None and flaw is None:
                return [marker.step]
            log.warning("checkpoint %s %s; going back to the one before it, or to the start", path, flaw)
        return []

    def _path(self, step: int) -> Path:
        return self.directory / _name(step)

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


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What torch raises while it reads a checkpoint becomes one error that names it."""
    try:
        yield
    except (CheckpointException, RuntimeError, KeyError, ValueError) as error:
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        reason = "; ".join(dict.fromkeys(f"{type(cause).__name__}: {cause}" for cause in causes))
        raise ConfigError(
            f"{path}: expected a checkpoint of this model and optimiser, which torch can load; got {reason}; "
            "resume with the model settings that it was written with, or remove it to go on from the one before"
        ) from error


def complete_steps(directory: Path) -> list[int]:
    """The steps of all complete checkpoints in `directory`, ascending."""
    found = (read_marker(path) for path in directory.glob("step-*"))
    return sorted(marker.step for marker in found if marker)


def read_marker(path: Path) -> Complete | None:
    """The marker of the checkpoint at `path`, when it is there, its own and every file has the size that it tells."""
    try:
        marker = msgspec.json.decode((path / MARKER).read_bytes(), type=Complete)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    sizes = {name: (path / name).stat().st_size for name in marker.files if (path / name).exists()}
    told = {name: content.bytes for name, content in marker.files.items()}
    return marker if path.name == _name(marker.step) and sizes == told else None


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _flaw(path: Path, marker: Complete) -> str | None:
    """What is wrong with a checkpoint whose files have their sizes."""
    changed = (name for name, content in marker.files.items() if _digest(path / name) != content.blake3)
    name = next(changed, None)
    return name and f"is damaged: {name} is not what was written (BLAKE3)"


def _digest(file: Path) -> str:
    return blake3(max_threads=1).update_mmap(file).hexdigest()


def _complete(path: Path, step: int) -> None:
    """Make the files of a checkpoint durable, then say so."""
    files = [file for file in path.rglob("*") if file.is_file()]
    for file in files:
        sync(file)
    sync(path)
    sync(path.parent)
    contents = {str(file.relative_to(path)): Content(file.stat().st_size, _digest(file)) for file in files}
    marker = Complete(step, contents)
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
