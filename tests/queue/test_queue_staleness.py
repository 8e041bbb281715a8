"""The staleness bound over many steps: rows finish in any order, versions lag, producers die, the learner goes back."""

from __future__ import annotations

import random

import pytest
from test_queue_rows import ROWS_PER_STEP, STALENESS, Driver, flow

from streamrl_queue.admission import may_train
from streamrl_queue.config import Admission
from streamrl_queue.events import Granted

STEPS = 25
SEEDS = range(60)
EPISODE_SECONDS = 300.0


class Loop:
    """A learner, producers with long-tailed episodes, and everything that may disturb them."""

    def __init__(self, seed: int, disturb: float, on_stale: str = "wait") -> None:
        self.random = random.Random(seed)
        self.driver = Driver(flow(on_stale))
        self.rows = self.driver.rows
        self.disturb = disturb
        self.running: list[tuple[float, int, Granted]] = []
        self.now = 0.0
        self.tasks = 0
        self.checkpoint = 0
        self.lags: dict[int, int] = {}
        self.driver.publish(0)

    def run(self) -> None:
        idle = 0
        while self.rows.step < STEPS:
            before = self.rows.step
            self.produce()
            self.score()
            self.learn()
            if self.random.random() < self.disturb:
                self.random.choice([self.kill_producer, self.restart_learner, self.save])()
            idle = 0 if self.rows.step > before else idle + 1
            assert idle < 2000, f"no step for 2000 rounds: {self.rows.statistics()}"

    def produce(self) -> None:
        while self.rows.statistics().waiting < 2 * ROWS_PER_STEP:
            self.driver.put(f"task-{self.tasks}")
            self.tasks += 1
        session = self.random.choice(["a", "b"])
        if lease := self.driver.lease("rollout", rows=self.random.randint(1, 8), session=session):
            for row in lease.rows:
                length = min(self.random.paretovariate(1.1), EPISODE_SECONDS)
                self.running.append((self.now + length, row, lease))
        self.now += self.random.random()
        for done in [item for item in self.running if item[0] <= self.now]:
            self.running.remove(done)
            _, row, lease = done
            held = self.rows.leases.get(lease.lease)
            if held is not None and row in held.rows:
                self.driver.write(lease, (row,))

    def score(self) -> None:
        for stage in ("reward", "advantage"):
            if self.random.random() < 0.8:
                self.driver.run_through(stage)

    def learn(self) -> None:
        step = self.rows.step + 1
        if self.random.random() < 0.7:
            self.driver.lease("learn", rows=self.random.randint(1, ROWS_PER_STEP), session="learner", step=step)
        mine = [lease for lease in self.rows.leases.values() if lease.step == step]
        rows = [row for lease in mine for row in lease.rows]
        if len(rows) == ROWS_PER_STEP:
            for row in rows:
                self.lags[row] = step - 1 - self.rows.rows[row].born
            self.driver.do(self.rows.commit(0.0, "learner", step, rows))
        if self.random.random() < 0.5 and self.rows.version_step(self.rows.version) != self.rows.step:
            self.driver.publish(self.rows.step)

    def kill_producer(self) -> None:
        session = self.random.choice(["a", "b"])
        self.driver.do(*self.rows.end_session(0.0, session, "killed"))

    def save(self) -> None:
        self.checkpoint = self.rows.step
        self.driver.do(self.rows.retire(0.0, self.checkpoint))

    def restart_learner(self) -> None:
        self.driver.do(self.rows.reconcile(0.0, self.checkpoint))
        self.driver.publish(self.checkpoint)


@pytest.mark.parametrize("disturb", [0.0, 0.05])
def test_with_wait_every_row_that_starts_is_trained_within_the_bound_and_none_is_dropped(disturb: float) -> None:
    for seed in SEEDS:
        loop = Loop(seed, disturb)
        loop.run()
        statistics = loop.rows.statistics()
        statistics.check()
        assert statistics.dropped == {}, f"seed {seed}"
        assert max(loop.lags.values()) <= STALENESS, f"seed {seed}"


def test_with_drop_rows_past_the_bound_are_dropped_and_counted() -> None:
    dropped = 0
    for seed in SEEDS:
        loop = Loop(seed, 0.0, "drop")
        loop.run()
        statistics = loop.rows.statistics()
        statistics.check()
        assert set(statistics.dropped) <= {"stale", "group_too_small"}
        assert max(loop.lags.values()) <= STALENESS
        dropped += statistics.dropped.get("stale", 0)
    assert dropped > 0, "the workload has stragglers, so some must have been dropped"


def test_with_keep_rows_past_the_bound_are_trained() -> None:
    loops = [Loop(seed, 0.0, "keep") for seed in SEEDS]
    for loop in loops:
        loop.run()
        assert loop.rows.statistics().dropped == {}
    assert max(lag for loop in loops for lag in loop.lags.values()) > STALENESS


def test_places_are_kept_for_every_deadline_that_is_still_to_come() -> None:
    bound = Admission(max_staleness=1, rows_per_step=4)
    # Five rows born under step 0 are due by step 2. In step 1, one place must go to one of them.
    assert may_train(bound, born=1, step=1, handed=2, on_their_way={0: 5, 1: 3})
    assert not may_train(bound, born=1, step=1, handed=3, on_their_way={0: 5, 1: 3})
    assert may_train(bound, born=0, step=1, handed=3, on_their_way={0: 5, 1: 3})
    assert not may_train(bound, born=0, step=1, handed=4, on_their_way={0: 5})
