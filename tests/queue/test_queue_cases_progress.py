"""Whatever dies, is given back or is lost: once all workers live again, some step can always be filled."""

from __future__ import annotations

import random

import pytest
from test_queue_rows import Driver

from streamrl_queue import snapshot
from streamrl_queue.config import QueueConfig, training_flow
from streamrl_queue.events import Granted, Put

WALKS = 300
MOVES = 120
SESSIONS = ("a", "b", "c")


class Walk:
    """Random moves of producers, scorers and a learner; then all of them do their work."""

    def __init__(self, seed: int, *, losses: bool) -> None:
        self.random = random.Random(f"progress/{seed}")
        self.members = self.random.choice((2, 3, 4))
        self.rows_per_step = self.members * self.random.choice((1, 2, 3))
        self.staleness = self.random.choice((0, 1, 2, 3))
        config = QueueConfig(max_staleness=self.staleness, max_deliveries=self.random.choice((2, 3, 50)))
        self.driver = Driver(training_flow(config, rows_per_step=self.rows_per_step))
        self.rows = self.driver.rows
        self.tasks = self.durable = 0
        self.held: list[Granted] = []
        self.moves = [self.feed, self.lease, self.lease, self.write, self.write, self.learn, self.train, self.publish]
        self.moves += [self.die, self.give_up, self.save, self.go_back] if losses else [self.save, self.go_back]
        self.driver.publish(0)

    @property
    def stale(self) -> int:
        return self.rows.statistics().dropped.get("stale", 0)

    def feed(self) -> None:
        if self.rows.statistics().waiting < 4 * self.rows_per_step:
            self._put(self.random.randint(1, 3))

    def _put(self, groups: int) -> None:
        keys = [f"k{self.tasks + i}" for i in range(groups)]
        self.tasks += groups
        event, _, _ = self.rows.put(
            0.0,
            keys,
            ["env"] * groups,
            members=self.members,
            split="train",
            priority=self.random.choice((0, 0, 1)),
            sources={},
        )
        assert isinstance(event, Put)
        self.driver.do(event)

    def lease(self) -> None:
        stage = self.random.choice(("rollout", "rollout", "reward", "advantage"))
        lease = self.driver.lease(stage, self.random.randint(1, 8), self.random.choice(SESSIONS))
        if lease is not None:
            self.held.append(lease)

    def _some(self) -> tuple[Granted, tuple[int, ...]] | None:
        self.held = [lease for lease in self.held if lease.lease in self.rows.leases]
        if not self.held:
            return None
        lease = self.random.choice(self.held)
        rows = sorted(self.rows.leases[lease.lease].rows)
        return lease, tuple(self.random.sample(rows, self.random.randint(1, len(rows))))

    def write(self) -> None:
        if some := self._some():
            self.driver.write(*some)

    def give_up(self) -> None:
        if some := self._some():
            lease, rows = some
            if self.random.random() < 0.5:
                self.driver.do(self.rows.drop(0.0, lease.session, lease.lease, rows, "test"))
            else:
                self.driver.do(self.rows.release(0.0, lease.session, lease.lease, rows, "released", "test"))

    def learn(self) -> None:
        taken = sum(len(lease.rows) for lease in self.rows.leases.values() if lease.stage == "learn")
        if taken < self.rows_per_step:
            most = self.random.randint(1, self.rows_per_step - taken)
            self.driver.lease("learn", most, "learner", self.rows.step + 1)

    def train(self) -> None:
        rows = [id for lease in self.rows.leases.values() if lease.stage == "learn" for id in lease.rows]
        if len(rows) == self.rows_per_step:
            self.driver.do(self.rows.commit(0.0, "learner", self.rows.step + 1, rows))

    def publish(self) -> None:
        self.driver.publish(self.rows.step)

    def die(self) -> None:
        self.driver.do(*self.rows.end_session(0.0, self.random.choice((*SESSIONS, "learner")), "killed"))

    def save(self) -> None:
        self.durable = self.rows.step
        self.driver.do(self.rows.retire(0.0, self.durable))

    def go_back(self) -> None:
        if self.random.random() < 0.3:
            self.driver.do(self.rows.reconcile(0.0, self.durable))
            self.driver.publish(self.durable)

    def restart(self) -> None:
        self.rows = self.driver.rows = snapshot.load(snapshot.dump(self.rows), now=0.0)

    def work(self) -> bool:
        """Everybody does all that can be done; tells whether something was done."""
        before = len(self.driver.events)
        if self.rows.statistics().waiting < 3 * self.rows_per_step:
            self._put(3)
            before += 1
        for lease in list(self.rows.leases.values()):
            if lease.stage != "learn":
                rows = tuple(sorted(lease.rows))
                granted = Granted(0.0, lease.id, lease.stage, lease.session, rows, (), None, self.rows.version)
                self.driver.write(granted)
        for stage in ("advantage", "reward", "rollout"):
            while self.driver.lease(stage, self.random.randint(1, 8), "worker") is not None:
                pass
        if self.rows.version_step(self.rows.version) != self.rows.step:
            self.publish()
        self.learn()
        self.train()
        return len(self.driver.events) > before

    def run(self) -> None:
        for _ in range(MOVES):
            self.random.choice(self.moves)()
        if self.random.random() < 0.5:
            self.restart()
        wanted = self.rows.step + self.staleness + 3
        while self.rows.step < wanted:
            assert self.work(), f"step {self.rows.step + 1} can never be filled: {self.rows.statistics()}"
        self.rows.statistics().check()


