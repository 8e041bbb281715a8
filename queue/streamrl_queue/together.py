"""Small puts of one process that are under way at the same time leave in one message.

put ─┐
put ─┼─► one request ──► its receipt, cut into theirs
put ─┘

A put leaves at once when no other of its kind is under way, and together with those that came meanwhile when one is:
alone it is as fast as ever, and a flood of them costs a message for each turn and not for each put. What is refused
together is tried again alone, so that every caller hears of its own mistakes only.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import trio

from . import messages as m
from .batches import encode, stream_bytes
from .errors import DeadlineExceeded, StreamRLError

log = logging.getLogger(__name__)

# A put of more bytes leaves alone: joining it with others costs more than a message.
SMALL_BYTES: Final = 1 << 16
# What leaves together; enough to make the cost of a message small.
MOST_BYTES: Final = 1 << 20
MOST_LINES: Final = 1 << 10

Exchange = Callable[[m.PutTasks, Any, float], Awaitable[tuple[m.Receipt, Any]]]


class _Put:
    """One caller's put."""

    def __init__(self, ask: m.PutTasks, batch: pa.RecordBatch) -> None:
        self.ask = ask
        self.batch = batch
        self.size = stream_bytes(batch)
        self.deadline = trio.current_time() + ask.wait
        self.done = trio.Event()
        # What came of it together with others; nothing, when it must go on alone.
        self.receipt: m.Receipt | None = None
        self.error: DeadlineExceeded | None = None

    @property
    def left(self) -> float:
        """Seconds that it may still wait for room."""
        return max(self.deadline - trio.current_time(), 0.0)


class _Line:
    """Puts of one kind that wait for the one under way."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.waiting: list[_Put] = []


class Together:
    """Joins puts.

    Args:
        exchange: asks the broker, with a payload, for so many seconds.
        nursery: where what several callers wait for lives, so that the end of one of them is not the others'.
    """

    def __init__(self, exchange: Exchange, nursery: trio.Nursery) -> None:
        self._exchange = exchange
        self._nursery = nursery
        # Kind → the puts that wait for the one under way.
        self._lines: dict[Hashable, _Line] = {}

    async def put(self, ask: m.PutTasks, batch: pa.RecordBatch) -> m.Receipt:
        """The receipt of one put.

        Raises:
            StreamRLError: what the broker says to this put.
        """
        put = _Put(ask, batch)
        kind = ask.members, ask.split, ask.priority, ask.filled
        line = self._lines.get(kind)
        if put.size > SMALL_BYTES or (line is not None and not line.schema.equals(batch.schema)):
            return await self._send(ask, batch)
        if line is not None:
            await self._wait(put, line.waiting)
            if put.error is not None:
                raise put.error
            return put.receipt or await self._send(msgspec.structs.replace(ask, wait=put.left), batch)
        line = self._lines[kind] = _Line(batch.schema)
        try:
            return await self._send(ask, batch)
        finally:
            if line.waiting:
                self._nursery.start_soon(self._take_turns, kind, line)
            else:
                del self._lines[kind]

    @staticmethod
    async def _wait(put: _Put, waiting: list[_Put]) -> None:
        """Until it was sent with others, or has waited for that as long as it may."""
        waiting.append(put)
        try:
            with trio.move_on_after(put.ask.wait):
                await put.done.wait()
        finally:
            here = put in waiting
            if here:
                waiting.remove(put)
        if not here:
            await put.done.wait()

    async def _send(self, ask: m.PutTasks, batch: pa.RecordBatch) -> m.Receipt:
        receipt, _ = await self._exchange(ask, encode(batch), ask.wait)
        return receipt

    async def _take_turns(self, kind: Hashable, line: _Line) -> None:
        """Consumes puts of one kind; produces their receipts; waits for the broker; ends when none came meanwhile."""
        turn: list[_Put] = []
        try:
            while turn := _first(line.waiting):
                await self._send_joined(turn)
                for put in turn:
                    put.done.set()
        finally:
            del self._lines[kind]
            for put in (*turn, *line.waiting):
                put.done.set()

    async def _send_joined(self, puts: list[_Put]) -> None:
        try:
            receipt = await self._send(_joined(puts), pa.concat_batches([put.batch for put in puts]))
        except DeadlineExceeded as error:
            for put in puts:
                put.error = DeadlineExceeded(str(error))
        except StreamRLError as error:
            # One of them is wrong, or there is no room for all.
            log.debug("%d puts were refused together, each goes alone: %s", len(puts), error)
        else:
            _hand_out(receipt, puts)


def _first(waiting: list[_Put]) -> list[_Put]:
    """Takes out the puts of the next turn."""
    size = lines = count = 0
    for put in waiting:
        size, lines = size + put.size, lines + len(put.batch)
        if count and (size > MOST_BYTES or lines > MOST_LINES):
            break
        count += 1
    turn = waiting[:count]
    del waiting[:count]
    return turn


def _joined(puts: Sequence[_Put]) -> m.PutTasks:
    """One request for all of them. It waits for room as long as each of them may."""
    sources: dict[str, int] = {}
    for put in puts:
        for source, index in put.ask.sources.items():
            sources[source] = max(index, sources.get(source, 0))
    keys = tuple(key for put in puts for key in put.ask.keys)
    return msgspec.structs.replace(puts[0].ask, keys=keys, sources=sources, wait=min(put.left for put in puts))


def _hand_out(receipt: m.Receipt, puts: Sequence[_Put]) -> None:
    """Everybody's share of the receipt."""
    key = 0
    for put in puts:
        end, members = key + len(put.ask.keys), put.ask.members
        known = tuple(at - key for at in receipt.known if key <= at < end)
        rows = receipt.rows[key * members : end * members]
        put.receipt = m.Receipt(rows, len(known), receipt.durability, known)
        key = end
