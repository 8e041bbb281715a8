"""Rows of the queue become the micro-batches of a step, in the order in which they get ready.

    queue ── lease(step) ──► leader ── ids, one broadcast ──► every rank ── fetch ──► micro-batches

The leader leases; alone it gets the payload with the lease, else every rank fetches its own rows. A round ends
with the same number of micro-batches on every rank, because each forward pass is a collective under FSDP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from streamrl_queue.errors import DeadlineExceeded, SchemaError

from .algorithms.advantages import standardised
from .algorithms.lags import Lags
from .algorithms.metrics import Tally
from .algorithms.pieces import Algorithm
from .batches import (
    COLUMNS,
    MicroBatch,
    Row,
    aged,
    is_computed,
    micro_batch,
    micro_batches,
    plan,
    row_weight,
    rows_of,
)
from .config import LearnerConfig
from .ranks import Ranks

if TYPE_CHECKING:
    from streamrl_queue import BlockingTransferQueue, Lease


# How long no row may be on its way before trained ones are asked to make room: the feeder looks more often.
STARVED_SECONDS: Final = 1.0
# States of rows that will be trained, or end, without any new one.
ON_THEIR_WAY: Final = ("waiting", "ready", "parked", "leased")


class Turn(IntEnum):
    """What the leader decided for this round."""

    HAND_OUT = 0
    WAIT = 1
    STOP = 2
    MAKE_ROOM = 3


class Round(NamedTuple):
    """The leader's word to all ranks: which rows go into which micro-batch."""

    turn: Turn
    batches: tuple[tuple[int, ...], ...] = ()

    def encode(self) -> list[int]:
        """As plain numbers: turn, number of batches, their sizes, all ids."""
        sizes = [len(batch) for batch in self.batches]
        return [self.turn, len(sizes), *sizes, *(row for batch in self.batches for row in batch)]

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Round:
        turn, count = numbers[:2]
        batches, at = [], 2 + count
        for size in numbers[2 : 2 + count]:
            batches.append(tuple(numbers[at : at + size]))
            at += size
        return cls(Turn(turn), tuple(batches))


