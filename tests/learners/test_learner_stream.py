"""A step takes rows as they become ready, exactly `rows_per_step` of them, and waits with a deadline."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from learner_fakes import FakeQueue, make_row

from streamrl_learners.algorithms.metrics import Tally
from streamrl_learners.algorithms.pieces import Algorithm, ReinforcePlusPlus
from streamrl_learners.config import LearnerConfig
from streamrl_learners.ranks import Ranks
from streamrl_learners.stream import Round, Stream, Turn
from streamrl_queue import Version
from streamrl_queue.errors import DeadlineExceeded, SchemaError
from streamrl_queue.schema import Span

ROWS = [make_row(i) for i in range(20)]


def make_stream(queue: FakeQueue, tally: Tally | None = None, **options) -> Stream:
    config = LearnerConfig(rows_per_step=8, micro_batch_tokens=options.pop("budget", 4096), wait_seconds=5.0)
    return Stream(queue, config, Algorithm(), tally or Tally(), **options)


def test_a_micro_batch_is_made_of_what_is_ready():
    queue = FakeQueue(ROWS, arrivals=[3, 0, 4, 5])
    stream = make_stream(queue)
    batches = iter(stream.micro_batches(1))
    next(batches)
    assert queue.log == [("lease", 1, 3), ("versions",)]
    assert len(list(batches)) == 2
    assert stream.rows(1) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_rank_that_does_not_lead_says_what_it_waits_for_and_does():
    class Follower(Ranks):
        def share(self, numbers):
            return Round(Turn.HAND_OUT, ((0, 1, 2, 3), (4, 5, 6, 7))).encode()

    queue, said = FakeQueue(ROWS), []
    queue.report = lambda activity=None, **gauges: said.append(activity)
    list(make_stream(queue, ranks=Follower(rank=1, world=2)).micro_batches(1))
    assert said == ["waits for the leader's rows of step 1", "trains step 1"]


class Starved(FakeQueue):
    """All rows that there are have been handed out, and the journal holds 600 bytes."""

    def __init__(self, *, others: int = 0) -> None:
        super().__init__(ROWS, arrivals=[4])
        self.others = others
        self.rooms: list[int] = []
        self.journal_bytes = lambda: 600

    def make_room(self, step: int) -> None:
        self.rooms.append(step)
        self.arrivals = [4]

    def statistics(self) -> SimpleNamespace:
        states = {"trained": 16, "leased": 4, "waiting": self.others}
        return SimpleNamespace(by_split={"train": states, "eval": {"waiting": 7}})


@pytest.mark.parametrize(
    ("others", "budget", "step", "rooms"),
    [(0, 1000, 3, [2]), (1, 1000, 3, []), (0, 2000, 3, []), (0, None, 3, []), (0, 1000, 1, [])],
)
def test_room_is_asked_for_only_when_no_other_row_is_left_and_the_journal_may_be_full(others, budget, step, rooms):
    queue, seconds = Starved(others=others), itertools.count(0.0, 0.3)
    stream = make_stream(queue, clock=lambda: next(seconds), budget_bytes=budget, make_room=queue.make_room)
    queue.arrivals = [4, *[0] * 100]
    if rooms:
        list(stream.micro_batches(step))
        assert len(stream.rows(step)) == 8
    else:
        with pytest.raises(DeadlineExceeded, match=r"\(4 of 8 are there\)"):
            list(stream.micro_batches(step))
    assert queue.rooms == rooms


def test_a_rank_that_does_not_lead_makes_room_with_the_leader():
    words = [Round(Turn.MAKE_ROOM), Round(Turn.HAND_OUT, ((0, 1, 2, 3), (4, 5, 6, 7)))]

    class Follower(Ranks):
        def share(self, numbers):
            return words.pop(0).encode()

    rooms: list[int] = []
    list(make_stream(FakeQueue(ROWS), ranks=Follower(rank=1, world=2), make_room=rooms.append).micro_batches(3))
    assert rooms == [2]


def test_steps_share_no_row():
    stream = make_stream(FakeQueue(ROWS))
    taken = []
    for step in (1, 2):
        list(stream.micro_batches(step))
        taken += stream.rows(step)
    assert taken == list(range(16))


def test_a_step_never_takes_more_rows_than_it_trains():
    queue = FakeQueue(ROWS, arrivals=[7, 9])
    stream = make_stream(queue)
    list(stream.micro_batches(1))
    assert len(stream.rows(1)) == 8
    assert len(queue.ready) == 12


def test_large_steps_are_leased_by_the_micro_batch():
    queue = FakeQueue([make_row(i, seed=1) for i in range(20)])
    stream = make_stream(queue, budget=3 * len(make_row(0, seed=1).tokens))
    list(stream.micro_batches(1))
    list(stream.micro_batches(2))
    assert [count for _, step, count in (e for e in queue.log if e[0] == "lease") if step == 2] == [3, 3, 2]


def test_waiting_for_rows_ends_with_an_error_that_says_what_is_missing():
    now = [0.0]
    queue = FakeQueue(ROWS[:5])

    def tick(count: int) -> None:
        now[0] += 1.0

    queue.on_lease = tick
    with pytest.raises(DeadlineExceeded, match=r"rows of step 4 \(5 of 8 are there\) from the queue's stage learn"):
        list(make_stream(queue, clock=lambda: now[0]).micro_batches(4))


def test_time_spent_waiting_is_told():
    now = [0.0]
    queue = FakeQueue(ROWS, arrivals=[0, 8])

    def tick(count: int) -> None:
        now[0] += 2.0

    queue.on_lease = tick
    stream = make_stream(queue, clock=lambda: now[0])
    list(stream.micro_batches(1))
    assert stream.idle_seconds == 4.0


def test_a_stop_request_gives_the_partial_step_back():
    queue = FakeQueue(ROWS, arrivals=[3, 0])
    stop = [False]

    def ask(count: int) -> None:
        stop[0] = count == 2

    queue.on_lease = ask
    stream = make_stream(queue, should_stop=lambda: stop[0])
    list(stream.micro_batches(1))
    assert stream.stopped
    assert ("release", (0, 1, 2)) in queue.log


def test_lag_counts_steps_from_the_oldest_version_that_sampled():
    versions = [Version(id=4, step=0, parent=None), Version(id=9, step=3, parent=4), Version(id=11, step=5, parent=9)]
    rows = [make_row(i, spans=(Span(0, 11, 11), Span(2, 9, 9))) for i in range(8)]
    queue, tally = FakeQueue(rows, versions=versions), Tally()
    list(make_stream(queue, tally).micro_batches(6))
    summary = tally.take(Ranks()).summary()
    assert summary["lag_mean"] == summary["lag_max"] == 2
    assert queue.log.count(("versions",)) == 1


def test_a_version_that_nobody_began_is_refused():
    queue = FakeQueue([make_row(5, spans=(Span(0, 77, 77),))])
    with pytest.raises(SchemaError, match="row 5: versions: expected versions that were begun, got 77"):
        list(make_stream(queue).micro_batches(1))


def test_rows_sampled_after_the_checkpoint_of_a_resumed_run_have_no_negative_lag():
    rows = [make_row(i, spans=(Span(0, 2, 2),)) for i in range(8)]
    tally = Tally()
    queue = FakeQueue(rows, versions=[Version(id=2, step=30, parent=1)])
    list(make_stream(queue, tally).micro_batches(21))
    assert tally.take(Ranks()).summary()["lag_max"] == 0


def test_rows_that_teach_nothing_are_counted_and_committed_but_not_computed():
    rows = [make_row(i, advantage=0.0) for i in range(8)]
    tally = Tally()
    stream = make_stream(FakeQueue(rows), tally)
    assert list(stream.micro_batches(1)) == []
    assert len(stream.rows(1)) == 8
    summary = tally.take(Ranks()).summary()
    assert summary["rows"] == 8
    assert summary["signal_share"] == 0
    assert summary["sampled_tokens"] == sum(row.sampled for row in rows)


@pytest.mark.parametrize("word", [Round(Turn.WAIT), Round(Turn.HAND_OUT, ((1, 2), (), (2**62,)))])
def test_the_leaders_word_is_plain_numbers(word: Round):
    assert all(isinstance(number, int) for number in word.encode())
    assert Round.decode(word.encode()) == word


class TwoRanks(Ranks):
    """The leader of two ranks, without the other one."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.said: list[Round] = []

    def share(self, numbers):
        self.said.append(Round.decode(numbers))
        return list(numbers)


