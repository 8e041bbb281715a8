"""Every row's life is in the journal: what was done to it, and what followed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from inspect_support import FLOW, made, publish, roll_out, score, tasks, train, trajectory, trouble, two_steps

from streamrl.inspect.lives import Life, Lives
from streamrl.inspect.reading import fold
from streamrl_queue import Flow, Stage, Task, TransferQueue, audit
from streamrl_queue.errors import QueueError
from streamrl_queue.events import Event, Moved
from streamrl_queue.rows import Rows
from streamrl_queue.schema import reward_batch, trajectory_batch
from streamrl_queue.state import Lease


def told(life: Life) -> list[tuple[str, str | None]]:
    return [(moment.event, moment.stage) for moment in life.moments]


def test_a_trained_row_tells_its_whole_life(tmp_path: Path) -> None:
    lives = fold(made(tmp_path, two_steps), FLOW)
    life = lives.rows[1]
    assert told(life) == [
        ("born", None),
        ("granted", "rollout"),
        ("written", "rollout"),
        ("granted", "reward"),
        ("written", "reward"),
        ("granted", "advantage"),
        ("written", "advantage"),
        ("granted", "learn"),
        ("trained", None),
        ("retired", None),
    ]
    assert [moment.at for moment in life.moments] == sorted(moment.at for moment in life.moments)
    granted = life.first("granted", "rollout")
    assert granted is not None
    assert (granted.attempt, granted.version) == (1, 1)
    assert granted.session is not None
    assert granted.session.startswith("worker-0."), "the session says whose it was"
    assert (life.end, life.step, life.lag, life.tokens, life.oldest_version) == ("trained", 1, 0, 6, 1)
    assert {name: life.columns[name] for name in ("reward", "advantage", "status", "turns")} == {
        "reward": 1.0,
        "advantage": 0.5,
        "status": "completed",
        "turns": 1,
    }
    assert lives.rows[5].lag == 1
    assert not lives.rows[5].retired
    assert [(s.step, s.rows, s.version) for s in lives.steps] == [(1, (1, 2, 3, 4), 1), (2, (5, 6, 7, 8), 2)]
    assert {v.version: (v.step, v.parent, v.digest) for v in lives.versions.values()} == {
        1: (0, None, "digest-1"),
        2: (1, 1, "digest-2"),
        3: (2, 2, "digest-3"),
    }


def test_death_drop_and_return_have_their_reasons(tmp_path: Path) -> None:
    lives = fold(made(tmp_path, trouble), FLOW)
    dead, dropped, leased = (lives.rows[row] for row in (1, 2, 3))
    assert (lives.state(dead), dead.reason) == ("dead", "rollout: its process ended")
    assert [(m.event, m.attempt, m.cause) for m in dead.moments if m.event != "born"] == [
        ("granted", 1, None),
        ("lease ended", 1, "session"),
        ("granted", 2, None),
        ("lease ended", 2, "session"),
        ("dead", None, None),
    ]
    assert (lives.state(dropped), dropped.reason) == ("dropped", "error_env")
    released = leased.first("lease ended")
    assert released is not None
    assert (released.cause, released.reason) == ("released", "the producer drains")
    again = leased.last("granted")
    assert again is not None
    assert again.attempt == 1, "what was given back does not count as a delivery"


async def drop(queue: TransferQueue, stage: str, rows: int) -> None:
    lease = await queue.lease(stage, rows=rows, wait=1)
    assert lease is not None
    await queue.drop(lease, reason="error_env")


def test_columns_that_the_queue_moved_are_those_of_their_row(tmp_path: Path) -> None:
    """The first rows of a record end, the others are copied with the record, which is a sparse segment's rest."""

    async def move(queue: TransferQueue) -> None:
        await publish(queue)
        await queue.put(tasks(8), split="eval")
        await drop(queue, "rollout", 3)
        lease = await queue.lease("rollout", rows=5, wait=1)
        assert lease is not None
        await queue.write(lease, trajectory_batch(lease.ids, [trajectory(length=row) for row in lease.ids]))
        await drop(queue, "reward", 2)
        # What ends at once leaves a sparse segment.
        for number in range(40):
            long = Task(env="e", task={"text": "y" * 30000}, source="long", index=number)
            await queue.put([long], split="eval")
            await drop(queue, "rollout", 1)

    journal = made(tmp_path, move, segment_bytes=1 << 18)
    moved = [entry.event for entry in audit.events(journal) if isinstance(entry.event, Moved)]
    assert {event.stage for event in moved} == {"", "rollout"}
    lives = fold(journal, FLOW, columns=("task", "tokens"))
    left = {row: lives.rows[row].columns for row in (6, 7, 8)}
    assert {row: json.loads(columns["task"]) for row, columns in left.items()} == {row: {"i": row - 1} for row in left}
    assert {row: len(columns["tokens"]) for row, columns in left.items()} == {row: row for row in left}


