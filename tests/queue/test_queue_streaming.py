"""Micro-batches for a training loop, from a broker in a thread of its own."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from streamrl_queue import Batch, BlockingTransferQueue, Flow, Stage, StreamingBatches, open_broker
from streamrl_queue.errors import ConfigError, DeadlineExceeded, SchemaError, StepConflict, UnknownName
from streamrl_queue.portal import SessionThread
from streamrl_queue.tensors import collate

FLOW = Flow(
    stages=(
        Stage(name="work", reads=("x",), writes=("tokens", "score")),
        Stage(name="learn", reads=("x", "tokens", "score"), seconds=None, trains=True),
    )
)


@contextmanager
def broker(directory: Path, flow: Flow = FLOW) -> Iterator[str]:
    thread = SessionThread(open_broker(flow, directory / "journal", bind=f"ipc://{directory}/q"))
    try:
        yield thread.opened.result(30)[0].address
    finally:
        thread.close()
        thread.ended.result(30)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[BlockingTransferQueue]:
    with broker(tmp_path) as address, BlockingTransferQueue.connect(address) as queue:
        yield queue


def fill(queue: BlockingTransferQueue, *xs: int) -> None:
    """Rows that are ready to learn: row x has x tokens."""
    queue.put(pa.RecordBatch.from_pydict({"x": list(xs)}))
    lease = queue.lease("work", rows=len(xs), at_least=len(xs), wait=10)
    assert lease is not None
    assert lease.batch is not None
    tokens = pa.array([[x] * x for x in xs], pa.large_list(pa.int32()))
    columns = {"row": lease.batch["row"], "tokens": tokens, "score": [x / 2 for x in xs]}
    queue.write(lease, pa.RecordBatch.from_pydict(columns))


def batches_of(queue: BlockingTransferQueue, **options: Any) -> StreamingBatches:
    return StreamingBatches(
        queue, "learn", **{"rows_per_step": 4, "rows_per_batch": 2, "wait_seconds": 20.0, **options}
    )


def step_of(batches: StreamingBatches) -> list[int]:
    """The x of the rows of one whole step."""
    xs: list[int] = []
    for batch in batches:
        xs += batch["x"].tolist()
        if batch.ends_step:
            return xs
    raise AssertionError("an iteration without an end ended")


def test_a_step_comes_in_batches_of_tensors_and_ends_with_a_commit(queue: BlockingTransferQueue) -> None:
    fill(queue, 3, 1, 2, 4)
    with batches_of(queue) as batches:
        first, second = next(batches), next(batches)
        assert first["tokens"].tolist() == [[3, 3, 3], [1, 0, 0]]
        assert first.masks["tokens"].tolist() == [[True, True, True], [True, False, False]]
        assert (first["tokens"].dtype, first["score"].dtype) == (torch.int64, torch.float32)
        assert first["score"].tolist() == [1.5, 0.5]
        assert [batch.ends_step for batch in (first, second)] == [False, True]
        assert first["row"].tolist() == list(first.rows)
        assert batches.rows == (*first.rows, *second.rows)
        batches.commit(1)
        assert queue.statistics().trained == 4
        assert batches.step == 2


def test_a_step_that_is_whole_and_not_committed_is_not_passed_over(queue: BlockingTransferQueue) -> None:
    fill(queue, *range(1, 9))
    with batches_of(queue) as batches:
        step_of(batches)
        with pytest.raises(StepConflict, match=r"step 1 is whole; .* commit\(1\)"):
            next(batches)
        with pytest.raises(StepConflict, match=r"expected step 1, .* got 2"):
            batches.commit(2)


def test_the_next_batch_is_leased_while_the_loop_is_busy(queue: BlockingTransferQueue) -> None:
    fill(queue, 1, 2, 3, 4)
    with batches_of(queue) as batches:
        next(batches)
        assert batches._ahead is not None
        # Nobody asks for it; it comes.
        lease, _ = batches._ahead.result(20)
        assert len(lease.rows) == 2
        assert queue.statistics().leased == 4


def test_rows_that_are_held_at_the_end_of_the_block_go_back(queue: BlockingTransferQueue) -> None:
    fill(queue, 1, 2, 3, 4)

    def fails() -> None:
        with batches_of(queue) as batches:
            next(batches)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    statistics = queue.statistics()
    assert (statistics.leased, statistics.ready) == (0, 4)
    with batches_of(queue) as batches:
        assert sorted(step_of(batches)) == [1, 2, 3, 4]


def test_a_session_that_ends_gives_its_rows_to_the_next(tmp_path: Path) -> None:
    with broker(tmp_path) as address:
        with BlockingTransferQueue.connect(address) as queue:
            fill(queue, 1, 2, 3, 4)
            next(batches_of(queue))
        with BlockingTransferQueue.connect(address) as queue, batches_of(queue) as batches:
            assert sorted(step_of(batches)) == [1, 2, 3, 4]


def test_who_starts_again_from_a_checkpoint_gets_the_rows_of_all_later_steps_and_no_others(tmp_path: Path) -> None:
    with broker(tmp_path) as address, BlockingTransferQueue.connect(address) as queue:
        fill(queue, *range(1, 17))
        with batches_of(queue) as batches:
            steps = []
            for step in (1, 2, 3):
                steps.append(step_of(batches))
                batches.commit(step)
                if step == 1:
                    batches.checkpointed(step)
            steps.append(next(batches)["x"].tolist())
    # The broker is started again too.
    with broker(tmp_path) as address, BlockingTransferQueue.connect(address) as queue:
        with pytest.raises(StepConflict, match="rows of step 1 are retired"):
            batches_of(queue, after=0)
        with batches_of(queue, after=1) as batches:
            again = []
            for step in (2, 3, 4):
                again += step_of(batches)
                batches.commit(step)
        assert sorted(steps[0] + again) == list(range(1, 17))
        assert queue.statistics().trained == 16


def test_when_rows_run_out_it_says_how_many_are_there_and_the_step_can_be_committed(
    queue: BlockingTransferQueue,
) -> None:
    fill(queue, 1, 2, 3)
    with batches_of(queue, wait_seconds=2.0, linger_seconds=0.1) as batches:
        taken = [len(next(batches).rows), len(next(batches).rows)]
        assert taken == [2, 1]
        with pytest.raises(DeadlineExceeded, match=r"rows of step 1 \(3 of 4 are there\) from the queue's stage learn"):
            next(batches)
        batches.commit(1)
        assert queue.statistics().trained == 3
        # What comes late is of the next step.
        fill(queue, 4)
        assert next(batches).step == 2


def test_rows_that_fit_into_no_tensor_are_refused_by_name_and_go_back(queue: BlockingTransferQueue) -> None:
    queue.put(pa.RecordBatch.from_pydict({"x": pa.array([None], pa.int64())}))
    lease = queue.lease("work", rows=1, wait=10)
    assert lease is not None
    tokens = pa.array([[1]], pa.large_list(pa.int32()))
    columns = {"row": pa.array(lease.ids, pa.uint64()), "tokens": tokens, "score": [0.5]}
    queue.write(lease, pa.RecordBatch.from_pydict(columns))
    with batches_of(queue, rows_per_step=1, rows_per_batch=1) as batches:
        with pytest.raises(SchemaError, match="column x: expected int64 in every place, got a null"):
            next(batches)
        statistics = queue.statistics()
        assert (statistics.leased, statistics.ready) == (0, 1)


def test_a_stage_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    flow = Flow(stages=(Stage(name="work", reads=("x",)),))
    with (
        broker(tmp_path, flow) as address,
        BlockingTransferQueue.connect(address) as queue,
        pytest.raises(UnknownName, match="no stage of this queue trains"),
    ):
        StreamingBatches(queue, "work", rows_per_step=4)


def test_numbers_that_cannot_work_are_refused(queue: BlockingTransferQueue) -> None:
    with pytest.raises(ConfigError, match="rows_per_batch: expected 1 to rows_per_step=4, got 5"):
        batches_of(queue, rows_per_batch=5)
    with pytest.raises(ConfigError, match="linger_seconds: expected more than 0"):
        batches_of(queue, linger_seconds=0)


RAGGED = pa.RecordBatch.from_pydict(
    {
        "ids": pa.array([[1], [], [2, 3]], pa.list_(pa.int32())),
        "logprobs": pa.array([[None], [], [-1.0, -2.0]], pa.large_list(pa.float64())),
        "pair": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.uint8(), 2)),
        "value": pa.array([0.5, None, 1.5]),
        "good": [True, False, True],
        "status": ["a", "b", "c"],
    }
)


def test_ragged_lists_are_values_and_offsets() -> None:
    batch = collate(RAGGED, "ragged")
    assert batch["ids"].tolist() == [1, 2, 3]
    assert batch.offsets["ids"].tolist() == [0, 1, 1, 3]
    assert batch["pair"].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.masks == {}


def test_padded_lists_have_masks_and_the_padding_that_was_asked_for() -> None:
    batch = collate(RAGGED, padding={"ids": -100})
    assert batch["ids"].tolist() == [[1, -100], [-100, -100], [2, 3]]
    assert batch.masks["ids"].tolist() == [[True, False], [False, False], [True, True]]
    assert torch.isnan(batch["logprobs"][0, 0])
    assert batch["logprobs"][1].tolist() == [0, 0]
    assert batch["good"].tolist() == [True, False, True]
    assert torch.isnan(batch["value"][1])


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_a_part_of_a_record_has_its_own_lists_only(layout: Any) -> None:
    part, alone = collate(RAGGED.slice(2, 1), layout), collate(RAGGED.take(pa.array([2])), layout)
    assert {name: tensor.tolist() for name, tensor in part.items()} == {n: t.tolist() for n, t in alone.items()}
    assert part["logprobs"].flatten().tolist() == [-1.0, -2.0]


def test_a_column_that_is_no_number_is_taken_from_arrow() -> None:
    batch = collate(RAGGED)
    assert set(batch) == {"ids", "logprobs", "pair", "value", "good"}
    with pytest.raises(KeyError, match=r"status is string, .* batch.arrow\['status'\]"):
        batch["status"]
    assert batch.arrow["status"].to_pylist() == ["a", "b", "c"]


def test_a_batch_moves_to_a_device_as_a_whole() -> None:
    batch = collate(RAGGED).to("meta")
    assert isinstance(batch, Batch)
    assert {tensor.device.type for tensor in (*batch.values(), *batch.masks.values())} == {"meta"}


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (pa.array([[1], None]), "column it: expected a list in every row, got a null"),
        (pa.array([[1], [None]]), "column it: expected int64 in every place, got a null"),
        (pa.array([1, 2**64 - 1], pa.uint64()), "column it: expected whole numbers below"),
    ],
)
def test_what_no_tensor_can_hold_is_refused_with_its_column(column: pa.Array, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        collate(pa.RecordBatch.from_pydict({"it": column}))


def test_without_torch_the_extra_is_named(queue: BlockingTransferQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'streamrl\[train\]'"):
        batches_of(queue)


def test_the_module_is_imported_without_torch() -> None:
    code = "import sys, streamrl_queue; streamrl_queue.StreamingBatches; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_where_cuda_is_there_batches_are_pinned(queue: BlockingTransferQueue) -> None:
    fill(queue, 1, 2, 3, 4)
    with batches_of(queue) as batches:
        batch = next(batches)
        assert all(tensor.is_pinned() for tensor in (*batch.values(), *batch.masks.values()))
        assert batch.to("cuda")["tokens"].is_cuda
