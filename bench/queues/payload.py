"""The rows that every system moves: about 10 kB each, ragged, of a fixed seed.

prompt_ids    int32[128..384]       weight_version  int64
response_ids  int32[256..1792]      group_id        int64
logprobs      float32[response]     uid             int64, counted from 0: the row's identity
mask          uint8[response]
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

RAGGED: Final[Mapping[str, type[np.generic]]] = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "logprobs": np.float32,
    "mask": np.uint8,
}
SCALARS: Final = ("weight_version", "group_id", "uid")
COLUMNS: Final = (*RAGGED, *SCALARS)
REWARD_READS: Final = ("response_ids", "mask", "uid")
# Different rows; a longer run repeats their arrays under other uids. 10 MB: more than a cache of the second level.
POOL: Final = 1024
WEIGHT_VERSION: Final = 7
GROUP: Final = 8

# Column → one entry per row: an array, or an int.
Batch = dict[str, list[Any]]


class WrongRow(AssertionError):
    """A row arrived that is not the one that was put."""


def reward_of(uids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """What the reward worker writes: [rows] floats that name their row."""
    return uids.astype(np.float64) * 0.5 + 1.0


class Payload:
    """Makes batches of rows, and knows what every row must look like when it arrives."""

    def __init__(self, seed: int = 0, pool: int = POOL) -> None:
        rng = np.random.default_rng(seed)
        prompts, responses = rng.integers(128, 385, pool).tolist(), rng.integers(256, 1793, pool).tolist()
        self._pool = pool
        self._ragged: dict[str, list[npt.NDArray[Any]]] = {
            "prompt_ids": [rng.integers(0, 150_000, n).astype(np.int32) for n in prompts],
            "response_ids": [rng.integers(0, 150_000, n).astype(np.int32) for n in responses],
            "logprobs": [rng.standard_normal(n).astype(np.float32) for n in responses],
            "mask": [(rng.random(n) < 0.9).astype(np.uint8) for n in responses],
        }
        self.row_bytes = sum(a.nbytes for arrays in self._ragged.values() for a in arrays) / pool + 8 * len(SCALARS)
        # A batch is a slice, also one that runs over the pool's end.
        self._twice = {name: arrays * 2 for name, arrays in self._ragged.items()}

    def batch(self, first: int, rows: int) -> Batch:
        """Rows `first` to `first + rows`, at most a pool of them."""
        start = first % self._pool
        uids = range(first, first + rows)
        return {
            **{name: arrays[start : start + rows] for name, arrays in self._twice.items()},
            "weight_version": [WEIGHT_VERSION] * rows,
            "group_id": [uid // GROUP for uid in uids],
            "uid": list(uids),
        }

    def check(self, columns: Mapping[str, Sequence[Any]]) -> int:
        """Compare whole rows with what was put; returns how many.

        Raises:
            WrongRow: naming row and column.
        """
        uids = [int(uid) for uid in columns["uid"]]
        for line, uid in enumerate(uids):
            expected: dict[str, Any] = {name: arrays[uid % self._pool] for name, arrays in self._ragged.items()}
            expected |= {"weight_version": WEIGHT_VERSION, "group_id": uid // GROUP, "reward": uid * 0.5 + 1.0}
            for name, value in expected.items():
                got = np.asarray(columns[name][line])
                if got.shape != np.shape(value) or not np.array_equal(got, value):
                    raise WrongRow(f"row {uid}: {name} is not what was put")
        return len(uids)


def split(values: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """A ragged column as one view per row."""
    return [values[a:b] for a, b in itertools.pairwise(offsets.tolist())]
