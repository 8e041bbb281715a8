"""What a batch from outside must be before its columns become those of rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .config import ANY, Stage
from .errors import SchemaError
from .schema import KEY_COLUMNS, check
from .state import Version

ROW_TYPE: Final = KEY_COLUMNS.field("row").type


def check_put(batch: pa.RecordBatch, filled: Sequence[Stage], *, training: bool) -> None:
    """A batch of tasks, which brings the columns of the stages in `filled` too.

    Raises:
        SchemaError, RewardError: naming the column, what was expected and what came.
    """
    _refuse_keys(batch, KEY_COLUMNS.names, "put")
    check(batch, (name for stage in filled for name in stage.writes if name != ANY), "put", training=training)


def rows_of(batch: pa.RecordBatch) -> tuple[int, ...]:
    """The rows that a written batch is of.

    Raises:
        SchemaError: it does not say, or brings key columns that it cannot change.
    """
    if "row" not in batch.schema.names:
        raise SchemaError("write: missing column row, which says whose columns these are")
    if not batch.schema.field("row").type.equals(ROW_TYPE) or batch.column("row").null_count:
        raise SchemaError(f"write: row: expected {ROW_TYPE} without nulls, got {batch.schema.field('row').type}")
    _refuse_keys(batch, KEY_COLUMNS.names[1:], "write")
    return tuple(batch.column("row").to_pylist())


def check_written(batch: pa.RecordBatch, stage: Stage, *, training: bool) -> None:
    """The columns that `stage` writes, and no others.

    Raises:
        SchemaError, RewardError: naming the column, what was expected and what came.
    """
    check(batch, (name for name in stage.writes if name != ANY), f"write to {stage.name}", training=training)
    foreign = set(batch.schema.names) - {"row", *stage.writes}
    if foreign and ANY not in stage.writes:
        written = ", ".join(stage.writes) or "nothing; a batch of `row` alone ends the lease"
        raise SchemaError(f"write to {stage.name}: it does not write {', '.join(sorted(foreign))}; it writes {written}")


def _refuse_keys(batch: pa.RecordBatch, names: Sequence[str], what: str) -> None:
    """Columns that every lease has of its own would hide what the batch brings under the same name."""
    if taken := [name for name in names if name in batch.schema.names]:
        raise SchemaError(f"{what}: column {', '.join(taken)} is the queue's own; name yours otherwise")


def envs_of(batch: pa.RecordBatch) -> list[str]:
    """The environment of every line, by which leases may choose; empty where a batch names none."""
    if "env" not in batch.schema.names:
        return [""] * len(batch)
    column = batch.column("env")
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)) or column.null_count:
        raise SchemaError(f"put: column env: expected strings without nulls, got {column.type}; name it otherwise")
    return column.to_pylist()  # type: ignore[no-any-return]


def tokens_of(batch: pa.RecordBatch, versions: Mapping[int, Version]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The oldest version (-1: none) and the length of every trajectory in a batch; empty when it has none.

    The oldest is the one of the earliest step: after a learner went back, a later version may be of an earlier step.
    """
    if "tokens" not in batch.schema.names or "versions" not in batch.schema.names:
        return (), ()
    lengths = pc.list_value_length(batch.column("tokens")).to_pylist()
    spans = batch.column("versions")
    values = spans.flatten().field("version").to_pylist()
    counts = pc.list_value_length(spans).to_numpy(zero_copy_only=False)
    ends = np.cumsum(counts)

    def age(version: int) -> tuple[float, int]:
        return versions[version].step if version in versions else float("inf"), version

    oldest = (min(values[end - n : end], key=age, default=-1) for end, n in zip(ends, counts, strict=True))
    return tuple(oldest), tuple(lengths)
