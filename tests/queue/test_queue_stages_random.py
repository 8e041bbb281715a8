"""The random machine of `test_queue_rows` with every kind of stage: groups that go on without stragglers, parked rows,
rows that are put half done, all orders, and a flow that gains stages; beside it a naive model of what is ready when.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from test_queue_rows import MEMBERS, ROWS_PER_STEP, STALENESS, Machine, picture

from streamrl_queue import snapshot
from streamrl_queue.config import Admission, Flow, Order, Stage
from streamrl_queue.errors import LeaseExpired, UnknownName
from streamrl_queue.events import Configured, Dropped, Event, Granted
from streamrl_queue.rows import Rows
from streamrl_queue.state import Group, Row

SECONDS = 20.0
PARTIAL = 3


def rich_flow(play: Order, score: Order, compare: Order) -> Flow:
    bound = Admission(max_staleness=STALENESS, rows_per_step=ROWS_PER_STEP)
    both = ("train", "eval")
    return Flow(
        stages=(
            Stage(name="rollout", reads=("task",), writes=("tokens",), splits=both, admits=True, order=play),
            Stage(name="reward", reads=("tokens",), writes=("reward",), splits=both, order=score),
            Stage(name="feedback", reads=("tokens",), writes=("liked",), parks=True),
            Stage(
                name="advantage",
                reads=("reward",),
                writes=("advantage",),
                unit="group",
                min_members=2,
                partial=PARTIAL,
                straggler_seconds=SECONDS,
                order=compare,
            ),
            Stage(name="learn", reads=("advantage", "liked"), trains=True, seconds=None, order="ready_first"),
            Stage(name="evaluate", reads=("reward",), splits=("eval",)),
        ),
        admission=bound,
    )


class StageMachine(Machine):
    """Everything that may happen to rows of such a flow."""

    flow = rich_flow("freshest", "ready_first", "balanced")

    def __init__(self) -> None:
        super().__init__()
        self.driver.do(Configured(0.0, self.flow))
        # Group and stage → since when enough members are there and others are missing.
        self.since: dict[tuple[int, str], float] = {}
        self.added = 0

    @rule(
        groups=st.integers(1, 2), sampled=st.booleans(), filled=st.sampled_from([("rollout",), ("rollout", "reward")])
    )
    def put_filled(self, groups: int, sampled: bool, filled: tuple[str, ...]) -> None:
        keys = [f"filled/{self.tasks + i}" for i in range(groups)]
        n = groups * MEMBERS
        event, _, _ = self.rows.put(
            0.0,
            keys,
            ["env"] * n,
            members=MEMBERS,
            split="train",
            priority=0,
            sources={},
            filled=filled,
            oldest=[self.rows.version if sampled else -1] * n,
            tokens=range(n),
        )
        self.driver.do(event)
        self.tasks += groups

    @rule(session=st.sampled_from(["a", "b"]), data=st.data())
    @precondition(lambda self: self.rows.keys)
    def lease_by_key(self, session: str, data: st.DataObject) -> None:
        with pytest.raises(UnknownName):
            self.rows.lease(0.0, session, "feedback", rows=3)
        key = data.draw(st.sampled_from(sorted(self.rows.keys)))
        members = [row for row in self.rows.keys[key].members if row.step is None and "feedback" not in row.places]
        parked = [row.id for row in members if self.wants("feedback", row)]
        if members and members[0].split == "eval":
            with pytest.raises(UnknownName):
                self.rows.lease(0.0, session, "feedback", keys=[key])
        elif any("feedback" in row.leases for row in members) or not members:
            with pytest.raises((LeaseExpired, UnknownName)):
                self.rows.lease(0.0, session, "feedback", keys=[key])
        else:
            event = self.rows.lease(0.0, session, "feedback", keys=[key])
            self.driver.do(event)
            rows = list(event.rows) if isinstance(event, Granted) else []
            assert rows == (parked if len(parked) == len(members) else [])
            self.granted += [event] if isinstance(event, Granted) else []

    @rule(seconds=st.floats(1, 100))
    def time_passes(self, seconds: float) -> None:
        self.driver.now += seconds
        for ended in self.rows.expire(self.driver.now, 0.0):
            self.driver.do(ended)
        self.note_waits()
        for dropped in self.rows.stragglers(self.driver.now, 0.0):
            for row in (self.rows.rows[id] for id in dropped.rows):
                since = self.since[row.group.id, "advantage"]
                assert since + SECONDS <= self.driver.now, "dropped before its time"
            self.driver.do(dropped)
        self.note_waits()
        assert all(since + SECONDS > self.driver.now for since in self.since.values()), "waited for too long"

    @rule()
    def broker_restarts(self) -> None:
        again = Rows(self.flow)
        for number, event in enumerate(self.driver.events, 1):
            again.apply(event, now=self.driver.now, record=number)
        self.go_on_with(again)

    @rule()
    def broker_restarts_from_a_snapshot(self) -> None:
        self.go_on_with(snapshot.load(snapshot.dump(self.rows), now=self.driver.now))

    def go_on_with(self, again: Rows) -> None:
        assert picture(again) == picture(self.rows)
        self.driver.rows = again
        self.since = dict.fromkeys(self.since, self.driver.now)

    @rule(at=st.integers(0, 6), order=st.sampled_from(["admission", "ready_first"]), needed=st.booleans())
    @precondition(lambda self: self.added < 2)
    def the_flow_gains_a_stage(self, at: int, order: Order, needed: bool) -> None:
        self.added += 1
        column = f"extra{self.added}"
        stages = [
            msgspec.structs.replace(stage, reads=(*stage.reads, column)) if needed and stage.name == "learn" else stage
            for stage in self.rows.flow.stages
        ]
        stages.insert(at, Stage(name=column, reads=("tokens",), writes=(column,), order=order))
        flow = msgspec.structs.replace(self.rows.flow, stages=tuple(stages))
        leased = self.rows.statistics().leased
        self.driver.do(self.rows.configure(0.0, flow))
        assert self.rows.statistics().leased == leased
        self.since = dict.fromkeys(self.since, self.driver.now)

    @rule(rows=st.integers(1, 9))
    @precondition(lambda self: self.added)
    def pass_the_stages_that_were_added(self, rows: int) -> None:
        for number in range(1, self.added + 1):
            if (lease := self.driver.lease(f"extra{number}", rows, "a")) is not None:
                self.granted.append(lease)
                self.driver.write(lease, lease.rows[: max(1, rows // 2)])

    def stale(self) -> int:
        """Only rows that admission kept no place for may be stale."""
        lost = [row for event in self.driver.events for row in self.stale_rows(event)]
        return sum(row not in self.outside_rows() for row in lost)

    @staticmethod
    def stale_rows(event: Event) -> tuple[int, ...]:
        return event.rows if isinstance(event, Dropped) and event.reason == "stale" else ()

    def outside_rows(self) -> set[int]:
        puts = [event for event in self.driver.events if getattr(event, "filled", ())]
        return {row for put in puts for row in range(put.first_row, put.first_row + len(put.lines) * put.members)}  # type: ignore[union-attr]

    # -- the naive model

    def wants(self, name: str, row: Row) -> bool:
        stage = self.rows.stages[name]
        writer = {column: other.name for other in self.rows.flow.stages for column in other.writes}
        needs = {writer[column] for column in stage.reads if column in writer} | {*stage.after}
        here = row.step is None and row.split in stage.splits
        return here and name not in row.places and name not in row.leases and needs <= set(row.places)

    def lacks(self, name: str, row: Row) -> bool:
        return row.step is None and name not in row.places and name not in row.leases and not self.wants(name, row)

    def compares(self, name: str, group: Group) -> bool:
        wanting = [row for row in group.members if self.wants(name, row)]
        return bool(wanting) and not any(name in row.leases or self.lacks(name, row) for row in group.members)

    def note_waits(self) -> None:
        for group in self.rows.keys.values():
            for stage in self.rows.flow.stages:
                if stage.partial is None or group.members[0].split not in stage.splits:
                    continue
                missing = sum(self.lacks(stage.name, row) for row in group.members)
                if missing and len(group.members) - missing >= stage.partial:
                    self.since.setdefault((group.id, stage.name), self.driver.now)
                else:
                    self.since.pop((group.id, stage.name), None)
        alive = {group.id for group in self.rows.keys.values()}
        self.since = {key: since for key, since in self.since.items() if key[0] in alive}

    @invariant()
    def clocks_of_stragglers_run_as_the_model_says(self) -> None:
        self.note_waits()
        found = {(g.id, name): until for g in self.rows.keys.values() for name, until in g.waits.items()}
        assert found == {key: since + SECONDS for key, since in self.since.items()}

    @invariant()
    def rows_are_ready_for_what_the_model_says(self) -> None:
        for row in self.rows.rows.values():
            expected = set()
            for stage in self.rows.flow.stages:
                group_ready = stage.unit == "row" or self.compares(stage.name, row.group)
                if self.wants(stage.name, row) and group_ready:
                    expected.add(stage.name)
            assert {*row.ready} == expected
            if row.state == "parked":
                assert expected == {"feedback"}
            assert row.state != "ready" or expected - {"feedback"}

    @invariant()
    def admission_counts_what_it_should(self) -> None:
        rows = self.rows
        counted = sum((row.bound and row.group.admitted) or row.outside == "seen" for row in rows.rows.values())
        assert rows._admitted - rows._lost == counted + rows.retired["train"]
        outside = Counter(
            row.born
            for row in rows.rows.values()
            if row.outside == "seen" and row.step is None and "learn" not in row.leases
        )
        assert +rows._from_outside == outside


class PlainMachine(StageMachine):
    flow = rich_flow("admission", "balanced", "freshest")


TestStages = StageMachine.TestCase
TestStages.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStagesInOtherOrders = PlainMachine.TestCase
TestStagesInOtherOrders.settings = TestStages.settings
