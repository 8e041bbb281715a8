"""Batches of rows as Arrow record batches and as bytes, for all systems that speak Arrow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .payload import COLUMNS, RAGGED, SCALARS, Batch, split

TYPES: Final = {name: pa.from_numpy_dtype(kind) for name, kind in RAGGED.items()}


def record_batch(batch: Batch) -> pa.RecordBatch:
    """One copy of every array, into memory of Arrow's pool, which stays warm; a single row is not copied."""
    prompt, response = _offsets(batch["prompt_ids"]), _offsets(batch["response_ids"])
    arrays = [
        pa.LargeListArray.from_arrays(prompt if name == "prompt_ids" else response, _values(batch[name], kind))
        for name, kind in TYPES.items()
    ]
    arrays += [pa.array(batch[name], pa.int64()) for name in SCALARS]
    return pa.RecordBatch.from_arrays(arrays, names=COLUMNS)


def _offsets(parts: Sequence[npt.NDArray[Any]]) -> pa.Array:
    return pa.array([0, *itertools.accumulate(map(len, parts))], pa.int64())


def _values(parts: Sequence[npt.NDArray[Any]], kind: pa.DataType) -> pa.Array:
    if len(parts) == 1:
        return pa.array(parts[0])
    length = sum(map(len, parts))
    buffer = pa.allocate_buffer(length * parts[0].itemsize)
    np.concatenate(parts, out=np.frombuffer(buffer, parts[0].dtype))
    return pa.Array.from_buffers(kind, length, [None, buffer])


def to_bytes(batch: pa.RecordBatch) -> pa.Buffer:
    """The batch as one Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def from_bytes(data: Any) -> pa.RecordBatch:
    """The batch that lies in a buffer, without a copy."""
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_next_batch()


def uids_of(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """The identities of a batch's rows, [rows]."""
    uids: npt.NDArray[np.int64] = batch.column("uid").to_numpy()
    return uids


def columns_of(batch: pa.RecordBatch, reward: npt.NDArray[np.float64] | None = None) -> dict[str, Any]:
    """Column → one entry per row, for the comparison with what was put."""
    columns: dict[str, Any] = {name: batch.column(name).to_numpy() for name in SCALARS}
    for name in RAGGED:
        column = batch.column(name)
        columns[name] = split(column.values.to_numpy(), column.offsets.to_numpy())
    columns["reward"] = batch.column("reward").to_numpy() if reward is None else reward
    return columns
