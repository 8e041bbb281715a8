"""The columns of a row, their Arrow types, and the one place where per-token arrays are cut and checked.

A row is born with the *task* columns and gains the columns of each stage. Every stage's columns travel as
one Arrow record batch with a `row` column that says which rows they belong to.

Per-token arrays of one trajectory (`tokens`, `mask`, `logprobs`) always have one length; `Trajectory` checks
it when it is made, and `Trajectory.cut` is the only function that shortens them. Unknown is NaN or null, never 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .errors import RewardError, SchemaError

SCHEMA_VERSION: Final = 1

STATUSES: Final = (
    "completed",
    "truncated_length",
    "truncated_prompt",
    "truncated_turns",
    "error_env",
    "error_tool",
    "error_parse",
    "error_timeout",
    "aborted",
)

SPAN_TYPE: Final = pa.struct(
    [
        pa.field("start", pa.int32(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("context_version", pa.int64(), nullable=False),
    ]
)
SEGMENT_TYPE: Final = pa.struct(
    [pa.field("start", pa.int32(), nullable=False), pa.field("end", pa.int32(), nullable=False)]
)

KEY_COLUMNS: Final = pa.schema(
    [
        pa.field("row", pa.uint64(), nullable=False),
        pa.field("group", pa.uint64(), nullable=False),
        pa.field("member", pa.uint16(), nullable=False),
        pa.field("attempt", pa.uint16(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
    ]
)

TASK_COLUMNS: Final = pa.schema(
    [
        pa.field("env", pa.string(), nullable=False),
        pa.field("task", pa.large_binary(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("index", pa.int64(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
    ]
)

TRAJECTORY_COLUMNS: Final = pa.schema(
    [
        pa.field("tokens", pa.large_list(pa.int32()), nullable=False),
        pa.field("mask", pa.large_list(pa.uint8()), nullable=False),
        pa.field("logprobs", pa.large_list(pa.float32()), nullable=False),
        pa.field("versions", pa.list_(SPAN_TYPE), nullable=False),
        pa.field("segments", pa.list_(SEGMENT_TYPE), nullable=False),
        pa.field("turns", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("sampling", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("outcome", pa.float64()),
        pa.field("error", pa.string()),
        pa.field("metrics", pa.map_(pa.string(), pa.float64()), nullable=False),
    ]
)

REWARD_COLUMNS: Final = pa.schema(
    [
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64()), nullable=False),
    ]
)

ADVANTAGE_COLUMNS: Final = pa.schema([pa.field("advantage", pa.float32(), nullable=False)])

# Every column that streamrl itself knows, by name. A user's stage may add others.
KNOWN_COLUMNS: Final[Mapping[str, pa.Field]] = {
    field.name: field
    for schema in (TASK_COLUMNS, TRAJECTORY_COLUMNS, REWARD_COLUMNS, ADVANTAGE_COLUMNS)
    for field in schema
}


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task, before it becomes `members` rows of one group. `task` is what the environment's `reset` gets."""

    env: str
    task: dict[str, Any]
    source: str = "tasks"
    index: int = 0
    epoch: int = 0
    seed: int = 0

    @property
    def key(self) -> str:
        """Identifies the task for ever: putting the same key again is a repetition, not a second task."""
        return f"{self.source}/{self.epoch}/{self.index}"


def task_batch(tasks: Sequence[Task]) -> pa.RecordBatch:
    """The task columns of `tasks`, one line per task."""
    return pa.RecordBatch.from_pydict(
        {
            "env": [t.env for t in tasks],
            "task": [msgspec.json.encode(t.task) for t in tasks],
            "source": [t.source for t in tasks],
            "index": [t.index for t in tasks],
            "epoch": [t.epoch for t in tasks],
            "seed": [t.seed for t in tasks],
        },
        schema=TASK_COLUMNS,
    )


