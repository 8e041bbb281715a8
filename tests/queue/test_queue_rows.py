"""Random interleavings of everything that can happen to rows, checked against the invariants after every event."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl_queue import snapshot
from streamrl_queue.config import Admission, Flow, QueueConfig, Stage, training_flow
from streamrl_queue.errors import LeaseExpired, QueueError, StepConflict, VersionConflict
from streamrl_queue.events import Dropped, Event, Granted
from streamrl_queue.rows import Rows
from streamrl_queue.table import Table

MEMBERS = 4
ROWS_PER_STEP = 8
STALENESS = 2
STAGES = ("rollout", "reward", "advantage", "learn", "evaluate")


def flow(on_stale: str = "wait", max_deliveries: int = 3) -> Flow:
    config = QueueConfig(max_staleness=STALENESS, on_stale=on_stale, max_deliveries=max_deliveries)  # type: ignore[arg-type]
    return training_flow(config, rows_per_step=ROWS_PER_STEP)


class Driver:
    """Applies decisions the way the broker does, and keeps every event."""

    def __init__(self, flow: Flow) -> None:
        self.rows = Rows(flow)
        self.events: list[Event] = []
        self.now = 0.0

    def do(self, *events: Event | None) -> None:
        for event in events:
            if event is not None:
                self.events.append(event)
                self.rows.apply(event, now=self.now, record=len(self.events))

    def put(self, *keys: str, split: str = "train", priority: int = 0) -> None:
        event, _, _ = self.rows.put(
            0.0, keys, ["env"] * len(keys), members=MEMBERS, split=split, priority=priority, sources={}
        )
        self.do(event)

    def lease(self, stage: str, rows: int = 100, session: str = "s", step: int | None = None) -> Granted | None:
        while isinstance(event := self.rows.lease(0.0, session, stage, rows=rows, step=step), Dropped):
            self.do(event)
        self.do(event)
        return event

    def write(self, lease: Granted, rows: tuple[int, ...] | None = None) -> None:
        rows = lease.rows if rows is None else rows
        sampled = lease.stage == "rollout"
        oldest, tokens = ([lease.version] * len(rows), [7] * len(rows)) if sampled else ((), ())
        self.do(self.rows.write(0.0, lease.session, lease.lease, rows, oldest, tokens))

    def publish(self, step: int) -> int:
        event = self.rows.begin_version(0.0, step, self.rows.version or None)
        self.do(event)
        self.do(self.rows.commit_version(0.0, event.version, f"digest-{event.version}"))
        return event.version

    def run_through(self, stage: str) -> None:
        """Pass everything that is ready through one stage."""
        while (lease := self.lease(stage)) is not None:
            self.write(lease)


class Machine(RuleBasedStateMachine):
    """The invariants of the design as sentences; every rule is something a process may do at any moment."""

    flow = flow()

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(self.flow)
        self.granted: list[Granted] = []
        self.tasks = 0
        self.trained: dict[int, int] = {}
        self.durable = 0
        self.driver.publish(0)

    @property
    def rows(self) -> Rows:
        return self.driver.rows

    @rule(groups=st.integers(1, 4), split=st.sampled_from(["train", "train", "train", "eval"]))
    def put(self, groups: int, split: str) -> None:
        self.driver.put(*(f"{split}/{self.tasks + i}" for i in range(groups)), split=split)
        self.tasks += groups

    @rule()
    def put_again(self) -> None:
        before = self.rows.statistics().tasks
        if self.tasks:
            known = list(self.rows.keys)[:2]
            self.driver.put(*known)
        assert self.rows.statistics().tasks == before

    @rule(stage=st.sampled_from(STAGES), rows=st.integers(1, 12), session=st.sampled_from(["a", "b"]))
    def lease(self, stage: str, rows: int, session: str) -> None:
        step = self.rows.step + 1 if stage == "learn" else None
        lease = self.driver.lease(stage, rows, session, step)
        if lease is not None:
            self.granted.append(lease)

    @rule(data=st.data())
    @precondition(lambda self: self.granted)
    def write(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.granted))
        rows = data.draw(st.lists(st.sampled_from(lease.rows), min_size=1, unique=True))
        held = self.rows.leases.get(lease.lease)
        holds = held is not None and set(rows) <= held.rows
        if lease.stage == "learn":
            return
        if holds:
            self.driver.write(lease, tuple(rows))
        elif not self.rows.written_before(lease.lease, rows):
            with pytest.raises(LeaseExpired):
                self.driver.write(lease, tuple(rows))

    @rule(data=st.data(), drop=st.booleans())
    @precondition(lambda self: self.granted)
    def give_up(self, data: st.DataObject, drop: bool) -> None:
        lease = data.draw(st.sampled_from(self.granted))
        if lease.lease not in self.rows.leases:
            return
        rows = data.draw(st.lists(st.sampled_from(sorted(self.rows.leases[lease.lease].rows)), min_size=1, unique=True))
        if drop:
            self.driver.do(self.rows.drop(0.0, lease.session, lease.lease, rows, "test"))
        else:
            self.driver.do(self.rows.release(0.0, lease.session, lease.lease, rows, "released", "test"))

    @rule(session=st.sampled_from(["a", "b"]))
    def process_dies(self, session: str) -> None:
        self.driver.do(*self.rows.end_session(0.0, session, "killed"))

    @rule(seconds=st.floats(1, 100))
    def time_passes(self, seconds: float) -> None:
        self.driver.now += seconds
        self.driver.do(*list(self.rows.expire(self.driver.now, 0.0)))

    @rule(session=st.sampled_from(["a", "b"]))
    def commit(self, session: str) -> None:
        step = self.rows.step + 1
        rows = [
            id
            for lease in self.rows.leases.values()
            if lease.session == session and lease.step == step
            for id in lease.rows
        ]
        if len(rows) < ROWS_PER_STEP:
            return
        for id in rows:
            assert id not in self.trained, "trained twice in the surviving history"
            row = self.rows.rows[id]
            assert row.born < 0 or step - 1 - row.born <= STALENESS, "trained past the staleness bound"
            self.trained[id] = step
        self.driver.do(self.rows.commit(0.0, session, step, rows))
        assert self.rows.commit(0.0, session, step, rows) is None
        with pytest.raises((StepConflict, LeaseExpired)):
            self.rows.commit(0.0, session, step + 1, rows)

    @rule(lag=st.integers(0, 2))
    def publish(self, lag: int) -> None:
        step = max(0, self.rows.step - lag)
        self.driver.publish(max(step, self.rows.version_step(self.rows.version) if lag else step))

    @rule()
    def failed_publish(self) -> None:
        event = self.rows.begin_version(0.0, self.rows.step, None)
        assert event.version not in self.rows.versions
        self.driver.do(event)

    @rule()
    def checkpoint(self) -> None:
        self.durable = self.rows.step
        self.driver.do(self.rows.retire(0.0, self.durable))

    @rule()
    def learner_restarts_from_its_checkpoint(self) -> None:
        self.driver.do(self.rows.reconcile(0.0, self.durable))
        self.trained = {id: step for id, step in self.trained.items() if step <= self.durable}

    @rule()
    def broker_restarts(self) -> None:
        """The fold of the journal is the state."""
        again = Rows(self.rows.flow)
        for number, event in enumerate(self.driver.events, 1):
            again.apply(event, now=self.driver.now, record=number)
        assert picture(again) == picture(self.rows)
        self.driver.rows = again

    @rule()
    def broker_restarts_from_a_snapshot(self) -> None:
        again = snapshot.load(snapshot.dump(self.rows), now=self.driver.now)
        assert picture(again) == picture(self.rows)
        self.driver.rows = again

    def stale(self) -> int:
        return self.rows.statistics().dropped.get("stale", 0)

    @invariant()
    def every_task_is_in_exactly_one_state(self) -> None:
        statistics = self.rows.statistics()
        statistics.check()
        assert self.stale() == 0, "with `wait`, whatever is started is trained in time"
        states = Counter(row.state for row in self.rows.rows.values())
        assert states == Counter(self.rows.census.state_of(row) for row in self.rows.rows.values())
        assert states["leased"] == statistics.leased
        assert states["ready"] == statistics.ready
        assert states["waiting"] == statistics.waiting
        assert states["parked"] == statistics.parked
        assert statistics.trained == len(self.trained)

    @invariant()
    def counters_equal_a_recount(self) -> None:
        rows = self.rows
        open_rows = list(rows.rows.values())
        way = Counter(
            row.born
            for row in open_rows
            if row.split == "train" and row.born >= 0 and row.step is None and "learn" not in row.leases
            if not row.outside
        )
        assert +rows._on_their_way == way
        assert rows.flow.waiting_rows - rows.room() == sum(row.unstarted for row in open_rows)
        handed = Counter(
            lease.step for lease in rows.leases.values() for _ in lease.rows if lease.step and lease.step > rows.step
        )
        assert {s: n for s, n in rows._handed.items() if n and s > rows.step} == handed

    @invariant()
    def a_row_is_leased_once_per_stage_and_its_lease_knows_it(self) -> None:
        held = {(row.id, stage, lease) for row in self.rows.rows.values() for stage, lease in row.leases.items()}
        assert held == {(id, lease.stage, lease.id) for lease in self.rows.leases.values() for id in lease.rows}

    @invariant()
    def ready_rows_can_be_found(self) -> None:
        for stage in self.rows.flow.stages:
            ready = sorted(row.id for row in self.rows.rows.values() if stage.name in row.ready)
            assert sorted(row.id for row in self.rows.peek(stage.name, 1 << 31)) == ready
            counted = self.rows.statistics().stages[stage.name]
            assert (counted.parked, counted.ready)[not stage.parks] == len(ready)

    @invariant()
    def every_record_that_a_row_refers_to_is_counted(self) -> None:
        places = (place.record for row in self.rows.rows.values() for place in row.places.values())
        assert Counter(places) == self.rows.references

    @invariant()
    def versions_in_force_were_committed(self) -> None:
        if self.rows.version:
            assert self.rows.versions[self.rows.version].committed


def picture(table: Table) -> object:
    """All that a restart must bring back."""
    rows = {
        id: (
            row.born,
            row.step,
            row.places,
            row.leases,
            row.attempts,
            {*row.ready},
            row.state,
            row.outside,
        )
        for id, row in table.rows.items()
    }
    leases = {id: (lease.stage, lease.session, lease.rows, lease.step) for id, lease in table.leases.items()}
    counts = +table._on_their_way, +table._from_outside, table._trained_through, table._step_rows, table.references
    groups = {key: (group.id, group.first, group.admitted, {*group.waits}) for key, group in table.keys.items()}
    order = {stage: [row.id for row in table._ready[stage].peek()] for stage in table.stages}
    return rows, leases, table.statistics(), table.versions, groups, table.past_keys, counts, order


TestRows = Machine.TestCase
TestRows.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_late_writer_cannot_overwrite() -> None:
    driver = Driver(flow())
    driver.publish(0)
    driver.put("a")
    first = driver.lease("rollout", session="old")
    assert first
    driver.do(*driver.rows.end_session(0.0, "old", "killed"))
    second = driver.lease("rollout", session="new")
    assert second
    assert second.rows == first.rows
    with pytest.raises(LeaseExpired):
        driver.write(first)
    driver.write(second)
    with pytest.raises(LeaseExpired):
        driver.write(first)


def test_a_repeated_write_by_its_holder_is_a_repetition() -> None:
    driver = Driver(flow())
    driver.publish(0)
    driver.put("a")
    lease = driver.lease("rollout")
    assert lease
    assert not driver.rows.written_before(lease.lease, lease.rows)
    driver.write(lease)
    assert driver.rows.written_before(lease.lease, lease.rows)


def test_a_poison_task_ends_among_the_dead_after_max_deliveries() -> None:
    driver = Driver(flow(max_deliveries=2))
    driver.publish(0)
    driver.put("a")
    for _ in range(2):
        assert driver.lease("rollout", session="p")
        driver.do(*driver.rows.end_session(0.0, "p", "killed"))
    assert driver.lease("rollout") is None
    assert driver.rows.statistics().dead == {"rollout: killed": MEMBERS}


def test_a_release_does_not_count_as_a_lost_delivery() -> None:
    driver = Driver(flow(max_deliveries=2))
    driver.publish(0)
    driver.put("a")
    for _ in range(5):
        lease = driver.lease("rollout")
        assert lease
        driver.do(driver.rows.release(0.0, "s", lease.lease, None, "released", "drain"))
    assert driver.rows.statistics().dead == {}


def test_admission_stops_at_the_bound_and_goes_on_with_the_next_version() -> None:
    driver = Driver(flow())
    driver.publish(0)
    driver.put(*(f"k{i}" for i in range(20)))
    lease = driver.lease("rollout")
    assert lease
    assert len(lease.rows) == (STALENESS + 1) * ROWS_PER_STEP
    assert driver.lease("rollout") is None
    driver.write(lease)
    driver.run_through("reward")
    driver.run_through("advantage")
    batch = driver.lease("learn", step=1)
    assert batch
    driver.do(driver.rows.commit(0.0, "s", 1, batch.rows))
    # Trained, but no version says so yet: rollouts under the old one would be too stale.
    assert driver.lease("rollout") is None
    driver.publish(1)
    more = driver.lease("rollout")
    assert more
    assert len(more.rows) == ROWS_PER_STEP


def test_a_straggler_keeps_its_place_until_the_step_it_must_not_miss() -> None:
    driver = Driver(flow())
    driver.publish(0)
    driver.put(*(f"k{i}" for i in range(6)))
    slow = driver.lease("rollout", rows=MEMBERS)
    fast = driver.lease("rollout")
    assert slow
    assert fast
    driver.write(fast)
    driver.run_through("reward")
    driver.run_through("advantage")
    for step in (1, 2):
        batch = driver.lease("learn", step=step)
        assert batch
        assert len(batch.rows) == ROWS_PER_STEP
        driver.do(driver.rows.commit(0.0, "s", step, batch.rows))
        driver.publish(step)
        driver.put(f"more{step}", f"again{step}")
        driver.run_through("rollout")
        driver.run_through("reward")
        driver.run_through("advantage")
    # Step 3 is the last that the straggler may enter: its four places stay free although others are ready.
    batch = driver.lease("learn", step=3)
    assert batch
    assert len(batch.rows) == ROWS_PER_STEP - MEMBERS
    assert driver.lease("learn", step=3) is None
    driver.write(slow)
    driver.run_through("reward")
    driver.run_through("advantage")
    rest = driver.lease("learn", step=3)
    assert rest
    assert set(rest.rows) == set(slow.rows)


def test_a_group_that_loses_members_is_compared_without_them_or_dropped_when_too_small() -> None:
    driver = Driver(flow())
    driver.publish(0)
    driver.put("a", "b")
    lease = driver.lease("rollout")
    assert lease
    a, b = lease.rows[:MEMBERS], lease.rows[MEMBERS:]
    driver.write(lease)
    reward = driver.lease("reward")
    assert reward
    driver.do(driver.rows.drop(0.0, "s", reward.lease, (a[0], *b[1:]), "error_env"))
    driver.write(reward, (*a[1:], b[0]))
    advantage = driver.lease("advantage")
    assert advantage
    assert advantage.rows == a[1:]
    assert driver.rows.statistics().dropped == {"error_env": 4, "group_too_small": 1}


def test_the_rest_of_a_group_that_was_written_in_part_is_ready_again() -> None:
    driver = Driver(flow())
    driver.publish(0)
    driver.put("a")
    driver.run_through("rollout")
    driver.run_through("reward")
    lease = driver.lease("advantage", session="a")
    assert lease
    driver.write(lease, lease.rows[:1])
    driver.do(*driver.rows.end_session(0.0, "a", "killed"))
    rest = driver.lease("advantage", session="b")
    assert rest
    assert rest.rows == lease.rows[1:]
    driver.write(rest)
    assert driver.rows.statistics().stages["learn"].ready == MEMBERS


def test_a_version_id_is_never_used_twice() -> None:
    driver = Driver(flow())
    first = driver.publish(0)
    failed = driver.rows.begin_version(0.0, 1, first)
    driver.do(failed)
    assert driver.publish(1) == failed.version + 1
    with pytest.raises(VersionConflict):
        driver.rows.commit_version(0.0, failed.version, "late")


def test_a_refused_decision_changes_nothing() -> None:
    driver = Driver(flow())
    driver.publish(0)
    driver.put("a", "b", "c")
    before = picture(driver.rows)
    for refuse in (
        lambda: driver.rows.commit(0.0, "s", 1, [1]),
        lambda: driver.rows.commit(0.0, "s", 7, []),
        lambda: driver.rows.retire(0.0, 3),
        lambda: driver.rows.reconcile(0.0, 3),
        lambda: driver.rows.write(0.0, "s", 99, [1], [], []),
        lambda: driver.rows.lease(0.0, "s", "nowhere", rows=1),
        lambda: driver.rows.lease(0.0, "s", "learn", rows=1),
    ):
        with pytest.raises(QueueError):
            refuse()
    assert driver.rows.lease(0.0, "s", "rollout", rows=100, at_least=100) is None
    assert picture(driver.rows) == before
    lease = driver.lease("rollout", rows=12)
    assert lease
    assert lease.rows == tuple(range(1, 13))


def test_a_stale_row_that_ends_its_group_takes_nothing_out_of_a_grant() -> None:
    """Beside the learner a group stage runs, whose groups are too small without any one of their members."""
    stages = (
        Stage(name="rollout", writes=("tokens",), admits=True),
        Stage(name="compare", reads=("tokens",), writes=("rank",), unit="group", min_members=MEMBERS),
        Stage(name="learn", reads=("tokens",), trains=True, seconds=None),
    )
    bound = Admission(max_staleness=0, rows_per_step=2 * MEMBERS, on_stale="drop")
    driver = Driver(Flow(stages=stages, admission=bound))
    driver.publish(0)
    driver.put("a", "b")
    both = driver.lease("rollout")
    assert both
    assert len(both.rows) == 2 * MEMBERS
    first, *rest = both.rows[:MEMBERS]
    driver.do(driver.rows.release(0.0, "s", both.lease, rest, "released", "test"))
    driver.write(both, (first, *both.rows[MEMBERS:]))
    step = driver.lease("learn", step=1)
    assert step
    driver.do(driver.rows.release(0.0, "s", step.lease, [first], "released", "test"))
    driver.do(driver.rows.commit(0.0, "s", 1, both.rows[MEMBERS:]))
    driver.publish(1)
    late = driver.lease("rollout")
    assert late
    assert late.rows == tuple(rest)
    driver.write(late)
    assert driver.lease("learn", step=2) is None, "all of group a went with its stale row"
    statistics = driver.rows.statistics()
    statistics.check()
    assert statistics.dropped == {"stale": 1, "group_too_small": MEMBERS - 1}