def test_a_step_that_a_resume_undid_is_told_as_given_back(tmp_path: Path) -> None:
    async def undone(queue: TransferQueue) -> None:
        await publish(queue)
        await queue.put(tasks(1), members=4)
        await roll_out(queue, 4)
        await score(queue, 4)
        await train(queue, 1)
        assert await queue.reconcile(0) == 4
        await train(queue, 1)

    lives = fold(made(tmp_path, undone), FLOW)
    assert [name for name, _ in told(lives.rows[1])][-4:] == ["trained", "given back", "granted", "trained"]
    first, second = lives.steps
    assert first.given_back is not None
    assert second.given_back is None


def test_a_group_that_became_too_small_ends_without_an_event_of_its_own(tmp_path: Path) -> None:
    async def shrink(queue: TransferQueue) -> None:
        await publish(queue)
        await queue.put(tasks(1), members=2)
        lease = await queue.lease("rollout", rows=1, wait=1)
        assert lease is not None
        await queue.drop(lease, reason="error_env")
        await roll_out(queue, 1)
        lease = await queue.lease("reward", rows=1, wait=1)
        assert lease is not None
        await queue.write(lease, reward_batch(lease.ids, [1.0], [{}]))
        assert (await queue.statistics()).dropped == {"error_env": 1, "group_too_small": 1}

    lives = fold(made(tmp_path, shrink), FLOW)
    assert [(life.end, life.reason) for life in lives.rows.values()] == [
        ("dropped", "error_env"),
        ("dropped", "group_too_small"),
    ]


def test_what_only_the_ledger_remembers_is_told_without_its_columns(tmp_path: Path) -> None:
    async def many_steps(queue: TransferQueue) -> None:
        await publish(queue)
        for step in range(1, 13):
            await queue.put(tasks(1, start=step), members=4)
            await roll_out(queue, 4, version=step)
            await score(queue, 4)
            await train(queue, step)
            await publish(queue, step, step)
            await queue.retire(step)

    journal = made(tmp_path, many_steps, segment_bytes=1 << 14)
    assert list(journal.glob("*.ledger")), "the journal was made to forget columns"
    lives = fold(journal, FLOW)
    assert len(lives.rows) == 48
    assert {lives.state(life) for life in lives.rows.values()} == {"trained"}
    old, young = lives.rows[1], lives.rows[48]
    assert told(old) == told(young)
    assert (old.step, old.lag, old.tokens) == (1, 0, 6)
    assert "reward" not in old.columns
    assert young.columns["reward"] == 0.0


def test_one_row_is_read_with_its_group_and_all_columns(tmp_path: Path) -> None:
    lives = fold(made(tmp_path, two_steps), FLOW, row=6)
    assert list(lives.rows) == [5, 6, 7, 8]
    assert lives.rows[6].columns["tokens"] == [0, 1, 2, 3, 4, 5]
    assert lives.rows[6].columns["versions"] == [{"start": 2, "version": 1, "context_version": 1}]


def test_rows_of_an_unknown_flow_are_open_until_an_event_ends_them() -> None:
    lives = Lives(None)
    for event in events_of(Flow(stages=(Stage(name="translate"),)), seed=1, steps=40):
        lives.apply(event)
    assert {lives.state(life) for life in lives.rows.values()} <= {"open", "leased", "dropped"}


def events_of(flow: Flow, *, seed: int, steps: int) -> list[Event]:
    """What happens when clients ask a queue for this and that."""
    events: list[Event] = []
    rows = Rows(flow)
    play(random.Random(seed), rows, steps, events.append)
    return events