def test_every_rank_gets_the_same_number_of_micro_batches():
    ranks = TwoRanks()
    rows = [make_row(i, seed=7) for i in range(8)]
    stream = make_stream(FakeQueue(rows, arrivals=[5, 3]), ranks=ranks, budget=2 * len(rows[0].tokens))
    mine = list(stream.micro_batches(1))
    dealt = [len(word.batches) for word in ranks.said]
    assert all(count % 2 == 0 for count in dealt)
    assert len(mine) == sum(dealt) / 2
    assert () in ranks.said[0].batches


def test_a_step_whose_advantages_are_standardised_is_held_until_it_is_whole():
    queue, tally = FakeQueue(ROWS, arrivals=[3, 2, 3]), Tally()
    algorithm = Algorithm(advantage=ReinforcePlusPlus())
    stream = Stream(queue, LearnerConfig(rows_per_step=8, micro_batch_tokens=40), algorithm, tally)
    first = next(batches := stream.micro_batches(1))
    assert sum(entry[2] for entry in queue.log if entry[0] == "lease") == 8
    micros = [first, *batches]
    assert len(micros) > 1
    advantages = torch.cat([micro.advantages for micro in micros]).double()
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-6)
    assert float(advantages.std(correction=0)) == pytest.approx(1, abs=1e-6)
    assert tally.sums["rows"] == tally.sums["signal_rows"] == 8


def test_each_token_has_the_lag_of_its_own_version():
    row = make_row(3)
    n = len(row.tokens)
    row = row._replace(spans=(Span(0, 1, 1), Span(n // 2, 2, 1)), advantage=1.0)
    versions = tuple(Version(id=i, step=i - 1, parent=None, digest="") for i in (1, 2))
    stream = Stream(FakeQueue([row], versions=versions), LearnerConfig(rows_per_step=1), Algorithm(), Tally())
    (micro,) = stream.micro_batches(5)
    assert micro.lags.tolist() == [4 if t < n // 2 else 3 for t in range(n) if row.mask[t]]
