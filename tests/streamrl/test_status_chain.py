"""Who waits for whom, followed to its end, in situations that were planted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.runtime.chain import SILENT, Facts, chain, told
from streamrl.runtime.coordinator import Quiet
from streamrl_queue import Member, Statistics, Waiting
from streamrl_queue.messages import Leased, LeasedRow
from streamrl_queue.state import StageCount

NOW = 1000.0
STAGES = ("rollout", "reward", "advantage", "learn", "evaluate")
ROLES = ("learner-0", "learner-1", "engine-0", "engine-1", "producer-0", "scorer-0")


def member(name: str, *waits: Waiting, activity: str = "works", since: float = 990.0, ready: bool = True) -> Member:
    role = name.rpartition("-")[0] or name
    return Member(f"{name}.x", name, role, None, ready, 1, activity, since, {}, 0, waits)


def at(what: str, seconds: float = 10.0, *, row: int = 0, on: str = "") -> Waiting:
    return Waiting(what, NOW - seconds, row, on)


TRAINING = member("coordinator", at("training: waits for step 9 of learner-0", 90, on="learner-0"))
FEW = at("waits for rows of step 7: 31 of 32 are there", 41, on="learn")
# Those who have nothing to do with it.
IDLE = {
    "learner-1": member("learner-1", at("waits for rows of step 7: 31 of 32 are there", 41, on="learner-0")),
    "engine-0": member("engine-0", activity="samples"),
    "engine-1": member("engine-1", activity="waits for requests"),
    "producer-0": member("producer-0", activity="waits for rows"),
    "scorer-0": member("scorer-0", activity="waits for rows"),
    "learner-0": member("learner-0", FEW),
    "coordinator": TRAINING,
}


def facts(
    *members: Member,
    absent: tuple[str, ...] = (),
    ready: Mapping[str, int] | None = None,
    leased: tuple[LeasedRow, ...] = (),
    full: str = "",
) -> Facts:
    """The run of `IDLE`, but for these members, and what the queue says."""
    there = IDLE | {m.name: m for m in members}
    stages = {name: StageCount((ready or {}).get(name, 0), 0, 0) for name in STAGES}
    none: dict[str, Any] = dict.fromkeys(("tasks", "waiting", "leased", "ready", "parked", "trained", "done"), 0)
    counts = Statistics(
        **none,
        dropped={},
        dead={},
        by_split={},
        stages=stages,
        admitted=64,
        step=6,
        version=4,
        version_step=3,
        sources={},
    )
    return Facts(NOW, ROLES, [m for n, m in there.items() if n not in absent], counts, Leased(leased, full))


def held(row: int, stage: str, holder: str, since: float | None, *, member: int = 5) -> LeasedRow:
    return LeasedRow(row, 812, member, stage, holder, since, 8, 1)


def names(given: Facts) -> list[str]:
    return [link.who for link in chain(given)]


def head(given: Facts) -> str:
    return str(chain(given)[-1])


def test_a_tool_that_does_not_return_is_found_behind_learner_group_and_producer() -> None:
    producer = member("producer-0", at("tool `search`", 41, row=6501), at("waits for turn 2", 2, row=6502, on="engine"))
    given = facts(
        producer, leased=(held(6502, "rollout", "producer-0", 900.0), held(6501, "rollout", "producer-0", 950.0))
    )
    assert told(chain(given)) == (
        "coordinator: training: waits for step 9 of learner-0 for 90 s; "
        "learner-0: waits for rows of step 7: 31 of 32 are there for 41 s; "
        "group 812: waits for member 5 (row 6501), 7 of 8 are through rollout for 50 s; "
        "producer-0: row 6501: tool `search` for 41 s"
    )


def test_a_rank_that_waits_for_the_leader_leads_to_what_the_leader_waits_for() -> None:
    coordinator = member("coordinator", at("draining: waits for learner-1", on="learner-1"))
    assert names(facts(coordinator, ready={"reward": 3})) == [
        "coordinator",
        "learner-1",
        "learner-0",
        "queue",
        "scorer-0",
    ]


def test_an_engine_that_is_silent_is_found_behind_a_turn() -> None:
    producer = member("producer-0", at("waits for turn 2", 30, row=6501, on="engine"))
    told_silent = at(SILENT, 12, on="engine-1")
    coordinator = member("coordinator", *TRAINING.waits, told_silent)
    given = facts(coordinator, producer, absent=("engine-1",), leased=(held(6501, "rollout", "producer-0", None),))
    assert head(given) == "engine-1: is silent: it has no session at the queue for 12 s"


def test_an_engine_that_is_not_ready_is_meant_before_one_that_samples() -> None:
    producer = member("producer-0", at("waits for turn 2", 30, row=6501, on="engine"))
    engine = member("engine-1", activity="waits for a version's commit", since=999.0, ready=False)
    given = facts(producer, engine, leased=(held(6501, "rollout", "producer-0", None),))
    assert head(given) == "engine-1: waits for a version's commit for 1 s"


def test_a_scorer_that_sleeps_is_named_with_its_function() -> None:
    scorer = member("scorer-0", at("scores with judge.py:judge", 33, row=77))
    given = facts(scorer, leased=(held(77, "reward", "scorer-0", 960.0),), ready={"reward": 200})
    assert head(given) == "scorer-0: row 77: scores with judge.py:judge for 33 s"


def test_rows_that_nobody_scores_lead_to_the_scorer_that_is_gone() -> None:
    given = facts(absent=("scorer-0",), ready={"reward": 200})
    assert told(chain(given)[-2:]) == (
        "queue: 200 rows are ready for reward, and nobody takes them; "
        "scorer-0: is silent: it has no session at the queue"
    )


def test_tasks_that_nobody_plays_lead_over_the_producer_to_the_engines() -> None:
    producer = member("producer-0", at("waits for a ready engine", 20, on="engine"))
    engines = [member(f"engine-{i}", activity="waits for weights", ready=False) for i in range(2)]
    assert names(facts(producer, *engines, ready={"rollout": 64}))[-3:] == ["queue", "producer-0", "engine-0"]


def test_tasks_that_admission_holds_back_lead_to_the_version_that_is_not_proven() -> None:
    learner = member("learner-0", FEW, at("waits for version 5 on engine-0, engine-1", 40, on="engine"))
    late = member("engine-1", activity="waits for a version's commit", since=960.0, ready=False)
    given = facts(learner, late, ready={"rollout": 64})
    assert names(given) == ["coordinator", "learner-0", "queue", "learner-0", "engine-1"]
    assert "64 tasks wait for a newer version: 4 has the weights of step 3, step 6 is committed" in told(chain(given))


def test_a_full_budget_is_the_head_with_its_figures() -> None:
    full = "1.0 of 1.0 MiB are taken by rows (queue.budget_mebibytes)"
    assert head(facts(full=full)) == f"queue: has no room for tasks: {full}"


def test_a_queue_without_tasks_says_who_feeds_them() -> None:
    assert head(facts()) == "queue: has no tasks; the coordinator feeds them"


def test_a_rank_that_is_silent_is_found_behind_the_leader_that_computes_with_it() -> None:
    learner = member("learner-0", at("trains rows of step 7", 30))
    assert names(facts(learner, absent=("learner-1",))) == ["coordinator", "learner-0", "learner-1"]
    learner = member("learner-0", activity="trains step 7")
    assert names(facts(learner, absent=("learner-1",)))[-1] == "learner-1"


def test_a_holder_that_is_gone_is_the_head() -> None:
    given = facts(absent=("producer-0",), leased=(held(9, "rollout", "producer-0", 990.0),))
    assert head(given).startswith("producer-0: is silent")


def test_a_process_that_did_not_report_at_the_start_is_the_head() -> None:
    coordinator = member("coordinator", at("starting: waits for engine-1", 5, on="engine-1"))
    assert names(facts(coordinator, absent=("engine-1",))) == ["coordinator", "engine-1"]


def test_waiting_in_a_circle_ends_where_it_began() -> None:
    learner = member("learner-0", at("waits for learner-1", on="learner-1"))
    assert names(facts(learner)) == ["coordinator", "learner-0", "learner-1"]


def test_a_coordinator_that_is_gone_is_named_itself() -> None:
    assert head(facts(absent=("coordinator", "learner-0"))).startswith("coordinator: is silent")


def test_quiet_counts_from_the_last_change_and_alarms_once_in_each_interval() -> None:
    quiet = Quiet(0.0)
    assert quiet.seconds(1.0, "a") == 0.0
    seen = [quiet.alarm(quiet.seconds(now, "a"), 10.0) for now in (5.0, 11.0, 12.0, 20.9, 21.0, 40.0)]
    assert seen == [False, True, False, False, True, True]
    assert quiet.seconds(50.0, "b") == 0.0
    assert not quiet.alarm(9.0, 10.0)
    assert quiet.alarm(10.0, 10.0)