def part_of(rng: random.Random, lease: Lease, rows: Rows) -> tuple[int, ...]:
    """Some rows of a lease; whole groups stay together."""
    if rows.stages[lease.stage].unit == "group":
        return tuple(sorted(lease.rows))
    return tuple(sorted(rng.sample(sorted(lease.rows), rng.randint(1, len(lease.rows)))))


def play(rng: random.Random, rows: Rows, steps: int, record: Callable[[Event], None]) -> None:
    """Ask for random things; `record` hears each event before it is folded."""

    def apply(*events: Event | None) -> None:
        for event in events:
            if event is not None:
                record(event)
                rows.apply(event)

    for at in range(steps):
        leases = list(rows.leases.values())
        lease = rng.choice(leases) if leases else None
        some = part_of(rng, lease, rows) if lease else ()
        split = rng.choice(("train", "train", "eval"))
        step = rows.step + 1
        try:
            match rng.randrange(10):
                case 0:
                    keys = [f"{at}/{i}" for i in range(rng.randint(1, 2))]
                    event, _, _ = rows.put(
                        at, keys, ["e"] * len(keys), members=rng.randint(1, 4), split=split, priority=0, sources={}
                    )
                    apply(event)
                case 1 | 2 | 3 | 4:
                    stage = rng.choice(list(rows.stages.values()))
                    session = f"s{rng.randrange(3)}"
                    apply(rows.lease(at, session, stage.name, rows=6, step=step if stage.trains else None))
                case 5 | 6 | 7 if lease and rows.stages[lease.stage].trains:
                    apply(rows.commit(at, lease.session, step, tuple(lease.rows)))
                case 5 | 6 | 7 if lease:
                    versions = (rows.version or -1,) * len(some) if lease.stage == "rollout" else ()
                    apply(rows.write(at, lease.session, lease.id, some, versions, (3,) * len(versions)))
                case 8 if lease:
                    how = rng.randrange(4)
                    if how == 0:
                        apply(rows.drop(at, lease.session, lease.id, some, "because"))
                    elif how == 1:
                        apply(*rows.end_session(at, lease.session, "gone"))
                    else:
                        cause = "released" if how == 2 else "expired"
                        apply(rows.release(at, lease.session, lease.id, some, cause, "back"))  # type: ignore[arg-type]
                case 9:
                    version = rows.begin_version(at, rows.step, rows.version or None)
                    apply(version)
                    apply(rows.commit_version(at, version.version, "d"))
                    if rng.random() < 0.3:
                        apply(rows.retire(at, rng.randint(0, rows.step)))
                    elif rng.random() < 0.3:
                        apply(rows.reconcile(at, rng.randint(0, rows.step)))
        except QueueError:
            continue


@pytest.mark.parametrize("seed", range(20))
def test_lives_and_the_queue_count_the_same_after_every_event(seed: int) -> None:
    mirror, lives = Rows(FLOW), Lives(FLOW)
    for event in events_of(FLOW, seed=seed, steps=400):
        mirror.apply(event)
        lives.apply(event)
        counts = mirror.statistics()
        assert lives.by_split() == counts.by_split, event
        assert _reasons(lives, "dropped") == counts.dropped, event
        assert _reasons(lives, "dead") == counts.dead, event
    assert {"trained", "dropped"} <= {life.end for life in lives.rows.values()}


def _reasons(lives: Lives, end: str) -> dict[str, int]:
    return dict(Counter(life.reason or "" for life in lives.rows.values() if life.end == end))


def test_a_segment_that_becomes_a_ledger_while_it_is_read_is_read_once(tmp_path: Path) -> None:
    journal = made(tmp_path, two_steps, segment_bytes=3 << 12)
    segments = sorted(journal.glob("*.segment"))
    assert len(segments) > 1
    files = audit.files(journal)
    first = next(files)
    segments[1].rename(segments[1].with_suffix(".ledger"))
    assert [file.number for file in (first, *files)] == [int(path.stem) for path in segments]
    both = segments[1].with_suffix(".ledger")
    segments[1].write_bytes(both.read_bytes())
    assert [file.is_ledger for file in audit.files(journal)] == [False] * len(segments), "never both of one number"
