"""Rows, a tiny policy, and a queue in memory, for the learner's tests."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import torch

from streamrl_learners import tiny
from streamrl_learners.batches import Row
from streamrl_learners.config import TinyModel
from streamrl_learners.model import Policy
from streamrl_queue import Lease, Version
from streamrl_queue.batches import RowKeys
from streamrl_queue.schema import Segment, Span
from streamrl_queue.waits import Wait, Waits

VOCAB = 40


def free_address() -> str:
    """`host:port` that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


MODEL = TinyModel(hidden=16, layers=2, heads=2, kv_heads=1, intermediate=24, max_positions=128)


def config_json(vocab: int = VOCAB) -> dict[str, Any]:
    return tiny.config_json(MODEL, vocab_size=vocab, eos_token_id=1, pad_token_id=0)


def make_policy(seed: int = 0, dtype: torch.dtype = torch.float32) -> Policy:
    return Policy(tiny.make(config_json(), seed)).to(dtype)


def write_model_dir(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_bytes(msgspec.json.encode(config_json()))
    (path / "tokenizer.json").write_text("{}")
    return path


def make_row(id: int, seed: int | None = None, **changes: Any) -> Row:
    """A row of random tokens: a prompt, then sampled and tool tokens in turn; NaN where nobody sampled."""
    rng = np.random.default_rng(id if seed is None else seed)
    n = int(rng.integers(4, 24))
    mask = (rng.random(n) < 0.6).astype(np.uint8)
    mask[0], mask[-1] = 0, 1
    logprobs = np.where(mask == 1, -3.7 + 0.3 * rng.standard_normal(n), np.nan).astype(np.float32)
    values: dict[str, Any] = {
        "id": id,
        "tokens": rng.integers(0, VOCAB, n).astype(np.int32),
        "mask": mask,
        "logprobs": logprobs,
        "spans": (Span(0, 1, 1),),
        "segments": (Segment(0, n),),
        "temperature": 1.0,
        "reward": float(rng.random()),
        "advantage": float(rng.standard_normal()),
    }
    values |= changes
    return Row(**(values | {"lags": changes.get("lags", np.zeros(len(values["tokens"]), np.int64))}))


def make_batch(rows: Sequence[Row]) -> pa.RecordBatch:
    """The Arrow batch that the queue would bring with a lease of stage learn."""
    from streamrl_queue.schema import SEGMENT_TYPE, SPAN_TYPE

    def structs(items: Sequence[msgspec.Struct]) -> list[dict[str, int]]:
        return [{f: getattr(item, f) for f in item.__struct_fields__} for item in items]

    return pa.RecordBatch.from_arrays(
        [
            pa.array([r.id for r in rows], pa.uint64()),
            pa.array([r.tokens for r in rows], pa.large_list(pa.int32())),
            pa.array([r.mask for r in rows], pa.large_list(pa.uint8())),
            pa.array([r.logprobs for r in rows], pa.large_list(pa.float32())),
            pa.array([structs(r.spans) for r in rows], pa.list_(SPAN_TYPE)),
            pa.array([structs(r.segments) for r in rows], pa.list_(SEGMENT_TYPE)),
            pa.array([[("temperature", r.temperature)] for r in rows], pa.map_(pa.string(), pa.float64())),
            pa.array([r.reward for r in rows], pa.float64()),
            pa.array([r.advantage for r in rows], pa.float32()),
        ],
        names=["row", "tokens", "mask", "logprobs", "versions", "segments", "sampling", "reward", "advantage"],
    )


class FakeQueue:
    """The part of `BlockingTransferQueue` that a learner's loop uses. `arrivals`: how many rows each lease finds."""

    def __init__(self, rows: Sequence[Row], arrivals: Sequence[int] = (), versions: Sequence[Version] = ()) -> None:
        self.rows = {row.id: row for row in rows}
        self.ready = [row.id for row in rows]
        self.arrivals = list(arrivals)
        self.known = tuple(versions) or (Version(id=1, step=0, parent=None, digest=""),)
        self.log: list[tuple[Any, ...]] = []
        self.on_lease: Callable[[int], None] = lambda count: None
        self.leases = 0

    def report(self, activity: str | None = None, **gauges: float) -> None:
        pass

    def waiting(self, what: str, *, on: str) -> AbstractContextManager[Wait]:
        return Waits(time.time).waiting(what, on=on)

    def lease(self, stage: str, *, rows: int, step: int, payload: bool, **options: Any) -> Lease | None:
        self.leases += 1
        self.on_lease(self.leases)
        count = min(rows, self.arrivals.pop(0) if self.arrivals else rows, len(self.ready))
        taken, self.ready = self.ready[:count], self.ready[count:]
        self.log.append(("lease", step, count))
        if not taken:
            return None
        keys = tuple(RowKeys(id, id, 0, 0, "train", len(self.rows[id].tokens)) for id in taken)
        batch = make_batch([self.rows[id] for id in taken]) if payload else None
        return Lease(self.leases, stage, keys, None, 1, 0, batch)

    def fetch(self, rows: Sequence[int], columns: Sequence[str]) -> pa.RecordBatch:
        return make_batch([self.rows[id] for id in rows])

    def release(self, lease: Lease, *, reason: str) -> None:
        self.log.append(("release", lease.ids))

    def commit(self, step: int, rows: Sequence[int]) -> None:
        self.log.append(("commit", step, len(rows)))

    def retire(self, through: int) -> None:
        self.log.append(("retire", through))

    def reconcile(self, step: int) -> int:
        self.log.append(("reconcile", step))
        return 0

    def versions(self) -> tuple[Version, ...]:
        self.log.append(("versions",))
        return self.known
