"""The order in which a stage hands out its rows, whatever happened to the broker in between."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import pytest
from test_queue_rows import Driver

from streamrl_queue import snapshot
from streamrl_queue.config import Admission, Flow, Order, Stage, work_flow
from streamrl_queue.errors import ConfigError
from streamrl_queue.ready import FEW
from streamrl_queue.rows import Rows


def flow(order: Order, unit: str = "row", **options: object) -> Flow:
    """Rows are played, then scored in `order`."""
    play = Stage(name="play", reads=("task",), writes=("tokens", "versions"), max_deliveries=100)
    score = Stage(name="score", reads=("tokens",), writes=("score",), unit=unit, order=order, **options)  # type: ignore[arg-type]
    return Flow(stages=(play, score))


def put(driver: Driver, *keys: str, members: int = 1, priority: int = 0) -> tuple[int, ...]:
    event, rows, _ = driver.rows.put(
        0.0, keys, ["env"] * len(keys), members=members, split="train", priority=priority, sources={}
    )
    driver.do(event)
    return rows


def play(driver: Driver, rows: Sequence[int], tokens: Sequence[int] = (), version: int = 0) -> None:
    """Play exactly these rows, in this order, one write for each."""
    lease = driver.lease("play", rows=1 << 20)
    assert lease
    for number, row in enumerate(rows):
        length = tokens[number] if tokens else 1
        driver.do(driver.rows.write(0.0, "s", lease.lease, (row,), (version,), (length,)))
    if lease.lease in driver.rows.leases:
        driver.do(driver.rows.release(0.0, "s", lease.lease, None, "released", "rest"))


def handed(driver: Driver, stage: str = "score") -> list[int]:
    """Everything that the stage hands out, one unit at a time."""
    out: list[int] = []
    while lease := driver.lease(stage, rows=1):
        out += lease.rows
    return out


def both_ways_back(driver: Driver) -> list[Driver]:
    """The queue after its broker was killed: from the journal, and from a snapshot."""
    out = []
    for rows in (Rows(driver.rows.flow), snapshot.load(snapshot.dump(driver.rows), now=5.0)):
        again = Driver(driver.rows.flow)
        again.rows = rows
        out.append(again)
    for number, event in enumerate(driver.events, 1):
        out[0].rows.apply(event, now=5.0, record=number)
    return out


def test_admission_hands_out_in_the_order_of_the_puts() -> None:
    driver = Driver(flow("admission"))
    rows = put(driver, *"abcd")
    play(driver, rows[::-1])
    assert handed(driver) == list(rows)


def test_ready_first_hands_out_in_the_order_of_becoming_ready_and_what_comes_back_goes_last() -> None:
    driver = Driver(flow("ready_first"))
    rows = put(driver, *"abcd")
    play(driver, (rows[2], rows[0], rows[3], rows[1]))
    lease = driver.lease("score", rows=1)
    assert lease
    assert lease.rows == (rows[2],)
    driver.do(driver.rows.release(0.0, "s", lease.lease, None, "released", "test"))
    assert handed(driver) == [rows[0], rows[3], rows[1], rows[2]]


def test_freshest_hands_out_the_latest_birth_first_and_of_one_birth_the_newest_row() -> None:
    driver = Driver(flow("freshest"))
    old, new = driver.publish(3), driver.publish(7)
    rows = put(driver, *"abcd")
    play(driver, (rows[0], rows[2]), version=new)
    play(driver, (rows[1], rows[3]), version=old)
    assert handed(driver) == [rows[2], rows[0], rows[3], rows[1]]


@pytest.mark.parametrize("order", ["admission", "freshest", "ready_first", "balanced"])
def test_priority_goes_before_any_order(order: Order) -> None:
    driver = Driver(flow(order))
    rows = put(driver, *"abcd")
    urgent = put(driver, "urgent", priority=1)
    play(driver, [*rows, *urgent])
    assert handed(driver)[0] == urgent[0]


@pytest.mark.parametrize("order", ["admission", "freshest", "ready_first", "balanced"])
@pytest.mark.parametrize("unit", ["row", "group"])
def test_the_order_survives_the_broker(order: Order, unit: str) -> None:
    driver = Driver(flow(order, unit))
    rng = random.Random(1)
    versions = [driver.publish(step) for step in range(4)]
    rows = list(put(driver, *(f"k{i}" for i in range(30)), members=2))
    rng.shuffle(rows)
    for chunk in _chunks(rows, 10):
        play(driver, chunk, [rng.randint(1, 99) for _ in chunk], rng.choice(versions))
    lease = driver.lease("score", rows=7)
    assert lease
    driver.do(driver.rows.release(0.0, "s", lease.lease, lease.rows[:2] if unit == "row" else None, "released", "test"))
    after = [handed(again) for again in both_ways_back(driver)]
    assert after[0] == after[1] == handed(driver)


def _chunks(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def long_tailed(order: Order) -> tuple[list[float], list[int]]:
    """Mean length of the rows of each lease, and after how many leases the oldest row went."""
    driver = Driver(flow(order))
    rng = random.Random(0)
    rows = put(driver, *(f"k{i}" for i in range(640)))
    play(driver, rows, [min(4000, int(100 * rng.lognormvariate(0, 1))) for _ in rows])
    means, overtaken = [], []
    waiting = set(rows)
    while lease := driver.lease("score", rows=16):
        means.append(statistics.mean(driver.rows.rows[row].tokens for row in lease.rows))
        overtaken.append(sum(row > min(waiting) for row in lease.rows) if min(waiting) not in lease.rows else 0)
        waiting -= set(lease.rows)
    return means, overtaken


def test_balanced_leases_are_alike_in_length_and_overtake_nobody_for_ever() -> None:
    plain, _ = long_tailed("admission")
    balanced, overtaken = long_tailed("balanced")
    assert len(plain) == len(balanced) == 40
    # The last leases take what is left.
    assert statistics.pstdev(balanced[:-6]) < 0.5 * statistics.pstdev(plain[:-6])
    assert not any(overtaken), "the oldest row goes with the next lease"


def test_balanced_leases_of_groups_count_the_tokens_of_the_whole_group() -> None:
    driver = Driver(flow("balanced", "group"))
    rows = put(driver, *"abcd", members=2)
    play(driver, rows, [50, 50, 500, 500, 10, 10, 950, 950])
    lease = driver.lease("score", rows=4)
    assert lease
    # The oldest has 100 tokens of a mean of 755; the one that makes up for it is the one nearest to 1,410.
    assert lease.rows == (rows[0], rows[1], rows[2], rows[3])


@pytest.mark.parametrize("order", ["admission", "ready_first", "balanced"])
def test_a_stage_that_trains_under_wait_takes_the_earliest_birth_first(order: Order) -> None:
    driver = Driver(training(order))
    rows = put(driver, "a", "b", "urgent")
    driver.publish(0)
    lease = driver.lease("play", rows=1)
    assert lease
    driver.publish(1)
    later = driver.lease("play", rows=2)
    assert later
    driver.do(driver.rows.write(0.0, "s", later.lease, later.rows, (2, 2), (5, 5)))
    driver.do(driver.rows.write(0.0, "s", lease.lease, lease.rows, (1,), (5,)))
    step = driver.lease("learn", rows=3, step=1)
    assert step
    assert step.rows[0] == rows[0]


def training(order: Order, on_stale: str = "wait") -> Flow:
    bound = Admission(max_staleness=2, rows_per_step=3, on_stale=on_stale)  # type: ignore[arg-type]
    return Flow(
        stages=(
            Stage(name="play", reads=("task",), writes=("tokens", "versions"), admits=True),
            Stage(name="learn", reads=("tokens",), trains=True, order=order, seconds=None),
        ),
        admission=bound,
    )


def test_freshest_contradicts_a_bound_that_waits_and_the_error_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"stage learn: order=freshest with on_stale=wait.*use order=admission"):
        training("freshest")
    driver = Driver(training("freshest", "drop"))
    rows = put(driver, *"abc")
    for step in range(2):
        driver.publish(step)
        lease = driver.lease("play", rows=1)
        assert lease
        driver.do(driver.rows.write(0.0, "s", lease.lease, lease.rows, (step + 1,), (5,)))
    lease = driver.lease("learn", rows=1, step=1)
    assert lease
    assert lease.rows == (rows[1],)


def test_rows_without_tokens_cannot_be_balanced() -> None:
    with pytest.raises(ConfigError, match="no tokens to balance"):
        Stage(name="play", admits=True, order="balanced")


def test_a_decision_that_was_not_recorded_takes_nothing_away() -> None:
    """The disk refuses the grant: the same rows are there for the next request."""
    for order in ("admission", "freshest", "ready_first", "balanced"):
        driver = Driver(flow(order))  # type: ignore[arg-type]
        rows = put(driver, *(f"k{i}" for i in range(8)))
        play(driver, rows)
        first = driver.rows.lease(0.0, "s", "score", rows=5)
        assert driver.rows.lease(0.0, "s", "score", rows=5) == first
        assert len(handed(driver)) == 8


def test_rows_that_were_dropped_in_the_middle_of_a_queue_do_not_stay_in_it() -> None:
    """With `freshest` the oldest never come up, so nothing else would clear them away."""
    driver = Driver(flow("freshest"))
    for round in range(40):
        rows = put(driver, *(f"{round}/{i}" for i in range(10)))
        play(driver, rows)
        lease = driver.lease("score", rows=1)
        assert lease
        ids = tuple(row.id for row in driver.rows.rows.values())
        driver.do(driver.rows.drop_unfinished(0.0, "train", "test"))
        assert ids
    heaps = driver.rows._ready["score"].lines.values()
    assert sum(map(len, heaps)) <= FEW


@pytest.mark.slow
@pytest.mark.parametrize("order", ["admission", "freshest", "ready_first", "balanced"])
def test_a_lease_among_many_ready_rows_costs_about_what_one_among_few_does(order: Order) -> None:
    """A hundred thousand rows are made first."""

    def seconds(rows: int) -> float:
        chain = work_flow(("work",)).stages[0]
        driver = Driver(Flow(stages=(Stage(name="work", reads=chain.reads, writes=chain.writes, order=order),)))
        for first in range(0, rows, 10_000):
            keys = [str(i) for i in range(first, min(rows, first + 10_000))]
            event, _, _ = driver.rows.put(0.0, keys, [""] * len(keys), members=1, split="train", priority=0, sources={})
            assert event
            driver.rows.apply(event)
        best = float("inf")
        for _ in range(8):
            started = time.process_time()
            event = driver.rows.lease(0.0, "s", "work", rows=64)
            assert event is not None
            driver.rows.apply(event)
            best = min(best, time.process_time() - started)
        return best

    assert seconds(100_000) < 10 * seconds(1_000)
