"""Rows of the queue -> micro-batches of tensors. Pure: no queue, no model.

Only what the loss needs is taken: the sampled tokens, each with the place whose logits predict it. Prompt and
tool tokens are input and nothing else; padding exists in `tokens` only. Arrays are never masked by arithmetic,
so a NaN where nobody sampled cannot reach a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from streamrl_queue.errors import SchemaError
from streamrl_queue.schema import Segment, Span, arrays, segments, spans

from .config import Normalise

# What a learner asks the queue for.
COLUMNS = ("tokens", "mask", "logprobs", "versions", "segments", "sampling", "reward", "advantage")


class Row(NamedTuple):
    """One row of the step, as views into the Arrow batch it came in. Per-token arrays are `[tokens]`."""

    id: int
    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[Span, ...]
    segments: tuple[Segment, ...]
    temperature: float
    reward: float
    advantage: float

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return int(np.count_nonzero(self.mask))

    @property
    def has_signal(self) -> bool:
        """Whether the row moves the weights: a zero advantage has a zero gradient, and so has an empty mask."""
        return self.advantage != 0 and bool(self.mask.any())


class MicroBatch(NamedTuple):
    """One forward pass. `n` counts sampled tokens, over all sequences, one after another.

    `tokens` `[sequences, positions]` int64, padded on the right. `places` `[n]` int64: index into the flattened
    tokens of the place before each sampled token. `targets` `[n]` int64, `behaviour` `[n]` nats, `advantages`,
    `temperatures` and `weights` `[n]` float32; a weight is the token's share in the normalisation's numerator.
    """

    tokens: Tensor
    places: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    temperatures: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(*(t.to(device, non_blocking=True) for t in self))


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """The rows of an Arrow batch with `row` and COLUMNS.

    Raises:
        SchemaError: a sampled token without a finite log-prob, or a row whose sampling truncates the distribution:
            its log-probs have no counterpart here.
    """
    ids = batch.column("row").to_pylist()
    sampling = [dict(pairs) for pairs in batch.column("sampling").to_pylist()]
    columns = zip(
        ids,
        *(arrays(batch.column(name)) for name in ("tokens", "mask", "logprobs")),
        spans(batch.column("versions")),
        segments(batch.column("segments")),
        [temperature_of(row, s) for row, s in zip(ids, sampling, strict=True)],
        batch.column("reward").to_pylist(),
        batch.column("advantage").to_pylist(),
        strict=True,
    )
    rows = [Row(*values) for values in columns]
    for row in rows:
        _check_logprobs(row)
    return rows


def _check_logprobs(row: Row) -> None:
    sampled = row.logprobs[row.mask == 1]
    if not np.isfinite(sampled).all():
        bad = sampled[~np.isfinite(sampled)][0]
        raise SchemaError(f"row {row.id}: logprobs: expected finite numbers for sampled tokens, got {bad}")


def temperature_of(row: int, sampling: Mapping[str, float]) -> float:
    """The temperature that a row's log-probs were taken at; greedy rows (0) carry those of temperature 1."""
    if sampling.get("top_p", 1.0) < 1 or sampling.get("top_k", 0) > 0:
        raise SchemaError(
            f"row {row}: sampling: expected top_p 1 and top_k 0 for rows that are trained, got {dict(sampling)}: "
            "log-probs of a truncated distribution cannot be compared; set rollout.top_p: 1, rollout.top_k: 0"
        )
    return sampling.get("temperature", 1.0) or 1.0


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split rows into micro-batches of at most `budget` padded tokens, as indices into `lengths`.

    Rows are sorted by length first, so that little is padding. A row longer than the budget is alone.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * width <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
            width = lengths[index]
    return batches


def micro_batch(rows: Iterable[Row], normalise: Normalise) -> MicroBatch:
    """Tensors of `rows`: every segment becomes a sequence. Without rows, one pass over one token that teaches nothing.

    Raises:
        SchemaError: for a sampled token that opens a segment: nothing predicts it.
    """
    rows = list(rows)
    parts = [(row, segment) for row in rows for segment in row.segments]
    width = max((segment.end - segment.start for _, segment in parts), default=1)
    tokens = np.zeros((max(len(parts), 1), width), np.int64)
    columns: list[list[npt.NDArray[Any]]] = [[np.empty(0, kind)] for kind in _KINDS]
    for line, (row, segment) in enumerate(parts):
        tokens[line, : segment.end - segment.start] = row.tokens[segment.start : segment.end]
        for column, values in zip(columns, _sampled(row, segment, line * width, normalise), strict=True):
            column.append(values)
    flat = [torch.from_numpy(np.concatenate(c, dtype=kind)) for c, kind in zip(columns, _KINDS, strict=True)]
    return MicroBatch(torch.from_numpy(tokens), *flat)


# Types of the per-token fields of a MicroBatch, in order.
_KINDS: Final = (np.int64, np.int64, np.float32, np.float32, np.float32, np.float32)


def _sampled(row: Row, segment: Segment, offset: int, normalise: Normalise) -> tuple[npt.NDArray[Any], ...]:
    """Places, targets, behaviour, advantages, temperatures and weights of the sampled tokens of one segment."""
    at = np.flatnonzero(row.mask[segment.start : segment.end])
    if len(at) and at[0] == 0:
        raise SchemaError(f"row {row.id}: token {segment.start} was sampled but opens a segment: nothing predicts it")
    weight = 1.0 / row.sampled if normalise == "sequence_mean" and len(at) else 1.0
    ones, taken = np.ones(len(at)), at + segment.start
    return (
        at - 1 + offset,
        row.tokens[taken],
        row.logprobs[taken],
        ones * row.advantage,
        ones * row.temperature,
        ones * weight,
    )


def row_weight(row: Row, normalise: Normalise, length: int | None) -> float:
    """What the row adds to the denominator: of the step's rows, so that the mask above and below the line is one."""
    if normalise == "token_mean":
        return float(row.sampled)
    if normalise == "sequence_mean":
        return float(row.sampled > 0)
    assert length is not None  # config.problems refuses it
    return float(length)


def micro_batches(rows: Sequence[Row], budget: int, normalise: Normalise) -> Iterator[MicroBatch]:
    """Micro-batches of the rows that carry signal; the others would add exact zeros and are left out."""
    useful = [row for row in rows if row.has_signal]
    for indices in plan([len(row.tokens) for row in useful], budget):
        yield micro_batch((useful[i] for i in indices), normalise)
