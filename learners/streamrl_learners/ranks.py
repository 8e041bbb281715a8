"""The learner's processes and what they tell each other: numbers in tensors, never pickled objects."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from streamrl_queue.errors import ConfigError

# A rank that has heard nothing from the others for this long gives up. The leader says something at least
# every `linger_seconds` while it waits for rows, so only a warm start or a checkpoint can take long: minutes.
SILENCE_SECONDS: Final = 600.0


class Ranks:
    """A process among the learner's ranks. Alone (`world` 1) nothing is sent."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank = rank
        self.world = world

    @classmethod
    def join(cls, rank: int, world: int, store: str | None, device: str) -> Ranks:
        """Form the default process group at `store` (`host:port`, hosted by rank 0). `device`: cpu or cuda.

        Raises:
            ConfigError: `device` is cuda and this machine has none.
        """
        if device == "cuda":
            if not torch.cuda.is_available():
                raise ConfigError("learner.device: cuda, but torch finds no CUDA device here; use learner.device=cpu")
            torch.cuda.set_device(rank % torch.cuda.device_count())
        if world > 1:
            assert store is not None
            host, port = store.rsplit(":", 1)
            timeout = timedelta(seconds=SILENCE_SECONDS)
            rendezvous = TCPStore(host, int(port), world, is_master=rank == 0, timeout=timeout)
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, store=rendezvous, rank=rank, world_size=world, timeout=timeout)
        return cls(rank, world)

    @property
    def leads(self) -> bool:
        """Whether this rank talks to the queue about rows, commits and versions."""
        return self.rank == 0

    def share(self, numbers: Sequence[int] | None) -> list[int]:
        """The leader's `numbers` on every rank. Collective."""
        if self.world == 1:
            assert numbers is not None
            return list(numbers)
        size = torch.tensor([len(numbers) if numbers is not None else 0], dtype=torch.int64)
        dist.broadcast(size, 0)
        values = (
            torch.tensor(numbers, dtype=torch.int64)
            if numbers is not None
            else torch.empty(int(size), dtype=torch.int64)
        )
        dist.broadcast(values, 0)
        return [int(value) for value in values]

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Element by element, the sum over all ranks. Collective."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def highest(self, numbers: Sequence[float]) -> list[float]:
        """Element by element, the maximum over all ranks. Collective."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Return when all ranks are here. Collective."""
        self.summed([0.0])

    def leave(self) -> None:
        """Take the process group down."""
        if self.world > 1:
            dist.destroy_process_group()

    def _reduced(self, numbers: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values, op=operation)
        return [float(value) for value in values]