class Stream:
    """Assembles each step out of the rows that are ready."""

    def __init__(
        self,
        queue: BlockingTransferQueue,
        config: LearnerConfig,
        algorithm: Algorithm,
        tally: Tally,
        *,
        ranks: Ranks | None = None,
        device: torch.device | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        budget_bytes: int | None = None,
        make_room: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`budget_bytes`: what rows may take in the journal, if that is known. `make_room` lets rows of steps up to the
        given one go; it is called on all ranks, when such rows keep out those that are waited for.
        """
        self._queue = queue
        self._config = config
        self._algorithm = algorithm
        self._tally = tally
        self._ranks = ranks or Ranks()
        self._device = device or torch.device("cpu")
        self._should_stop = should_stop
        self._clock = clock
        self._steps: dict[int, int] = {}
        self._step = 0
        self._taken: list[int] = []
        self._leases: list[Lease] = []
        self._mean_tokens: float | None = None
        self._budget_bytes = budget_bytes
        self._make_room = make_room
        # When rows were on their way last.
        self._fed = 0.0
        self.stopped = False
        self.idle_seconds = 0.0

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of `step`, as rows get ready; ends when `rows_per_step` rows are in, or on a stop.

        An advantage that is standardised over the step is known when all its rows are in: the micro-batches come then.

        Consumes rows that are ready to learn. Produces micro-batches and, in the tally, what the rows tell. Waits
        for the queue. Unblocked by rows, by `should_stop` (then `stopped` is set and the rows are given back), or by
        `wait_seconds` without a row.

        Raises:
            DeadlineExceeded: naming the step and how many of its rows were there.
            SchemaError: a row that cannot be trained, naming it.
        """
        self._step, self._taken, self._leases, self.idle_seconds = step, [], [], 0.0
        last_row = self._fed = self._clock()
        held: list[list[Row]] = []
        with self._queue.waiting(self._missing(), on=self._source) as wait:
            while len(self._taken) < self._config.rows_per_step:
                batch, word = self._next_round(step)
                if word.turn is Turn.STOP:
                    return self._give_up()
                if word.turn is not Turn.HAND_OUT:
                    self._check_deadline(last_row)
                    if word.turn is Turn.MAKE_ROOM:
                        self._make_room(step - 1)
                        self._fed = self._clock()
                    continue
                last_row = self._fed = self._clock()
                self._taken += [row for rows in word.batches for row in rows]
                parts = self._materialise(word, batch)
                if self._algorithm.advantage.standardises:
                    held += parts
                else:
                    wait.at(f"trains rows of step {step}")
                    yield from self._packed(parts)
                wait.at(self._missing(), on=self._source)
        if self._algorithm.advantage.standardises:
            yield from self._packed(self._standardised(held))

    @property
    def _source(self) -> str:
        """Where rows come from: the queue's stage, or the rank that leases them."""
        return "learn" if self._ranks.leads else "learner-0"

    def _missing(self) -> str:
        return f"waits for rows of step {self._step}: {len(self._taken)} of {self._config.rows_per_step} are there"

    def rows(self, step: int) -> list[int]:
        """The ids of all rows of `step`, on every rank; it must be the step last assembled."""
        assert step == self._step
        return list(self._taken)

    def _next_round(self, step: int) -> tuple[pa.RecordBatch | None, Round]:
        """Ask the queue once (leader), or hear what the leader got."""
        if not self._ranks.leads:
            self._queue.report(f"waits for the leader's rows of step {step}")
            word = Round.decode(self._ranks.share(None))
            self._queue.report(f"trains step {step}")
            return None, word
        lease = None if self._should_stop() else self._lease(step)
        if lease:
            self._leases.append(lease)
            word = Round(Turn.HAND_OUT, self._assign(lease))
        elif self._should_stop():
            word = Round(Turn.STOP)
        else:
            word = Round(Turn.MAKE_ROOM if self._lacks_room(step) else Turn.WAIT)
        self._ranks.share(word.encode())
        return (lease.batch if lease else None), word

    def _lease(self, step: int) -> Lease | None:
        """Rows for one micro-batch per rank; fewer when they do not get ready within `linger_seconds`."""
        remaining = self._config.rows_per_step - len(self._taken)
        room = self._config.micro_batch_tokens * self._ranks.world
        wanted = remaining if self._mean_tokens is None else min(remaining, max(1, int(room / self._mean_tokens)))
        started = self._clock()
        self._queue.report(f"waits for rows of step {step} ({len(self._taken)} of {self._config.rows_per_step})")
        lease = self._queue.lease(
            "learn",
            rows=wanted,
            at_least=wanted,
            wait=self._config.linger_seconds,
            step=step,
            payload=self._ranks.world == 1,
            columns=COLUMNS,
        )
        self.idle_seconds += self._clock() - started
        if lease:
            self._queue.report(f"trains step {step}")
        return lease

    def _lacks_room(self, step: int) -> bool:
        """Whether trained rows seem to keep the missing ones out: they take up the journal's budget until a checkpoint
        covers them.

        A put that waits for bytes, and is smaller than half of the budget, waits behind as many that are needed. Once
        all rows that were let in before it are trained or held here, nothing but more room leads on.
        """
        if self._budget_bytes is None or step == 1:
            return False
        train = self._queue.statistics().by_split.get("train", {})
        if sum(train.get(state, 0) for state in ON_THEIR_WAY) > len(self._taken):
            self._fed = self._clock()
        if self._clock() - self._fed < STARVED_SECONDS:
            return False
        return 2 * self._queue.journal_bytes() > self._budget_bytes

    def _assign(self, lease: Lease) -> tuple[tuple[int, ...], ...]:
        """Micro-batches of row ids, the same number for every rank; alone, all rows in one list."""
        lengths = [row.tokens or self._config.micro_batch_tokens for row in lease.rows]
        self._mean_tokens = sum(lengths) / len(lengths)
        if self._ranks.world == 1:
            return (tuple(row.row for row in lease.rows),)
        batches = [tuple(lease.rows[i].row for i in batch) for batch in plan(lengths, self._config.micro_batch_tokens)]
        return (*batches, *[()] * (-len(batches) % self._ranks.world))

    def _materialise(self, word: Round, batch: pa.RecordBatch | None) -> list[list[Row]]:
        """The rows of this rank in one round, a list for each of its micro-batches; alone, all in one."""
        mine = word.batches[self._ranks.rank :: self._ranks.world]
        ids = [row for rows in mine for row in rows]
        if batch is None and ids:
            batch = self._queue.fetch(ids, COLUMNS)
        found = rows_of(batch) if batch is not None else []
        rows = {row.id: aged(row, self._lags(row), self._algorithm.lag) for row in found}
        return [[rows[id] for id in part] for part in mine]

    def _standardised(self, parts: list[list[Row]]) -> list[list[Row]]:
        """The rows of a step that was held, with advantages that are standardised over it. Collective."""
        rows = [row for part in parts for row in part]
        values, tokens = [row.advantage for row in rows], [row.sampled for row in rows]
        advantages = iter(standardised(self._algorithm.advantage, values, tokens, self._ranks.summed).tolist())
        new = [[row._replace(advantage=next(advantages)) for row in part] for part in parts]
        return new if self._ranks.world > 1 else [[row for part in new for row in part]]

    def _packed(self, parts: Iterable[list[Row]]) -> Iterator[MicroBatch]:
        """The micro-batches of `parts`: one each, or alone as many as the budget asks for."""
        for part in parts:
            self._count(part)
            if self._ranks.world == 1:
                micros = micro_batches(part, self._config.micro_batch_tokens, self._algorithm)
            else:
                # One forward pass for each part, on every rank, even if nothing of it has to be computed.
                computed = [row for row in part if is_computed(row, self._algorithm)]
                micros = iter((micro_batch(computed, self._algorithm),))
            yield from (micro.to(self._device) for micro in micros)

    def _count(self, rows: Iterable[Row]) -> None:
        for row in rows:
            lag = self.lag(row)
            self._tally.add(
                rows=1,
                weight=row_weight(row, self._algorithm),
                sampled_tokens=row.sampled,
                tokens=len(row.tokens),
                reward=row.reward,
                lag=lag,
                signal_rows=row.has_signal,
                empty_rows=row.sampled == 0,
            )
            self._tally.highest(lag_max=lag, tokens_max=len(row.tokens))

    def lag(self, row: Row) -> int:
        """Steps taken when the row is trained, minus the step of the oldest version that sampled in it.

        0 for a row that nothing was sampled in, and for one from a step that a resumed run has not reached again.
        """
        oldest = min((self._step_of(span.version, row.id) for span in row.spans), default=self._step - 1)
        return max(0, self._step - 1 - oldest)

    def _lags(self, row: Row) -> Lags:
        """The lag of each token `[tokens]`; 0 before the first span, where nothing was sampled."""
        lags = np.zeros(len(row.tokens), np.int64)
        for span in row.spans:
            lags[span.start :] = max(0, self._step - 1 - self._step_of(span.version, row.id))
        return lags

    def _step_of(self, version: int, row: int) -> int:
        if version not in self._steps:
            self._steps = {known.id: known.step for known in self._queue.versions()}
        if version not in self._steps:
            raise SchemaError(f"row {row}: versions: expected versions that were begun, got {version}")
        return self._steps[version]

    def _check_deadline(self, last_row: float) -> None:
        waited = self._clock() - last_row
        if self._ranks.leads and waited > self._config.wait_seconds:
            what = f"rows of step {self._step} ({len(self._taken)} of {self._config.rows_per_step} are there)"
            raise DeadlineExceeded.waiting(what, "the queue's stage learn", waited)

    def _give_up(self) -> None:
        self.stopped = True
        for lease in self._leases:
            self._queue.release(lease, reason=f"the learner stops before step {self._step} is whole")
