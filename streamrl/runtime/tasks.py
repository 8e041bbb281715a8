"""Tasks by number: task i of a split is the same in every process, at every time, without the tasks before it.

So a run resumes at the next number without replaying a generator, and two runs with one seed get the same tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import blake3

from streamrl_queue.schema import Task

Sampler = Callable[[random.Random], dict[str, Any]]


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from `parts`; the same in every process (Python's `hash` of a string is not)."""
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(blake3.blake3(text).digest(length=8), "little") >> 1


class TaskSource:
    """Samples tasks of one split. `source` names them in the queue: the same tasks under another source are put
    again, under the same source they are a repetition.
    """

    def __init__(self, env: str, sample: Sampler, *, seed: int, split: str, source: str | None = None) -> None:
        self.source = source or f"{split}-tasks"
        self._env = env
        self._sample = sample
        self._seed = seed
        self._split = split

    def __repr__(self) -> str:
        return f"<TaskSource {self.source} of {self._env} seed={self._seed}>"

    def __getitem__(self, index: int) -> Task:
        seed = derive_seed(self._seed, self._split, index)
        task = self._sample(random.Random(seed))
        return Task(env=self._env, task=task, source=self.source, index=index, seed=seed)

    def take(self, start: int, count: int) -> Iterator[Task]:
        """Tasks `start` to `start + count - 1`."""
        return (self[index] for index in range(start, start + count))