@pytest.mark.parametrize("losses", [False, True])
def test_when_all_workers_live_some_step_can_always_be_filled(losses: bool) -> None:
    for seed in range(WALKS):
        walk = Walk(seed, losses=losses)
        walk.run()
        lost = sum(walk.rows.statistics().dropped.values()) + sum(walk.rows.statistics().dead.values()) - walk.stale
        # A lost row leaves a place for a part of a group only: the rest of that group may come too late.
        assert walk.stale <= lost * (walk.members - 1), f"seed {seed}"
        if not losses:
            assert walk.stale == 0, f"seed {seed}: with `wait`, what is started is trained in time"


def test_a_group_that_has_begun_is_finished_although_one_that_has_not_queues_before_it() -> None:
    driver = Driver(training_flow(QueueConfig(max_staleness=0), rows_per_step=8))
    driver.publish(0)
    driver.put("waits", "lacks one", "whole", "lacks three")
    # After losses all places of the bound are taken, four of them by rows of groups that lack members.
    begun = (5, 6, 7, 9, 10, 11, 12, 13)
    lease = Granted(0.0, 1, "rollout", "s", (1, *begun), (1, 2, 3, 4), None, 1)
    driver.do(lease)
    driver.do(driver.rows.release(0.0, "s", lease.lease, (1,), "released", "drain"))
    driver.write(lease, begun)
    driver.run_through("reward")
    driver.run_through("advantage")
    whole = driver.lease("learn", step=1)
    assert whole
    assert whole.rows == (9, 10, 11, 12)
    missing = driver.lease("rollout")
    assert missing
    assert missing.rows == (8,)
    driver.write(missing)
    driver.run_through("reward")
    driver.run_through("advantage")
    rest = driver.lease("learn", step=1)
    assert rest
    assert rest.rows == (5, 6, 7, 8)


def test_rows_whose_grant_the_disk_refused_are_the_next_to_be_granted() -> None:
    driver = Driver(training_flow(QueueConfig(), rows_per_step=8))
    driver.publish(0)
    driver.put("a", "b")
    refused = driver.rows.lease(0.0, "s", "rollout", rows=4)
    assert isinstance(refused, Granted)
    again = driver.lease("rollout", rows=4)
    assert again
    assert again.rows == refused.rows
