"""Columns of numbers become torch tensors. Pure; torch is imported when it is first needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .errors import ConfigError, SchemaError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Layout = Literal["padded", "ragged"]


def import_torch() -> ModuleType:
    """The module torch.

    Raises:
        ConfigError: it is not installed; says how to.
    """
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"tensors need PyTorch ({error}); pip install 'streamrl[train]'") from error
    return torch


@dataclass(frozen=True, eq=False, repr=False)
class Batch(Mapping[str, "Tensor"]):
    """Rows of one optimizer step as tensors, by the name of their column.

    Whole numbers are int64, others float32 (null is NaN), booleans bool. A column with one number per row is `[rows]`.
    One with a list per row is `[rows, longest]`, padded on the right, and `masks[name]` (bool, the same shape) says
    where the list is; in the ragged layout it is `[values]`, one list after another, and row i's list is
    `batch[name][offsets[name][i] : offsets[name][i + 1]]` (int64, `[rows + 1]`).

    `arrow` has all columns as they came, also those that are no numbers. `rows` are the rows' ids, `step` the optimizer
    step they are leased for; `ends_step` is true of the last batch of a step.
    """

    tensors: dict[str, Tensor]
    masks: dict[str, Tensor]
    offsets: dict[str, Tensor]
    arrow: pa.RecordBatch
    rows: tuple[int, ...] = ()
    step: int = 0
    ends_step: bool = False

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensors and name in self.arrow.schema.names:
            kind = self.arrow.schema.field(name).type
            raise KeyError(f"{name} is {kind}, which is no tensor; take it from batch.arrow[{name!r}]")
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"<Batch of step {self.step}, {len(self.rows)} rows: {shapes}>"

    def to(self, device: torch.device | str) -> Batch:
        """The batch on `device`; from pinned memory the copy overlaps what the device computes."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory. Needs CUDA."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Any) -> Batch:
        parts = (self.tensors, self.masks, self.offsets)
        tensors, masks, offsets = ({name: function(tensor) for name, tensor in part.items()} for part in parts)
        return replace(self, tensors=tensors, masks=masks, offsets=offsets)


def collate(arrow: pa.RecordBatch, layout: Layout = "padded", padding: Mapping[str, float] | None = None) -> Batch:
    """The tensors of `arrow`. `padding`: what fills up the lists of a column, 0 by default.

    Raises:
        SchemaError: a null where no NaN can stand for it, naming the column.
    """
    from_numpy = import_torch().from_numpy
    tensors, masks, offsets = {}, {}, {}
    for name, column in zip(arrow.schema.names, arrow.columns, strict=True):
        if _is_number(column.type):
            tensors[name] = from_numpy(_numbers(name, column))
        elif _is_list(column.type) and _is_number(column.type.value_type):
            values, lengths = _numbers(name, column.flatten()), _lengths(name, column)
            if layout == "padded":
                mask = np.arange(max(lengths, default=0)) < lengths[:, None]
                padded = np.full(mask.shape, (padding or {}).get(name, 0), values.dtype)
                padded[mask] = values
                tensors[name], masks[name] = from_numpy(padded), from_numpy(mask)
            else:
                tensors[name] = from_numpy(values)
                offsets[name] = from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    return Batch(tensors, masks, offsets, arrow)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _numbers(name: str, column: pa.Array) -> npt.NDArray[Any]:
    if column.null_count and not pa.types.is_floating(column.type):
        raise SchemaError(
            f"column {name}: expected {column.type} in every place, got a null, for which there is no NaN"
        )
    kind = np.bool_ if pa.types.is_boolean(column.type) else np.float32
    if pa.types.is_integer(column.type):
        kind, column = np.int64, _signed(name, column)
    # A copy: tensors can be written to, Arrow's memory cannot.
    return np.array(column.to_numpy(zero_copy_only=False), kind)


def _signed(name: str, column: pa.Array) -> pa.Array:
    try:
        return pc.cast(column, pa.int64())
    except pa.ArrowInvalid as error:
        raise SchemaError(f"column {name}: expected whole numbers below 2**63, got {error}") from error


def _lengths(name: str, column: pa.Array) -> npt.NDArray[np.int64]:
    if column.null_count:
        raise SchemaError(f"column {name}: expected a list in every row, got a null; write an empty list")
    return np.array(pc.list_value_length(column).to_numpy(zero_copy_only=False), np.int64)
