"""Stages as data: groups that go on without stragglers, rows that are put half done, rows that are parked, and a flow
that gains a stage between two lives of the broker.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from test_queue_rows import MEMBERS, ROWS_PER_STEP, STALENESS, Driver, flow

from streamrl_queue import snapshot
from streamrl_queue.config import Admission, Flow, QueueConfig, Stage, training_flow
from streamrl_queue.errors import ConfigError, LeaseExpired, SchemaError, UnknownName
from streamrl_queue.events import Configured, Granted
from streamrl_queue.rows import Rows

SECONDS = 30.0


class Timed(Driver):
    """A driver whose clock runs."""

    def wait(self, seconds: float) -> list[str]:
        """Let time pass; the reasons of what was dropped."""
        self.now += seconds
        reasons = []
        for ended in self.rows.expire(self.now, 0.0):
            self.do(ended)
        for dropped in self.rows.stragglers(self.now, 0.0):
            reasons.append(dropped.reason)
            self.do(dropped)
        return reasons

    def write_some(self, lease: Granted, rows: Sequence[int]) -> None:
        self.write(lease, tuple(rows))

    def put_filled(self, *keys: str, filled: Sequence[str] = ("rollout",), version: int = -1, members: int = 1) -> None:
        n = len(keys) * members
        event, _, _ = self.rows.put(
            0.0,
            keys,
            ["env"] * n,
            members=members,
            split="train",
            priority=0,
            sources={},
            filled=filled,
            oldest=[version] * n,
            tokens=[7] * n,
        )
        self.do(event)


# -- groups that go on without stragglers


def impatient(**options: object) -> Timed:
    config = QueueConfig(
        max_staleness=STALENESS,
        rollout_seconds=1e6,
        partial_members=3,
        straggler_seconds=SECONDS,
        **options,  # type: ignore[arg-type]
    )
    driver = Timed(training_flow(config, rows_per_step=ROWS_PER_STEP))
    driver.publish(0)
    return driver


def score(driver: Timed, lease: Granted, rows: Sequence[int]) -> None:
    """Play and score these rows of a rollout lease."""
    driver.write_some(lease, rows)
    driver.run_through("reward")


def test_a_group_goes_on_without_the_members_that_come_too_late() -> None:
    driver = impatient()
    driver.put("a")
    lease = driver.lease("rollout")
    assert lease
    score(driver, lease, lease.rows[:2])
    assert driver.wait(10 * SECONDS) == [], "two are not enough: no clock runs"
    score(driver, lease, lease.rows[2:3])
    assert driver.rows.next_deadline() == driver.now + SECONDS
    assert driver.wait(SECONDS - 1) == []
    assert driver.lease("advantage") is None
    assert driver.wait(1) == ["straggler"]
    group = driver.lease("advantage")
    assert group
    assert group.rows == lease.rows[:3]
    statistics = driver.rows.statistics()
    statistics.check()
    assert statistics.dropped == {"straggler": 1}
    assert driver.rows._lost == 1, "its place in admission is free again"


def test_who_plays_a_dropped_straggler_learns_that_it_has_lost_it() -> None:
    driver = impatient()
    driver.put("a")
    lease = driver.lease("rollout")
    assert lease
    score(driver, lease, lease.rows[:2])
    other = driver.lease("rollout", session="other")
    assert other is None
    score(driver, lease, lease.rows[2:3])
    assert driver.rows.extend(driver.now, "s", lease.lease) == lease.rows[3:]
    driver.wait(SECONDS)
    with pytest.raises(LeaseExpired):
        driver.rows.extend(driver.now, "s", lease.lease)
    with pytest.raises(LeaseExpired):
        driver.write_some(lease, lease.rows[3:])


def test_a_lease_with_other_rows_goes_on_without_the_dropped_straggler() -> None:
    driver = impatient()
    driver.put("a", "b")
    lease = driver.lease("rollout")
    assert lease
    score(driver, lease, lease.rows[:3])
    driver.wait(SECONDS)
    assert driver.rows.extend(driver.now, "s", lease.lease) == lease.rows[4:]


def test_members_that_come_in_time_stop_the_clock() -> None:
    driver = impatient()
    driver.put("a")
    lease = driver.lease("rollout")
    assert lease
    score(driver, lease, lease.rows[:3])
    driver.wait(SECONDS - 1)
    score(driver, lease, lease.rows[3:])
    assert driver.wait(10 * SECONDS) == []
    group = driver.lease("advantage")
    assert group
    assert group.rows == lease.rows


def test_the_clock_stops_when_one_of_those_that_were_there_is_gone() -> None:
    driver = impatient()
    driver.put("a")
    lease = driver.lease("rollout")
    assert lease
    driver.write_some(lease, lease.rows[:3])
    reward = driver.lease("reward")
    assert reward
    driver.write_some(reward, reward.rows[:2])
    driver.do(driver.rows.drop(0.0, "s", reward.lease, reward.rows[2:], "error_env"))
    assert driver.wait(10 * SECONDS) == [], "two of three are there"
    score(driver, lease, lease.rows[3:])
    group = driver.lease("advantage")
    assert group
    assert len(group.rows) == 3


def test_after_a_restart_the_clock_starts_anew() -> None:
    driver = impatient()
    driver.put("a")
    lease = driver.lease("rollout")
    assert lease
    score(driver, lease, lease.rows[:3])
    driver.wait(SECONDS - 1)
    for rows in (replayed(driver, driver.rows.flow), reloaded(driver)):
        driver.rows = rows
        assert driver.rows.next_deadline() == driver.now + SECONDS
    assert driver.wait(SECONDS - 1) == []
    assert driver.wait(1) == ["straggler"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partial": 3}, "set both or neither"),
        ({"straggler_seconds": 3.0}, "set both or neither"),
        ({"partial": 3, "straggler_seconds": 3.0, "unit": "row"}, "only groups have stragglers"),
        ({"partial": 1, "straggler_seconds": 3.0}, "raise partial or lower min_members"),
        ({"partial": 3, "straggler_seconds": 0.0}, "expected more than 0"),
        ({"partial": 3, "straggler_seconds": float("inf")}, "finite"),
        ({"parks": True, "admits": True}, "parks and admits"),
        ({"parks": True, "trains": True}, "parks and trains"),
    ],
)
def test_stages_that_contradict_themselves_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Stage(**{"name": "compare", "unit": "group", "min_members": 2, **options})  # type: ignore[arg-type]


def test_the_settings_of_a_run_say_so_too() -> None:
    with pytest.raises(ConfigError, match=r"queue\.partial_members is 3 and queue\.straggler_seconds is None"):
        QueueConfig(partial_members=3)
    with pytest.raises(ConfigError, match=r"queue\.straggler_seconds: expected 0\.001 to 10000000, got -1\.0"):
        QueueConfig(partial_members=3, straggler_seconds=-1.0)
    with pytest.raises(ConfigError, match=r"queue\.partial_members: expected at least 2"):
        training_flow(QueueConfig(partial_members=1, straggler_seconds=5.0), rows_per_step=8)


# -- rows that are put with their rollout done


def feedback_flow(on_stale: str = "wait", rows_per_step: int = ROWS_PER_STEP) -> Flow:
    """Between the rollout and the learner somebody has to say what they think."""
    bound = Admission(max_staleness=STALENESS, rows_per_step=rows_per_step, on_stale=on_stale)  # type: ignore[arg-type]
    return Flow(
        stages=(
            Stage(name="rollout", reads=("task",), writes=("tokens", "versions"), admits=True),
            Stage(name="feedback", reads=("tokens",), writes=("reward",), parks=True),
            Stage(name="learn", reads=("tokens", "reward"), trains=True, seconds=None),
        ),
        admission=bound,
    )


def give_feedback(driver: Timed, *keys: str) -> None:
    event = driver.rows.lease(0.0, "human", "feedback", keys=keys)
    driver.do(event)
    assert isinstance(event, Granted)
    driver.write(event)


def test_rows_are_born_behind_the_stages_that_are_filled() -> None:
    driver = Timed(feedback_flow())
    version = driver.publish(4)
    driver.put_filled("a", "b", version=version, members=2)
    statistics = driver.rows.statistics()
    statistics.check()
    assert (statistics.parked, statistics.waiting, statistics.ready) == (4, 0, 0)
    assert statistics.by_split == {"train": {"parked": 4}}
    assert statistics.stages["feedback"].parked == 4
    assert statistics.admitted == 0
    assert driver.rows.room() == driver.rows.flow.waiting_rows, "they do not wait to be rolled out"
    row = driver.rows.rows[3]
    assert (row.born, row.tokens) == (4, 7)
    assert row.places["rollout"] == row.places[""]
    assert row.places[""].line == 2, "one line for each row"
    assert driver.lease("rollout") is None
    assert [row.id for row in driver.rows.peek("feedback", 9)] == [1, 2, 3, 4]


def test_a_put_must_bring_what_the_filled_stages_build_on_and_versions_that_are_known() -> None:
    driver = Timed(feedback_flow())
    with pytest.raises(SchemaError, match=r"stage feedback builds on rollout"):
        driver.put_filled("a", filled=("feedback",))
    with pytest.raises(UnknownName, match=r"stage learn trains rows"):
        driver.put_filled("a", filled=("rollout", "feedback", "learn"))
    with pytest.raises(UnknownName, match=r"no stage 'rolout'"):
        driver.put_filled("a", filled=("rolout",))
    with pytest.raises(SchemaError, match=r"version 9 was never begun here"):
        driver.put_filled("a", version=9)
    assert driver.rows.statistics().tasks == 0


def test_a_row_that_is_put_with_all_its_stages_done_is_done() -> None:
    driver = Timed(Flow(stages=(Stage(name="work", reads=("x",), writes=("y",)),)))
    driver.put_filled("a", filled=("work",))
    statistics = driver.rows.statistics()
    statistics.check()
    assert (statistics.tasks, statistics.done) == (1, 1)
    assert not driver.rows.references


def fill_pipeline(driver: Timed, groups: int) -> Granted:
    driver.put(*(f"task{driver.rows._next_group + i}" for i in range(groups)))
    lease = driver.lease("rollout")
    assert lease
    return lease


def test_rows_from_outside_take_only_places_that_no_started_row_needs() -> None:
    driver = Timed(feedback_flow())
    version = driver.publish(0)
    running = fill_pipeline(driver, 6)
    assert len(running.rows) == (STALENESS + 1) * ROWS_PER_STEP, "every place until step 3 is taken"
    driver.put_filled("liked", version=version)
    give_feedback(driver, "liked")
    assert driver.rows.statistics().stages["learn"].ready == 1
    assert driver.lease("learn", step=1) is None
    driver.write(running)
    for key in [group.key for group in driver.rows.keys.values() if group.key != "liked"]:
        give_feedback(driver, key)
    trained: list[int] = []
    for step in (1, 2, 3):
        batch = driver.lease("learn", step=step)
        assert batch
        assert len(batch.rows) == ROWS_PER_STEP
        trained += batch.rows
        driver.do(driver.rows.commit(0.0, "s", step, batch.rows))
    assert set(trained) == set(running.rows), "none of those that were started became stale"


def test_admission_makes_room_for_rows_from_outside_once_they_can_be_trained() -> None:
    driver = Timed(feedback_flow())
    version = driver.publish(0)
    driver.put_filled(*(f"liked{i}" for i in range(ROWS_PER_STEP)), version=version)
    assert len(fill_pipeline(driver, 6).rows) == 3 * ROWS_PER_STEP, "parked rows hold up nobody"
    again = Timed(feedback_flow())
    version = again.publish(0)
    again.put_filled(*(f"liked{i}" for i in range(ROWS_PER_STEP)), version=version)
    give_feedback(again, *(f"liked{i}" for i in range(ROWS_PER_STEP)))
    assert len(fill_pipeline(again, 6).rows) == 2 * ROWS_PER_STEP
    batch = again.lease("learn", step=1)
    assert batch
    assert len(batch.rows) == ROWS_PER_STEP
    again.do(again.rows.commit(0.0, "s", 1, batch.rows))
    assert again.lease("rollout") is None, "the version of step 1 is not there yet"
    again.publish(1)
    more = again.lease("rollout")
    assert more
    assert len(more.rows) == ROWS_PER_STEP


@pytest.mark.parametrize(("on_stale", "dropped"), [("wait", True), ("drop", True), ("keep", False)])
def test_a_row_from_outside_that_waited_too_long_for_feedback_goes_by_on_stale(on_stale: str, dropped: bool) -> None:
    driver = Timed(feedback_flow(on_stale))
    old = driver.publish(0)
    driver.put_filled("late", version=old)
    for step in range(1, STALENESS + 2):
        lease = fill_pipeline(driver, 2)
        driver.write(lease)
        for key in [group.key for group in driver.rows.keys.values() if group.key.startswith("task")]:
            if all("feedback" not in row.places for row in driver.rows.keys[key].members):
                give_feedback(driver, key)
        batch = driver.lease("learn", rows=ROWS_PER_STEP, step=step)
        assert batch
        driver.do(driver.rows.commit(0.0, "s", step, batch.rows))
        driver.publish(step)
    give_feedback(driver, "late")
    batch = driver.lease("learn", step=STALENESS + 2)
    statistics = driver.rows.statistics()
    statistics.check()
    assert statistics.dropped == ({"stale": 1} if dropped else {})
    assert (batch is None) == dropped


def test_a_row_of_which_nothing_was_sampled_is_never_stale() -> None:
    driver = Timed(feedback_flow())
    driver.publish(0)
    driver.put_filled("demonstration")
    for step in range(1, 6):
        driver.do(driver.rows.commit(0.0, "s", step, ()))
    give_feedback(driver, "demonstration")
    batch = driver.lease("learn", step=6)
    assert batch
    assert driver.rows.statistics().dropped == {}


def test_places_of_rows_from_outside_are_given_back_when_they_end() -> None:
    driver = Timed(feedback_flow())
    version = driver.publish(0)
    driver.put_filled("a", version=version)
    give_feedback(driver, "a")
    batch = driver.lease("learn", step=1)
    assert batch
    driver.do(*driver.rows.end_session(0.0, "s", "killed"))
    assert driver.rows.statistics().admitted == 1
    assert driver.lease("learn", step=1)
    driver.do(driver.rows.reconcile(0.0, 0))
    assert driver.rows.statistics().admitted == 1
    driver.do(driver.rows.drop_unfinished(0.0, "train", "test"))
    assert driver.rows.statistics().admitted - driver.rows._lost == 0


# -- rows that are parked


def test_parked_rows_are_handed_out_by_key_alone() -> None:
    driver = Timed(feedback_flow())
    driver.publish(0)
    driver.put_filled("a", "b", members=2)
    with pytest.raises(UnknownName, match="it parks its rows; name the keys"):
        driver.lease("feedback")
    with pytest.raises(UnknownName, match="keys are for stages that park"):
        driver.rows.lease(0.0, "s", "rollout", keys=["a"])
    grant = driver.rows.lease(0.0, "s", "feedback", keys=["b", "b"])
    assert isinstance(grant, Granted)
    assert grant.rows == (3, 4)
    driver.do(grant)
    with pytest.raises(LeaseExpired, match=r"row 3 of key 'b' is held by s"):
        driver.rows.lease(0.0, "t", "feedback", keys=["a", "b"])
    driver.do(driver.rows.release(0.0, "s", grant.lease, None, "released", "test"))
    assert driver.rows.statistics().parked == 4
    give_feedback(driver, "b")
    with pytest.raises(LeaseExpired, match="the rows of key 'b' have passed it"):
        driver.rows.lease(0.0, "s", "feedback", keys=["b"])
    with pytest.raises(UnknownName, match="no rows were put under key 'c'"):
        driver.rows.lease(0.0, "s", "feedback", keys=["c"])
    driver.do(driver.rows.drop_unfinished(0.0, "train", "test"))
    with pytest.raises(LeaseExpired, match="the rows of key 'a' have ended"):
        driver.rows.lease(0.0, "s", "feedback", keys=["a"])


def test_a_key_whose_rows_are_still_on_their_way_is_waited_for() -> None:
    driver = Timed(feedback_flow())
    driver.publish(0)
    driver.put("a")
    lease = driver.lease("rollout")
    assert lease
    driver.write(lease, lease.rows[:2])
    assert driver.rows.lease(0.0, "human", "feedback", keys=["a"]) is None
    driver.write(lease, lease.rows[2:])
    assert driver.rows.lease(0.0, "human", "feedback", keys=["a"])


# -- a flow that gains a stage


def replayed(driver: Driver, flow: Flow) -> Rows:
    """The broker was killed and starts again under `flow`, from the first event of its journal."""
    rows = Rows(flow)
    rows.apply(Configured(0.0, driver.rows.flow), now=driver.now)
    for number, event in enumerate(driver.events, 1):
        rows.apply(event, now=driver.now, record=number)
    return configured(rows, flow, driver.now)


def reloaded(driver: Driver, flow: Flow | None = None) -> Rows:
    """The same, from a snapshot."""
    rows = snapshot.load(snapshot.dump(driver.rows), now=driver.now)
    return configured(rows, flow, driver.now) if flow else rows


def configured(rows: Rows, flow: Flow, now: float) -> Rows:
    if (event := rows.configure(0.0, flow)) is not None:
        rows.apply(event, now=now)
    return rows


def with_stage(flow: Flow, at: int, stage: Stage, **changes: tuple[str, ...]) -> Flow:
    """`flow` with one more stage, which others may read."""
    stages = [
        msgspec.structs.replace(old, reads=(*old.reads, *changes[old.name])) if old.name in changes else old
        for old in flow.stages
    ]
    return msgspec.structs.replace(flow, stages=(*stages[:at], stage, *stages[at:]))


JUDGE = Stage(name="judge", reads=("tokens",), writes=("verdict",), splits=("train", "eval"))
ARCHIVE = Stage(name="archive", after=("advantage",), writes=("archived",))


def busy() -> Driver:
    """Rows at every stage, some of them leased, one step trained."""
    driver = Driver(flow())
    driver.publish(0)
    driver.put(*(f"k{i}" for i in range(9)))
    driver.put("check", split="eval")
    for _ in range(4):
        lease = driver.lease("rollout", rows=MEMBERS)
        assert lease
        driver.write(lease)
    driver.run_through("reward")
    driver.run_through("advantage")
    first = driver.lease("learn", rows=ROWS_PER_STEP, step=1, session="learner")
    assert first
    driver.do(driver.rows.commit(0.0, "learner", 1, first.rows))
    assert driver.lease("learn", rows=2, step=2, session="learner")
    for stage, rows in (("rollout", 12), ("reward", 3), ("advantage", 1)):
        lease = driver.lease(stage, rows=rows, session="worker")
        assert lease or stage != "rollout"
        if lease and stage == "rollout":
            driver.write(lease, lease.rows[:6])
    return driver


@pytest.mark.parametrize("back", [replayed, reloaded])
def test_a_stage_at_the_end_gets_the_rows_that_have_come_so_far(back: object) -> None:
    driver = busy()
    driver.rows = back(driver, with_stage(flow(), 5, ARCHIVE))  # type: ignore[operator]
    statistics = driver.rows.statistics()
    statistics.check()
    open_rows = [row for row in driver.rows.rows.values() if row.step is None and "advantage" in row.places]
    assert statistics.stages["archive"].ready == len(open_rows) > 0
    driver.run_through("archive")
    check_trainable(driver)


@pytest.mark.parametrize("back", [replayed, reloaded])
def test_a_stage_in_the_middle_is_passed_before_what_now_builds_on_it(back: object) -> None:
    driver = busy()
    before = driver.rows.statistics()
    after = with_stage(flow(), 2, JUDGE, advantage=("verdict",), learn=("verdict",))
    driver.rows = back(driver, after)  # type: ignore[operator]
    statistics = driver.rows.statistics()
    statistics.check()
    assert (statistics.tasks, statistics.trained) == (before.tasks, before.trained)
    assert statistics.leased == before.leased, "what was held is held"
    assert statistics.stages["learn"].ready == 0, "nothing is trained without a verdict"
    judged = sum("rollout" in row.places and row.step is None for row in driver.rows.rows.values())
    assert statistics.stages["judge"].ready == judged
    # Whoever held rows goes on with them.
    mine = [lease for lease in driver.rows.leases.values() if lease.step == 2]
    rows = [row for lease in mine for row in lease.rows]
    driver.do(driver.rows.commit(0.0, "learner", 2, rows))
    driver.rows.statistics().check()
    driver.run_through("judge")
    check_trainable(driver)


def check_trainable(driver: Driver) -> None:
    """All that is left passes all stages."""
    for session in ("worker", "learner"):
        driver.do(*driver.rows.end_session(0.0, session, "killed"))
    for step in range(driver.rows.step + 1, driver.rows.step + 20):
        for stage in driver.rows.flow.stages:
            if not stage.trains:
                driver.run_through(stage.name)
        batch = driver.lease("learn", rows=ROWS_PER_STEP, step=step)
        if batch is None:
            break
        driver.do(driver.rows.commit(0.0, "s", step, batch.rows))
        driver.publish(step)
    statistics = driver.rows.statistics()
    statistics.check()
    assert statistics.unfinished == 0, statistics
    for again in (replayed_as_it_was(driver), reloaded(driver)):
        assert again.statistics() == statistics


def replayed_as_it_was(driver: Driver) -> Rows:
    """From the first event, with the change of the flow where it happened: the driver's events do not have it."""
    return snapshot.load(snapshot.dump(driver.rows), now=0.0)