class Span(msgspec.Struct, frozen=True, array_like=True):
    """From token `start` on, sampled tokens came from policy `version`.

    `context_version` is the oldest version in the KV cache that they were sampled from; it equals `version`
    when the cache was recomputed after the last weight update.
    """

    start: int
    version: int
    context_version: int


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `[start, end)` that were one model context: positions and attention start anew in each."""

    start: int
    end: int


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout writes into its row.

    `tokens`, `mask` and `logprobs` are `[tokens]` arrays of one length. `mask` is 1 exactly where the policy
    sampled the id (the sampled end-of-turn included). `logprobs` are behaviour log-probabilities in nats under
    the distribution that `sampling` describes, NaN where `mask` is 0.

    Raises:
        SchemaError: when the arrays disagree, or a sampled token has no finite log-probability or no version.
    """

    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: tuple[Span, ...]
    segments: tuple[Segment, ...]
    turns: int
    status: str
    sampling: dict[str, float]
    outcome: float | None = None
    error: str | None = None
    metrics: dict[str, float] = {}

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if len(self.mask) != n or len(self.logprobs) != n:
            raise SchemaError(
                f"per-token arrays must have one length: got {n} tokens, {len(self.mask)} mask, "
                f"{len(self.logprobs)} logprobs"
            )
        if self.status not in STATUSES:
            raise SchemaError(f"status: expected one of {', '.join(STATUSES)}, got {self.status!r}")
        sampled = self.mask == 1
        if not np.isfinite(self.logprobs[sampled]).all():
            where = int(np.flatnonzero(sampled & ~np.isfinite(self.logprobs))[0])
            raise SchemaError(
                f"logprobs[{where}]: expected a finite log-probability for a sampled token, got {self.logprobs[where]}"
            )
        first = int(np.argmax(sampled)) if sampled.any() else n
        if sampled.any() and (not self.versions or self.versions[0].start > first):
            raise SchemaError(f"versions: token {first} was sampled but no span covers it")
        if n and (not self.segments or self.segments[0].start != 0 or self.segments[-1].end != n):
            raise SchemaError(f"segments: expected to cover [0, {n}), got {self.segments}")

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of this trajectory; None when nothing was sampled."""
        return min((span.version for span in self.versions), default=None)

    def cut(self, length: int) -> Trajectory:
        """The first `length` tokens, with every per-token array, span and segment cut alike."""
        return msgspec.structs.replace(
            self,
            tokens=self.tokens[:length],
            mask=self.mask[:length],
            logprobs=self.logprobs[:length],
            versions=tuple(s for s in self.versions if s.start < length),
            segments=tuple(Segment(s.start, min(s.end, length)) for s in self.segments if s.start < length),
        )


def trajectory_batch(rows: Sequence[int], trajectories: Sequence[Trajectory]) -> pa.RecordBatch:
    """The trajectory columns of `rows`, ready for `write` to the rollout stage."""

    def ragged(name: str, dtype: pa.DataType) -> pa.Array:
        parts = [getattr(t, name) for t in trajectories]
        offsets = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64)
        values = np.concatenate(parts) if parts else np.empty(0)
        return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values, type=dtype))

    structs = msgspec.to_builtins
    columns = {
        "row": pa.array(rows, pa.uint64()),
        "tokens": ragged("tokens", pa.int32()),
        "mask": ragged("mask", pa.uint8()),
        "logprobs": ragged("logprobs", pa.float32()),
        "versions": [
            [dict(zip(("start", "version", "context_version"), structs(s), strict=True)) for s in t.versions]
            for t in trajectories
        ],
        "segments": [[{"start": s.start, "end": s.end} for s in t.segments] for t in trajectories],
        "turns": [t.turns for t in trajectories],
        "status": [t.status for t in trajectories],
        "sampling": [list(t.sampling.items()) for t in trajectories],
        "outcome": [t.outcome for t in trajectories],
        "error": [t.error for t in trajectories],
        "metrics": [list(t.metrics.items()) for t in trajectories],
    }
    return pa.RecordBatch.from_pydict(columns, schema=with_rows(TRAJECTORY_COLUMNS))


def reward_batch(rows: Sequence[int], rewards: Sequence[float], parts: Sequence[Mapping[str, float]]) -> pa.RecordBatch:
    """The reward columns of `rows`.

    Raises:
        RewardError: when a reward is None, a bool, or not finite.
    """
    for row, reward in zip(rows, rewards, strict=True):
        if isinstance(reward, bool) or not isinstance(reward, int | float | np.number):
            raise RewardError(f"reward: expected a finite float, got {reward!r} (row {row})")
        if not np.isfinite(reward):
            raise RewardError(f"reward: expected a finite float, got {reward} (row {row})")
    columns = {
        "row": pa.array(rows, pa.uint64()),
        "reward": pa.array(rewards, pa.float64()),
        "reward_parts": [list(p.items()) for p in parts],
    }
    return pa.RecordBatch.from_pydict(columns, schema=with_rows(REWARD_COLUMNS))


def advantage_batch(rows: Sequence[int], advantages: Sequence[float]) -> pa.RecordBatch:
    """The advantage column of `rows`: one number per row."""
    columns = {"row": pa.array(rows, pa.uint64()), "advantage": pa.array(advantages, pa.float32())}
    return pa.RecordBatch.from_pydict(columns, schema=with_rows(ADVANTAGE_COLUMNS))


def with_rows(schema: pa.Schema) -> pa.Schema:
    """`schema` with the leading `row` column that every written batch has."""
    return pa.schema([KEY_COLUMNS.field("row"), *schema])


def arrays(column: pa.Array) -> list[npt.NDArray[Any]]:
    """The ragged `column` as one read-only numpy view per row, without copying."""
    values = column.values.to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_numpy()
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def spans(column: pa.Array) -> list[tuple[Span, ...]]:
    """The `versions` column as spans, one tuple per row."""
    return [tuple(Span(s["start"], s["version"], s["context_version"]) for s in row) for row in column.to_pylist()]


def segments(column: pa.Array) -> list[tuple[Segment, ...]]:
    """The `segments` column, one tuple per row."""
    return [tuple(Segment(s["start"], s["end"]) for s in row) for row in column.to_pylist()]


def check(batch: pa.RecordBatch, required: Iterable[str], where: str, *, training: bool) -> None:
    """Check a batch at the border: columns; in a training flow also types, nulls, parallel arrays, finite rewards.

    `required` are the names that must be there beside `row`. Where rows are trained, known names must have their
    declared type and other names may have any; a queue used alone gives no name a meaning. `where` names the batch
    in the error.

    Raises:
        SchemaError, RewardError: naming the column, what was expected and what came.
    """
    names = set(batch.schema.names)
    if twice := sorted({name for name in names if batch.schema.names.count(name) > 1}):
        raise SchemaError(f"{where}: column {', '.join(twice)} is there more than once")
    missing = sorted(set(required) - names)
    if missing:
        raise SchemaError(f"{where}: missing column {', '.join(missing)}; got {', '.join(sorted(names))}")
    if training:
        _check_meaning(batch, names, where)


def _has_inner_nulls(column: pa.Array) -> bool:
    """Whether a list of structs lacks a field somewhere, which its type forbids and Arrow does not check."""
    if not (pa.types.is_large_list(column.type) and pa.types.is_struct(column.type.value_type)):
        return False
    values = column.flatten()
    return bool(values.null_count) or any(values.field(i).null_count for i in range(values.type.num_fields))


def _check_meaning(batch: pa.RecordBatch, names: set[str], where: str) -> None:
    for field in batch.schema:
        known = KNOWN_COLUMNS.get(field.name)
        if known is None:
            continue
        if not field.type.equals(known.type):
            raise SchemaError(f"{where}: column {field.name}: expected {known.type}, got {field.type}")
        if not known.nullable and batch.column(field.name).null_count:
            raise SchemaError(f"{where}: column {field.name} has nulls; it must be filled for every row")
        if _has_inner_nulls(batch.column(field.name)):
            raise SchemaError(f"{where}: column {field.name} has nulls inside its lists; they must be filled")
    if {"tokens", "mask", "logprobs"} <= names:
        lengths = pc.list_value_length(batch.column("tokens"))
        for name in ("mask", "logprobs"):
            if not pc.list_value_length(batch.column(name)).equals(lengths):
                raise SchemaError(f"{where}: {name} and tokens must have one length in every row")
    for name in ("reward", "advantage"):
        if name in names and pa.types.is_floating(batch.schema.field(name).type):
            finite = pc.is_finite(batch.column(name))
            if len(batch) and not pc.all(finite).as_py():
                bad = finite.to_pylist().index(False)
                raise RewardError(
                    f"{where}: {name}: expected a finite float, got {batch.column(name)[bad]} (line {bad})"
                )
