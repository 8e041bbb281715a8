"""A queue that runs for ever: what has ended leaves nothing behind but a little of its history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl_queue import QueueConfig, snapshot, standing, table, training_flow
from streamrl_queue.errors import LeaseExpired
from streamrl_queue.events import Event, Granted
from streamrl_queue.journal import Journal
from streamrl_queue.store import Store

GROUPS, MEMBERS = 2, 4
FLOW = training_flow(QueueConfig(), rows_per_step=GROUPS * MEMBERS)
ROW_BYTES = 1000


class Life:
    """A training run, as a store sees it: tasks, rollouts, rewards, steps, versions and checkpoints."""

    def __init__(self, directory: Path) -> None:
        journal = Journal(directory, durability="flush", segment_bytes=1 << 17)
        self.store = Store(FLOW, journal, clock=lambda: self.step * 10.0, wall=lambda: self.step * 10.0)
        self.directory = directory
        self.step = 0
        self.store.recover()
        self._publish()

    def _lease(self, stage: str, step: int | None = None) -> Granted:
        event = self.store.rows.lease(0.0, "s", stage, rows=GROUPS * MEMBERS, step=step)
        assert isinstance(event, Granted)
        self.store.record(event)
        return event

    def _pass(self, stage: str) -> None:
        lease = self._lease(stage)
        rows = self.store.rows
        sampled = stage == "rollout"
        oldest, tokens = ([rows.version] * len(lease.rows), [9] * len(lease.rows)) if sampled else ((), ())
        event: Event = rows.write(0.0, "s", lease.lease, lease.rows, oldest, tokens)
        self.store.record(event, bytes(ROW_BYTES * len(lease.rows)) if sampled else b"x" * 64)

    def _publish(self) -> None:
        rows = self.store.rows
        begun = rows.begin_version(0.0, self.step, rows.version or None)
        self.store.record(begun)
        self.store.record(rows.commit_version(0.0, begun.version, "digest"))

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            rows = self.store.rows
            keys = [f"{self.step}/{group}" for group in range(GROUPS)]
            put, _, _ = rows.put(
                0.0, keys, ["e"] * GROUPS, members=MEMBERS, split="train", priority=0, sources={"tasks": self.step}
            )
            self.store.record(put, bytes(100))
            for stage in ("rollout", "reward", "advantage"):
                self._pass(stage)
            lease = self._lease("learn", self.step)
            self.store.record(rows.commit(0.0, "s", self.step, lease.rows))
            self._publish()
            if self.step % 5 == 0:
                self.store.record(rows.retire(0.0, self.step))
            self.store.tidy()
        self.store.rows.statistics().check()

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the state, of what the journal keeps for rows, and of its history."""
        files = list(self.directory.iterdir())
        return {
            "state": len(snapshot.dump(self.store.rows)),
            "segments": self.store.journal.size,
            "files": sum(not file.name.endswith(".ledger") for file in files),
            "history": sum(file.stat().st_size for file in files if file.name.endswith(".ledger")),
        }


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    # A day's worth of what is remembered, in a second: the bounds are what is tested, not their values.
    monkeypatch.setattr(standing, "PAST_KEYS", 64)
    monkeypatch.setattr(standing, "PAST_ROWS", 256)
    monkeypatch.setattr(table, "VERSIONS_KEPT", 32)
    life = Life(tmp_path)
    yield life
    life.store.journal.close()


def test_neither_the_state_nor_the_journal_grows_with_the_length_of_a_run(life: Life) -> None:
    life.go_on(200)
    early = life.sizes
    life.go_on(1000)
    late = life.sizes
    for name in ("state", "segments", "files"):
        assert late[name] < 1.5 * early[name], (name, early, late)
    trained = 1000 * GROUPS * MEMBERS
    assert (late["history"] - early["history"]) / trained < 200, "bytes of history per row"
    assert life.store.rows.statistics().trained == 1200 * GROUPS * MEMBERS


def test_what_is_forgotten_is_refused_and_not_made_up(life: Life) -> None:
    life.go_on(100)
    rows = life.store.rows
    with pytest.raises(LeaseExpired):
        rows.write(0.0, "s", 1, [1], (), ())
    assert rows.versions.keys() == set(range(70, 102))
    put, ids, known = rows.put(0.0, ["100/0"], ["e"], members=MEMBERS, split="train", priority=0, sources={})
    assert (put, known) == (None, (0,)), "a key of the last ones is still known"
    assert len(ids) == MEMBERS