@pytest.mark.parametrize("back", [replayed, reloaded])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: msgspec.structs.replace(f, stages=f.stages[:3] + f.stages[4:]), "rows of stage learn, which this"),
        (
            lambda f: with_stage(msgspec.structs.replace(f, stages=f.stages[:1] + f.stages[2:]), 1, _reward("score")),
            r"stage reward: writes: the journal's rows passed it with reward, reward_parts, got score; keep it",
        ),
        (
            lambda f: msgspec.structs.replace(
                f, stages=tuple(msgspec.structs.replace(s, unit="row") if s.unit == "group" else s for s in f.stages)
            ),
            "stage advantage: unit: the journal's rows passed it with group, got row",
        ),
    ],
)
def test_a_flow_that_the_rows_cannot_pass_is_refused(back: object, change: object, said: str) -> None:
    driver = busy()
    with pytest.raises(ConfigError, match=said):
        back(driver, change(flow()))  # type: ignore[operator]


def _reward(column: str) -> Stage:
    return Stage(name="reward", reads=("tokens",), writes=(column,), splits=("train", "eval"))


def test_a_flow_that_ends_rows_sooner_does_not_change_what_was_before() -> None:
    """Fewer deliveries are allowed from now on; rows that had more before and went on are not dead for it."""
    driver = Driver(flow(max_deliveries=3))
    driver.publish(0)
    driver.put("a")
    for _ in range(2):
        assert driver.lease("rollout")
        driver.do(*driver.rows.end_session(0.0, "s", "killed"))
    driver.run_through("rollout")
    strict = flow(max_deliveries=1)
    for again in (replayed(driver, strict), reloaded(driver, strict)):
        statistics = again.statistics()
        statistics.check()
        assert statistics.dead == {}
        assert statistics.stages["reward"].ready == MEMBERS
