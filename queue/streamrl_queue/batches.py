"""Record batches as bytes, and the columns of a lease put together from the records they lie in.

A reply carries *parts*: each is one Arrow stream with some lines of one record, and says which of the reply's rows
they belong to; or, for a reader on the same host, it carries descriptors of where these lines lie in the journal.
`assemble` puts them side by side and in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from . import wire
from .config import ANY
from .errors import MessageTooLarge, SchemaError
from .schema import KEY_COLUMNS
from .state import Row
from .transport import Buffer

# What Arrow raises on bytes that are no stream of its own.
DAMAGE: Final = (
    pa.ArrowException,
    OSError,
    StopIteration,
    UnicodeError,
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
)


# Made once: without them Arrow looks into the environment for every stream.
READ: Final = pa.ipc.IpcReadOptions()
WRITE: Final = pa.ipc.IpcWriteOptions()


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Lines of the reply's payload bytes `[start, start + length)`: line i belongs to the reply's row `rows[i]`."""

    stage: str
    rows: tuple[int, ...]
    start: int
    length: int


class Mapped(msgspec.Struct, frozen=True, array_like=True):
    """Lines of a record in place: line `lines[i]` belongs to the reply's row `rows[i]`.

    The record's payload is the bytes `[start, start + length)` of the segment that the record's number names, and
    has this digest; `columns` are the ones that were asked for (`*`: all).
    """

    stage: str
    rows: tuple[int, ...]
    lines: tuple[int, ...]
    columns: tuple[str, ...]
    record: int
    start: int
    length: int
    digest: bytes


# Rows of a reply, and their columns of one stage.
Piece = tuple[str, Sequence[int], pa.RecordBatch]


class RowKeys(msgspec.Struct, frozen=True, array_like=True):
    """The key columns of one row of a reply, and its length in tokens (0 when not known)."""

    row: int
    group: int
    member: int
    attempt: int
    split: str
    tokens: int


def encode(batch: pa.RecordBatch) -> pa.Buffer:
    """The batch as one contiguous Arrow stream.

    Raises:
        MessageTooLarge: it fits no message; nothing was copied.
    """
    _refuse_large(stream_bytes(batch), len(batch))
    sink = pa.BufferOutputStream()
    _write(batch, sink)
    return sink.getvalue()


def _write(batch: pa.RecordBatch, sink: pa.NativeFile) -> None:
    with pa.ipc.new_stream(sink, batch.schema, options=WRITE) as writer:
        writer.write_batch(batch)


def stream_bytes(batch: pa.RecordBatch) -> int:
    """About how large its Arrow stream is; nothing is copied to know it."""
    try:
        return pa.ipc.get_record_batch_size(batch)  # type: ignore[no-any-return]
    except pa.ArrowCapacityError:
        # More elements than a stream can have.
        return batch.nbytes  # type: ignore[no-any-return]


def _refuse_large(size: int, rows: int) -> None:
    if size > wire.MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"{rows} rows are {size / 2**20:.0f} MiB, limit {wire.MAX_MESSAGE_BYTES / 2**20:.0f} MiB; "
            "take fewer rows at once"
        )


def decode(data: bytes | bytearray | memoryview, where: str) -> pa.RecordBatch:
    """One batch from an Arrow stream, checked in full before anybody touches it.

    Raises:
        SchemaError: not an Arrow stream of one batch, or one with damaged offsets.
    """
    try:
        batch = read(data)
        batch.validate(full=True)
        # Names and types are decoded when they are first asked for.
        repr(batch.schema), batch.schema.names
    except DAMAGE as error:
        raise SchemaError(f"{where}: expected one Arrow record batch, got {error or 'an empty stream'}") from error
    return batch


def read(data: Buffer) -> pa.RecordBatch:
    """The batch of an Arrow stream that is known to be whole; its columns lie in `data`."""
    with pa.ipc.open_stream(pa.py_buffer(data), options=READ) as reader:
        return reader.read_next_batch()


def records_of(rows: Sequence[Row], stage: str, name: str) -> dict[int, tuple[list[int], list[int]]]:
    """Where the columns of `stage` lie: record → positions among `rows`, and the lines that belong to them.

    Raises:
        SchemaError: a row does not have them (yet).
    """
    records: dict[int, tuple[list[int], list[int]]] = {}
    for position, row in enumerate(rows):
        place = row.places.get(stage)
        if place is None:
            raise SchemaError(f"row {row.id} has no column {name}: its stage {stage} is not done")
        found = records.get(place.record)
        if found is None:
            found = records[place.record] = ([], [])
        found[0].append(position)
        found[1].append(place.line)
    return records


