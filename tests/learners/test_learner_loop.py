"""The loop commits every step, in the right order, and ends loudly when it must."""

from __future__ import annotations

import math

import pytest
import torch
from learner_fakes import FakeQueue, make_policy, make_row

from streamrl_learners.algorithms.metrics import Tally
from streamrl_learners.algorithms.pieces import Algorithm
from streamrl_learners.checkpoint import Checkpoints, complete_steps
from streamrl_learners.config import LearnerConfig
from streamrl_learners.ledger import Ledger
from streamrl_learners.loop import Training, train
from streamrl_learners.objective import Objective
from streamrl_learners.optimise import NotFinite, Optimiser, Progress
from streamrl_learners.ranks import Ranks
from streamrl_learners.report import Reporter
from streamrl_learners.stream import Stream
from streamrl_queue.errors import LeaseExpired, NoProgress


class FakePublisher:
    last, waited_seconds = None, 0.0

    def __init__(self, log):
        self.log = log

    def publish(self, policy, step):
        self.log.append(("publish", step))


def make_training(queue: FakeQueue, tmp_path, *, should_stop=lambda: False, **changes) -> tuple[Training, list[dict]]:
    config = LearnerConfig(**({"rows_per_step": 4, "checkpoint_every": 2, "steps": 10} | changes))
    policy, tally, ranks, emitted = make_policy(), Tally(), Ranks(), list[dict]()
    optimiser = Optimiser(policy, config, tally, ranks)
    checkpoints = Checkpoints(tmp_path / "checkpoints", config.keep_checkpoints, ranks)
    publisher = FakePublisher(queue.log)
    training = Training(
        policy=policy,
        stream=Stream(queue, config, Algorithm(), tally, should_stop=should_stop),
        objective=Objective(Algorithm(), tally),
        optimiser=optimiser,
        ledger=Ledger(queue, checkpoints, policy, optimiser.adamw, ranks, every=config.checkpoint_every),
        publisher=publisher,
        reporter=Reporter(queue, publisher, emitted.append, ranks),
        progress=Progress(config.no_signal_steps),
    )
    return training, emitted


def test_commit_checkpoint_retire_publish_come_in_this_order(tmp_path):
    queue = FakeQueue([make_row(i) for i in range(16)])
    run, emitted = make_training(queue, tmp_path)
    assert train(run, 1, 3) == 3
    order = [entry for entry in queue.log if entry[0] in ("commit", "retire", "publish")]
    assert order == [
        ("commit", 1, 4),
        ("publish", 1),
        ("commit", 2, 4),
        ("retire", 2),
        ("publish", 2),
        ("commit", 3, 4),
        ("publish", 3),
    ]
    assert [metrics["step"] for metrics in emitted] == [1, 2, 3]
    wanted = {"reward_mean", "loss", "lag_mean", "kl", "clip_share", "ess", "tokens", "tokens_per_second", "idle_share"}
    assert wanted <= emitted[0].keys()
    assert all(math.isfinite(value) for metrics in emitted for value in metrics.values())


def test_a_learner_that_lost_its_rows_says_why_and_what_to_do(tmp_path, monkeypatch):
    queue = FakeQueue([make_row(i) for i in range(4)])
    run, _ = make_training(queue, tmp_path)

    def refuse(step, rows):
        raise LeaseExpired("row 0 is not leased to this session for this step")

    monkeypatch.setattr(queue, "commit", refuse)
    with pytest.raises(LeaseExpired, match=r"step 1: .*silent for longer than queue\.session_seconds.*--resume.*row 0"):
        train(run, 1, 1)


def test_rows_are_retired_through_the_oldest_checkpoint_that_is_kept(tmp_path):
    queue = FakeQueue([make_row(i) for i in range(24)])
    run, _ = make_training(queue, tmp_path, keep_checkpoints=2)
    train(run, 1, 6)
    assert [entry for entry in queue.log if entry[0] == "retire"] == [("retire", 2), ("retire", 2), ("retire", 4)]


def test_every_step_moves_the_weights(tmp_path):
    run, _ = make_training(FakeQueue([make_row(i) for i in range(8)]), tmp_path)
    before = [p.detach().clone() for p in run.policy.parameters()]
    train(run, 1, 1)
    assert all(not torch.equal(a, b) for a, b in zip(before, run.policy.parameters(), strict=True))


def test_a_step_without_signal_is_skipped_counted_and_still_committed_and_published(tmp_path):
    queue = FakeQueue([make_row(i, advantage=0.0) for i in range(4)] + [make_row(i) for i in range(4, 8)])
    run, emitted = make_training(queue, tmp_path)
    before = [p.detach().clone() for p in run.policy.parameters()]
    train(run, 1, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, run.policy.parameters(), strict=True))
    assert emitted[0]["skipped"] == 1
    assert {("commit", 1, 4), ("publish", 1)} <= set(queue.log)
    train(run, 2, 2)
    assert emitted[1]["skipped"] == 0


