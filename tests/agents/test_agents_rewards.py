"""A finished row is scored once; a failed one leaves its group's baseline; nothing is scored 0 by accident."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import trio
from agents_support import Cut, call, lookup, lookup_template, play

from streamrl_agents.config import RewardConfig
from streamrl_agents.rewards import Scorer, run_reward_worker
from streamrl_queue import QueueConfig, Task, TransferQueue, open_broker, schema, training_flow
from streamrl_queue.errors import ConfigError, LeaseExpired, RewardError
from streamrl_queue.nursery import open_nursery, run
from streamrl_queue.waits import Wait, Waits

TASK = {"keys": ["ab"], "value": 42}
HERE = "test_agents_rewards"


def brevity(turns: int) -> float:
    return 1.0 / turns


def judge(task: dict[str, Any], answer: str, text: str) -> float:
    assert text.startswith("<|user|>")
    return float(str(task["value"]) in answer)


HELD_UP = threading.Event()


def held_up(turns: int) -> float:
    assert HELD_UP.wait(20)
    return 1.0


def broken(status: str) -> float:
    raise RuntimeError("no judge today")


def endless(status: str) -> float:
    return float("nan")


def unknown(anser: str) -> float:
    return 0.0


class Queue:
    """A reward stage with given rows: what is written and dropped is kept; it ends the worker when it is empty."""

    def __init__(self, rows: list[dict[str, Any]], stop: Callable[[], None], expired: bool = False) -> None:
        self.rows, self.stop, self.expired = rows, stop, expired
        self.written: dict[int, float] = {}
        self.parts: dict[int, Any] = {}
        self.dropped: dict[str, list[int]] = {}
        self.asked: list[str] = []
        self.gauges: dict[str, float] = {}

    def report(self, activity: str | None = None, **gauges: float) -> None:
        self.gauges.update(gauges)

    def waiting(self, what: str, *, row: int) -> AbstractContextManager[Wait]:
        return Waits(time.time).waiting(what, row=row)

    async def lease(self, stage: str, *, rows: int, wait: float, columns: Sequence[str]) -> Any:
        assert stage == "reward"
        await trio.lowlevel.checkpoint()
        taken, self.rows = self.rows[:rows], self.rows[rows:]
        if not taken:
            self.stop()
            return None
        self.asked = list(columns)
        lines = [{"row": r["row"], **{name: r[name] for name in columns}} for r in taken]
        return SimpleNamespace(id=1, batch=pa.RecordBatch.from_pylist(lines))

    async def write(self, lease: Any, batch: pa.RecordBatch) -> None:
        if self.expired:
            raise LeaseExpired("rows 0: leased by scorer-1 since")
        schema.check(batch, ["reward", "reward_parts"], "test", training=True)
        for line in batch.to_pylist():
            self.written[line["row"]] = line["reward"]
            self.parts[line["row"]] = dict(line["reward_parts"])

    async def extend(self, lease: Any) -> tuple[int, ...]:
        raise LeaseExpired("lease 1 is over")

    async def drop(self, lease: Any, rows: Sequence[int], *, reason: str) -> None:
        self.dropped.setdefault(reason, []).extend(rows)


def row(number: int, status: str = "completed", outcome: float | None = 1.0) -> dict[str, Any]:
    return {"row": number, "status": status, "outcome": outcome, "turns": 2}


def with_deadline(test: Callable[[], Awaitable[None]], seconds: float) -> None:
    async def bounded() -> None:
        with trio.fail_after(seconds):
            await test()

    run(bounded)


def work(rows: list[dict[str, Any]], scorer: Scorer | None = None, *, expired: bool = False) -> Queue:
    async def main() -> Queue:
        with trio.CancelScope() as scope:
            queue = Queue(rows, scope.cancel, expired)
            await run_reward_worker(queue, scorer or Scorer(), RewardConfig(rows=3))
        return queue

    return trio.run(main)


def test_rows_are_scored_and_failed_ones_are_dropped_with_their_status() -> None:
    queue = work(
        [
            row(0, outcome=0.5),
            row(1, "truncated_length", None),
            row(2, "error_env", None),
            row(3, "error_timeout", None),
            row(4, "aborted", None),
            row(5, "truncated_turns", None),
            row(6, "error_env", None),
        ]
    )
    assert queue.written == {0: 0.5, 1: 0.0, 5: 0.0}
    assert queue.dropped == {"error_env": [2, 6], "error_timeout": [3], "aborted": [4]}
    assert queue.asked == ["outcome", "status"]
    assert queue.gauges["scored"] == 3.0


def test_through_a_real_queue_rows_are_scored_failed_ones_dropped_and_nothing_is_lost(tmp_path: Path) -> None:
    flow = training_flow(QueueConfig(), rows_per_step=2)
    scored = [play(lookup(), f"Answer: {n}", task=TASK, template=lookup_template()) for n in (42, 41)]
    failed = play(lookup(), task={}, template=lookup_template())

    async def main() -> None:
        async with (
            open_broker(flow, tmp_path / "journal", bind=f"ipc://{tmp_path}/q") as broker,
            TransferQueue.connect(broker.address, role="scorer") as queue,
        ):
            await queue.put([Task(env="lookup", task=TASK)], members=3, split="eval")
            await queue.commit_version(await queue.begin_version(0, None), "digest")
            lease = await queue.lease("rollout", rows=3, wait=10)
            assert lease is not None
            await queue.write(lease, schema.trajectory_batch(lease.ids, [*scored, failed]))
            async with open_nursery() as nursery:
                nursery.start_soon(run_reward_worker, queue, Scorer())
                done = await queue.lease("evaluate", rows=2, at_least=2, wait=10)
                nursery.cancel_scope.cancel()
            assert done is not None
            assert done.batch is not None
            assert sorted(done.batch.column("reward").to_pylist()) == [0.0, 1.0]
            statistics = await queue.statistics()
            statistics.check()
            assert statistics.dropped == {"error_env": 1}

    with_deadline(main, 30)


def test_rows_that_end_while_they_are_scored_cost_the_worker_none_of_the_others(tmp_path: Path) -> None:
    flow = training_flow(QueueConfig(partial_members=2, straggler_seconds=0.05), rows_per_step=4)
    episode = play(lookup(), "Answer: 42", task=TASK, template=lookup_template())
    failed = play(lookup(), task={}, template=lookup_template())

    async def main() -> None:
        async with (
            open_broker(flow, tmp_path / "journal", bind=f"ipc://{tmp_path}/q") as broker,
            TransferQueue.connect(broker.address) as queue,
        ):
            await queue.commit_version(await queue.begin_version(0, None), "digest")
            await queue.put([Task(env="lookup", task=TASK, index=i) for i in range(2)], members=4)
            lease = await queue.lease("rollout", rows=8)
            assert lease is not None
            # The third row of the first group will be a straggler, and so will the fourth, which is dropped on its own.
            episodes = [episode] * 3 + [failed] + [episode] * 4
            await queue.write(lease, schema.trajectory_batch(lease.ids, episodes))
            fast = await queue.lease("reward", rows=2)
            assert fast is not None
            await queue.write(fast, schema.reward_batch(fast.ids, [0.0, 1.0], [{}, {}]))
            async with open_nursery() as nursery:
                HELD_UP.clear()
                nursery.start_soon(run_reward_worker, queue, Scorer({f"{HERE}:held_up": 1.0}))
                ready = await queue.lease("advantage", rows=1, wait=10)
                assert ready is not None
                assert ready.ids == fast.ids
                HELD_UP.set()
                others = await queue.lease("advantage", rows=1, wait=10)
                nursery.cancel_scope.cancel()
            assert others is not None
            assert [(row.row, row.attempt) for row in others.rows] == [(row, 1) for row in lease.ids[4:]]
            statistics = await queue.statistics()
            statistics.check()
            assert statistics.dropped == {"straggler": 2}

    with_deadline(main, 30)


def test_a_completed_row_without_an_outcome_is_an_error_and_not_0(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        queue = work([row(0, outcome=None)])
    assert (queue.written, queue.dropped) == ({}, {"error_reward": [0]})


def test_a_scorer_that_raises_costs_its_row_and_is_never_0(caplog: pytest.LogCaptureFixture) -> None:
    queue = work([row(0)], Scorer({f"{HERE}:broken": 1.0}))
    assert (queue.written, queue.dropped) == ({}, {"error_reward": [0]})
    assert "no judge today" in caplog.text


def test_rows_that_went_to_another_worker_are_left_to_it() -> None:
    queue = work([row(0), row(1)], expired=True)
    assert queue.gauges["scored"] == 0.0


def test_a_reward_is_the_weighted_sum_and_its_parts_are_kept() -> None:
    queue = work([row(0, outcome=1.0)], Scorer({"outcome": 2.0, f"{HERE}:brevity": -0.5}))
    assert queue.written == {0: 1.75}
    assert queue.parts == {0: {"outcome": 1.0, f"{HERE}:brevity": 0.5}}
    assert queue.asked == ["outcome", "status", "turns"]


def test_a_function_may_judge_the_answer_of_a_recorded_row() -> None:
    template = lookup_template()
    trajectory = play(lookup(), call("get", key="ab"), "Answer: 42", task=TASK, template=template)
    scorer = Scorer({f"{HERE}:judge": 1.0}, template=template)
    line = {"status": trajectory.status, "outcome": 0.0, "tokens": trajectory.tokens, "mask": trajectory.mask}
    assert scorer.columns == ["mask", "outcome", "status", "task", "tokens"]
    assert scorer.score({**line, "task": b'{"value": 42}'})[0] == 1.0
    assert scorer.score({**line, "task": b'{"value": 43}'})[0] == 0.0


def test_the_answer_of_a_row_that_sampled_nothing_is_empty() -> None:
    template = lookup_template()
    scorer = Scorer({f"{HERE}:judge": 1.0}, template=template)
    tokens = np.asarray(template.encode("<|user|>42<|end|>"), np.int32)
    line = {"status": "truncated_prompt", "outcome": None, "tokens": tokens, "mask": np.zeros(len(tokens), np.uint8)}
    assert scorer.score({**line, "task": b'{"value": 42}'})[0] == 0.0


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(RewardError, match="endless: expected a finite float, got nan"):
        Scorer({f"{HERE}:endless": 1.0}).score(row(0))


def truth(status: str) -> bool:
    return True


def exits(status: str) -> float:
    raise SystemExit(2)


def test_a_reward_of_a_function_is_checked_as_the_environments() -> None:
    with pytest.raises(RewardError, match="truth: expected a finite float, got True"):
        Scorer({f"{HERE}:truth": 1.0}).score(row(0))
    with pytest.raises(RewardError, match=r"reward: expected a float from -1e\+06 to 1e\+06, got 2000000\.0"):
        Scorer({"outcome": 2e6}).score(row(0, outcome=1.0))


def test_a_scorer_that_calls_exit_costs_its_row(caplog: pytest.LogCaptureFixture) -> None:
    queue = work([row(0)], Scorer({f"{HERE}:exits": 1.0}))
    assert (queue.written, queue.dropped) == ({}, {"error_reward": [0]})
    assert "raised SystemExit(2)" in caplog.text


def test_a_function_that_asks_for_what_no_row_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected parameters out of .*; got anser"):
        Scorer({f"{HERE}:unknown": 1.0})


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="answer needs the model's tokenizer"):
        Scorer({f"{HERE}:judge": 1.0})


def test_a_configuration_that_cannot_reward_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected at least one reward function"):
        RewardConfig(parts={})
    with pytest.raises(ConfigError, match=r"reward\.parts\.outcome: expected a weight .* got inf"):
        RewardConfig(parts={"outcome": float("inf")})


def test_episodes_go_into_the_stage_as_they_were_recorded() -> None:
    template = lookup_template()
    played = [
        play(lookup(), call("get", key="ab"), "Answer: 42", task=TASK, template=template),
        play(lookup(), "Answer: 41", task=TASK, template=template),
        play(lookup(), Cut("Answer"), task=TASK, template=template),
        play(lookup(), task={}, template=template),
    ]
    batch = schema.trajectory_batch(range(4), played)
    schema.check(batch, schema.TRAJECTORY_COLUMNS.names, "test", training=True)
    queue = work(batch.to_pylist())
    assert queue.written == {0: 1.0, 1: 0.0, 2: 0.0}
    assert queue.dropped == {"error_env": [3]}


def test_scoring_tells_which_function_is_at_work() -> None:
    told: list[str] = []
    Scorer({"outcome": 1.0, f"{HERE}:brevity": 0.5}).score(
        {"outcome": 1.0, "status": "completed", "turns": 2}, told.append
    )
    assert told == ["scores with outcome", f"scores with {HERE}:brevity"]
