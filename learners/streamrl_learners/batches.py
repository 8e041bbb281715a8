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

from .algorithms.base import Lag
from .algorithms.lags import Lags, lag_weights
from .algorithms.pieces import Algorithm

# What a learner asks the queue for.
COLUMNS = ("tokens", "mask", "logprobs", "versions", "segments", "sampling", "reward", "advantage")


class Row(NamedTuple):
    """One row of the step, as views into the Arrow batch it came in. Per-token arrays are `[tokens]`.

    `lags`: steps taken since the version that sampled each token; 0 until `aged` knows better.
    """

    id: int
    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[Span, ...]
    segments: tuple[Segment, ...]
    temperature: float
    reward: float
    advantage: float
    lags: Lags

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
    `temperatures`, `weights` and `shares` `[n]` float32; `rows` `[n]` int64, numbered from 0 without gaps; `lags` `[n]`
    int64, steps. A token's weight is its share in the normalisation's numerator, its share that in the denominator.
    """

    tokens: Tensor
    places: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    temperatures: Tensor
    weights: Tensor
    shares: Tensor
    rows: Tensor
    lags: Tensor

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
    tokens = arrays(batch.column("tokens"))
    columns = zip(
        ids,
        tokens,
        *(arrays(batch.column(name)) for name in ("mask", "logprobs")),
        spans(batch.column("versions")),
        segments(batch.column("segments")),
        [temperature_of(row, s) for row, s in zip(ids, sampling, strict=True)],
        batch.column("reward").to_pylist(),
        batch.column("advantage").to_pylist(),
        [np.zeros(len(one), np.int64) for one in tokens],
        strict=True,
    )
    rows = [Row(*values) for values in columns]
    for row in rows:
        _check_logprobs(row)
    return rows


def aged(row: Row, lags: Lags, config: Lag | None) -> Row:
    """`row` with the `lags` `[tokens]` of its tokens; one that weighs nothing is as if nobody had sampled it."""
    trained = lag_weights(config, lags) > 0
    return row._replace(lags=lags, mask=row.mask if trained.all() else row.mask * trained)


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


def micro_batch(rows: Iterable[Row], algorithm: Algorithm) -> MicroBatch:
    """Tensors of `rows`: every segment becomes a sequence. Without rows, one pass over one token that teaches nothing.

    Raises:
        SchemaError: for a sampled token that opens a segment: nothing predicts it.
    """
    # Sums over rows are taken by number; a row without a sampled token would leave a gap.
    rows = [row for row in rows if row.sampled]
    parts = [(number, row, segment) for number, row in enumerate(rows) for segment in row.segments]
    width = max((segment.end - segment.start for _, _, segment in parts), default=1)
    tokens = np.zeros((max(len(parts), 1), width), np.int64)
    columns: list[list[npt.NDArray[Any]]] = [[np.empty(0, kind)] for kind in _KINDS]
    for line, (number, row, segment) in enumerate(parts):
        tokens[line, : segment.end - segment.start] = row.tokens[segment.start : segment.end]
        for column, values in zip(columns, _sampled(number, row, segment, line * width, algorithm), strict=True):
            column.append(values)
    flat = [torch.from_numpy(np.concatenate(c, dtype=kind)) for c, kind in zip(columns, _KINDS, strict=True)]
    return MicroBatch(torch.from_numpy(tokens), *flat)


# Types of the per-token fields of a MicroBatch, in order.
_KINDS: Final = (np.int64, np.int64, *(np.float32,) * 5, np.int64, np.int64)


def _sampled(
    number: int, row: Row, segment: Segment, offset: int, algorithm: Algorithm
) -> tuple[npt.NDArray[Any], ...]:
    """The per-token fields of a MicroBatch for the sampled tokens of one segment, in order."""
    at = np.flatnonzero(row.mask[segment.start : segment.end])
    if len(at) and at[0] == 0:
        raise SchemaError(f"row {row.id}: token {segment.start} was sampled but opens a segment: nothing predicts it")
    weight = 1.0 / row.sampled if algorithm.normalise == "sequence_mean" else 1.0
    ones, taken = np.ones(len(at)), at + segment.start
    lags = row.lags[taken]
    return (
        at - 1 + offset,
        row.tokens[taken],
        row.logprobs[taken],
        ones * row.advantage,
        ones * row.temperature,
        weight * lag_weights(algorithm.lag, lags),
        ones * row_weight(row, algorithm) / row.sampled,
        np.full(len(at), number),
        lags,
    )


def row_weight(row: Row, algorithm: Algorithm) -> float:
    """What the row adds to the denominator: of the step's rows, so that the mask above and below the line is one."""
    if algorithm.normalise == "token_mean":
        return float(row.sampled)
    if algorithm.normalise == "sequence_mean":
        return float(row.sampled > 0)
    assert algorithm.normalise_length is not None  # checks.problems refuses it
    return float(algorithm.normalise_length)


def is_computed(row: Row, algorithm: Algorithm) -> bool:
    """Whether the row goes through the model: one that would add exact zeros is left out."""
    return row.sampled > 0 if algorithm.computes_all else row.has_signal


def micro_batches(rows: Sequence[Row], budget: int, algorithm: Algorithm) -> Iterator[MicroBatch]:
    """Micro-batches of the rows that have to be computed."""
    useful = [row for row in rows if is_computed(row, algorithm)]
    for indices in plan([len(row.tokens) for row in useful], budget):
        yield micro_batch((useful[i] for i in indices), algorithm)