def gather(
    rows: Sequence[Row],
    wanted: Mapping[str, Sequence[str]],
    payload: Callable[[int], memoryview],
    batch: Callable[[int], pa.RecordBatch],
) -> tuple[tuple[Part, ...], Buffer]:
    """Collect columns of rows from the records they lie in.

    Args:
        rows: the rows, in the order of the reply.
        wanted: stage → names of its columns; `*` stands for all of them.
        payload: the bytes of a record.
        batch: what they say.

    Returns:
        The parts, and their bytes end to end.

    Raises:
        MessageTooLarge: they fit no message.
    """
    found = [
        (stage, names, record, positions, lines)
        for stage, names in wanted.items()
        for record, (positions, lines) in records_of(rows, stage, names[0]).items()
    ]
    if len(found) == 1:
        stage, names, record, positions, lines = found[0]
        if _is_all(batch(record), lines, names):
            data = payload(record)
            return (Part(stage, tuple(positions), 0, len(data)),), data
    parts: list[Part] = []
    sink = pa.BufferOutputStream()
    for stage, names, record, positions, lines in found:
        piece, start = select(batch(record), lines, names), sink.tell()
        _refuse_large(start + stream_bytes(piece), len(rows))
        _write(piece, sink)
        parts.append(Part(stage, tuple(positions), start, sink.tell() - start))
    return tuple(parts), memoryview(sink.getvalue())


def _is_all(batch: pa.RecordBatch, lines: Sequence[int], names: Sequence[str]) -> bool:
    """Whether all lines and columns of a record are wanted, as they lie there."""
    return (ANY in names or len(names) == batch.num_columns) and list(lines) == list(range(len(batch)))


def select(batch: pa.RecordBatch, lines: Sequence[int], names: Sequence[str]) -> pa.RecordBatch:
    """Some lines and columns (`*`: all but `row`); consecutive lines are not copied."""
    wanted = [n for n in batch.schema.names if n != "row"] if ANY in names else list(names)
    if missing := [name for name in wanted if name not in batch.schema.names]:
        raise SchemaError(f"no column {', '.join(missing)}; the row has {', '.join(batch.schema.names)}")
    batch = batch.select(wanted)
    run = list(lines) == list(range(lines[0], lines[0] + len(lines)))
    return batch.slice(lines[0], len(lines)) if run else batch.take(pa.array(lines))


def unpack(parts: Sequence[Part], payload: memoryview) -> list[Piece]:
    """The pieces that came along with a reply.

    Raises:
        SchemaError: they are damaged.
    """
    return [
        (p.stage, p.rows, decode(payload[p.start : p.start + p.length], f"columns of {p.stage or 'the task'}"))
        for p in parts
    ]


def assemble(keys: Sequence[RowKeys], pieces: Sequence[Piece]) -> pa.RecordBatch:
    """One batch with the key columns and all columns of the pieces, in the order of `keys`."""
    by_stage: defaultdict[str, list[tuple[Sequence[int], pa.RecordBatch]]] = defaultdict(list)
    for stage, positions, batch in pieces:
        by_stage[stage].append((positions, batch))
    columns = _key_columns(keys)
    for stage, found in by_stage.items():
        batch = _in_order(found, stage)
        columns |= {name: batch.column(i) for i, name in enumerate(batch.schema.names) if name != "row"}
    try:
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    except pa.ArrowInvalid as error:
        raise SchemaError(f"the columns of a lease: expected {len(keys)} lines of each, got others: {error}") from error


def _key_columns(keys: Sequence[RowKeys]) -> dict[str, pa.Array]:
    by_name = zip(*map(msgspec.structs.astuple, keys), strict=True) if keys else ((),) * len(RowKeys.__struct_fields__)
    values = dict(zip(RowKeys.__struct_fields__, by_name, strict=True))
    return {field.name: pa.array(values[field.name], field.type) for field in KEY_COLUMNS}


def _in_order(pieces: Sequence[tuple[Sequence[int], pa.RecordBatch]], stage: str) -> pa.RecordBatch:
    """Pieces of one stage's columns as one batch, line i for the reply's row i; copied only when it must be."""
    order = [position for positions, _ in pieces for position in positions]
    try:
        batch = pieces[0][1] if len(pieces) == 1 else pa.concat_batches([piece for _, piece in pieces])
    except pa.ArrowInvalid as error:
        raise SchemaError(
            f"the rows of this lease have different columns of {stage or 'the task'}: {error}; name the columns "
            "that all of them have"
        ) from error
    return batch if order == list(range(len(order))) else batch.take(pa.array(np.argsort(order)))