def test_steps_in_a_row_without_signal_end_the_run_with_their_counts(tmp_path):
    empty = {"mask": [0] * 3, "tokens": [1] * 3, "logprobs": [math.nan] * 3}
    import numpy as np

    from streamrl_queue.schema import Segment

    empty = {name: np.asarray(value) for name, value in empty.items()} | {"segments": (Segment(0, 3),)}
    queue = FakeQueue([make_row(i, advantage=0.0) for i in range(8)] + [make_row(i, **empty) for i in range(8, 12)])
    run, _ = make_training(queue, tmp_path, no_signal_steps=3)
    with pytest.raises(
        NoProgress,
        match=r"3 consecutive steps \(1 to 3\).* 12 rows, 8 with advantage 0, 4 without a sampled token",
    ):
        train(run, 1, 10)
    assert ("commit", 3, 4) in queue.log


def test_a_nan_ends_the_run_before_it_reaches_the_weights_and_names_the_step(tmp_path):
    queue = FakeQueue([make_row(i) for i in range(8)])
    run, _ = make_training(queue, tmp_path)
    train(run, 1, 1)
    with torch.no_grad():
        run.policy.lm.model.norm.weight.fill_(math.nan)
    before = run.policy.lm.model.embed_tokens.weight.detach().clone()
    with pytest.raises(NotFinite, match="step 2: loss: expected a finite number, got nan"):
        train(run, 2, 2)
    assert torch.equal(before, run.policy.lm.model.embed_tokens.weight)
    assert ("commit", 2, 4) not in queue.log


def test_a_stop_request_ends_the_run_after_the_last_whole_step(tmp_path):
    queue = FakeQueue([make_row(i) for i in range(16)], arrivals=[4, 2, 0])
    run, _ = make_training(queue, tmp_path, should_stop=lambda: queue.leases >= 3)
    assert train(run, 1, 10) == 1
    run.ledger.checkpoint(1)
    assert queue.log[-1] == ("retire", 1)
    assert ("commit", 2, 4) not in queue.log
    assert ("release", (4, 5)) in queue.log


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    rows = [make_row(i) for i in range(24)]
    straight, _ = make_training(FakeQueue(rows), tmp_path / "a")
    train(straight, 1, 4)
    first, _ = make_training(FakeQueue(rows), tmp_path / "b")
    train(first, 1, 3)
    queue = FakeQueue(rows[8:])
    second, _ = make_training(queue, tmp_path / "b")
    assert second.ledger.resume() == 2
    assert ("reconcile", 2) in queue.log
    train(second, 3, 4)
    for a, b in zip(straight.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_room_is_made_by_a_checkpoint_and_then_by_the_older_ones(tmp_path):
    queue = FakeQueue([make_row(i) for i in range(20)])
    run, _ = make_training(queue, tmp_path)
    run.ledger.make_room(0)
    train(run, 1, 5)
    steps = []
    for _ in range(4):
        run.ledger.make_room(5)
        steps.append(complete_steps(tmp_path / "checkpoints"))
    assert steps == [[4, 5], [5], [5], [5]]
    assert [entry for entry in queue.log if entry[0] == "retire"] == [("retire", step) for step in (2, 2, 4, 5)]


def test_without_a_checkpoint_a_resumed_run_starts_over(tmp_path):
    queue = FakeQueue([])
    run, _ = make_training(queue, tmp_path)
    assert run.ledger.resume() == 0
    assert queue.log == [("reconcile", 0)]


def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_share(tmp_path):
    queue = FakeQueue([make_row(i) for i in range(40)])
    run, emitted = make_training(queue, tmp_path, learning_rate=1.0, warmup_steps=5, final_learning_rate_share=0.2)
    train(run, 1, 10)
    rates = [metrics["learning_rate"] for metrics in emitted]
    assert rates[0] == pytest.approx(0.2)
    assert rates[4] == pytest.approx(1 - 0.8 * 0.4)
    assert rates[9] == pytest.approx(1 - 0.8 * 0.9)
    assert rates.index(max(rates)) == 4


def test_a_warm_up_longer_than_the_run_ends_with_it(tmp_path):
    queue = FakeQueue([make_row(i) for i in range(40)])
    run, emitted = make_training(queue, tmp_path, learning_rate=1.0, warmup_steps=50, final_learning_rate_share=1.0)
    train(run, 1, 10)
    assert [metrics["learning_rate"] for metrics in emitted] == pytest.approx([step / 10 for step in range(1, 11)])
