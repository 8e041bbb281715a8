"""Where the queue's broker spends its time: the pipeline of `bench/queue.py` without processes and sockets.

    python bench/queue_profile.py [--puts N] [--mapped]

Requests of 64 rows put, 32 leased and 32 written are made as a client makes them, and given to a broker in this
process, one after the other. Prints the CPU time of the broker's own thread for each kind of request, by part, and
beside it what only copying and digesting the same bytes takes. What a pipeline of processes takes beyond this is
sockets, event loops, the clients, and caches that they take from each other.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A script's own directory comes first, and `queue.py` there would stand for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import trio
from rich.console import Console
from rich.table import Table

from bench.queues.arrow import record_batch
from bench.queues.ours import STAGES
from bench.queues.payload import Payload
from streamrl_queue import Flow, batches, store, wire
from streamrl_queue import broker as broker_module
from streamrl_queue import messages as m
from streamrl_queue.broker import Broker
from streamrl_queue.journal import Journal, Segment
from streamrl_queue.nonces import NONCE_BYTES
from streamrl_queue.rows import Rows
from streamrl_queue.transport import Buffer

PUT_ROWS: Final = 64
LEASE_ROWS: Final = 32
WARM_UP: Final = 20
# Part → the functions that are it. Of functions within each other the inner one counts.
PARTS: Final[dict[str, list[tuple[Any, str]]]] = {
    "digests": [(wire, "payload_digest"), (wire, "digest")],
    "Arrow": [(broker_module, "decode"), (store, "read"), (batches, "select"), (batches, "_write")],
    "writing the journal": [(Segment, "append")],
    "deciding": [(Rows, name) for name in ("fresh", "put", "lease", "held", "written_before", "write")],
    "folding": [(Rows, "apply")],
}
REST: Final = "messages, replies, the rest"


class Clock:
    """CPU time of this thread by part, of the request that is being handled."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, int] = defaultdict(int)
        self._within: list[int] = [0]

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, and its time goes to `part`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            self._within.append(0)
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time_ns() - began
                self.parts[part] += spent - self._within.pop()
                self._within[-1] += spent

        return timed


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """The parts' functions tell the clock."""
    kept = [(owner, name, getattr(owner, name)) for found in PARTS.values() for owner, name in found]
    for part, found in PARTS.items():
        for owner, name in found:
            setattr(owner, name, clock.wrap(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


class Nowhere:
    """Takes the broker's replies."""

    address = "nowhere"

    def __init__(self) -> None:
        self.sent: list[list[Buffer]] = []

    def send(self, frames: list[Buffer]) -> bool:
        self.sent.append(frames)
        return True


class Caller:
    """Three clients' requests, one after another, and what each of them cost."""

    def __init__(self, broker: Broker, router: Nowhere, clock: Clock) -> None:
        self._broker = broker
        self._router = router
        self._clock = clock
        self._nonce = os.urandom(NONCE_BYTES)
        self._ids: defaultdict[str, int] = defaultdict(int)
        self._decode = msgspec.msgpack.Decoder(m.Reply).decode
        # Request → its costs, by part, in nanoseconds.
        self.costs: defaultdict[str, list[dict[str, int]]] = defaultdict(list)

    async def ask(self, session: str, request: msgspec.Struct, payload: Buffer | None = None) -> Any:
        self._ids[session] += 1
        id = self._ids[session]
        nonce = self._nonce + self._broker.door.token(session, self._nonce)
        frames = wire.seal(session, id, request, payload, None, (id + 1, id), nonce)
        self._router.sent.clear()
        self._clock.parts.clear()
        began = time.thread_time_ns()
        self._broker._take([session.encode(), *frames])
        self._broker._keep_time(self._broker._clock())
        self._broker._look_again()
        await self._broker._answer()
        spent = time.thread_time_ns() - began
        parts = dict(self._clock.parts)
        parts[REST] = spent - sum(parts.values())
        self.costs[f"{type(request).__name__} of {session}"].append(parts)
        (reply,) = self._router.sent
        return self._decode(wire.unseal(reply[1:], None)[0].body)


async def pipeline(caller: Caller, puts: int, mapped: bool) -> None:
    """Every row is put, rewarded and learned."""
    payload = Payload()
    for session in ("producer", "reward", "learner"):
        await caller.ask(session, m.Hello(session, session))
    for number in range(puts + WARM_UP):
        keys = tuple(f"{number}/{line}" for line in range(PUT_ROWS))
        batch = record_batch(payload.batch(number * PUT_ROWS, PUT_ROWS))
        await caller.ask("producer", m.PutTasks(keys, 1, "train", 0, {}, 30.0), batches.encode(batch))
        for stage in ("reward", "learner"):
            for _ in range(PUT_ROWS // LEASE_ROWS):
                ask = m.LeaseRows(stage, LEASE_ROWS, LEASE_ROWS, 30.0, None, None, True, None, mapped)
                grant = await caller.ask(stage, ask)
                columns = {"row": pa.array([row.row for row in grant.rows], pa.uint64())}
                if stage == "reward":
                    columns["reward"] = pa.array(np.zeros(LEASE_ROWS))
                written = pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])
                await caller.ask(stage, m.WriteColumns(grant.lease), batches.encode(written))


async def measure(puts: int, mapped: bool) -> dict[str, list[dict[str, int]]]:
    """Request → the costs of each, by part."""
    clock, router = Clock(), Nowhere()
    with tempfile.TemporaryDirectory() as where, watched(clock):
        journal = Journal(Path(where), durability="flush", segment_bytes=64 << 20)
        try:
            broker = Broker(Flow(stages=STAGES), journal, router)  # type: ignore[arg-type]
            broker.recover()
            caller = Caller(broker, router, clock)
            await pipeline(caller, puts, mapped)
        finally:
            journal.close()
    return caller.costs


def floor() -> float:
    """Microseconds per row to copy a put's bytes once and to digest them twice, as warm as can be."""
    data = bytes(batches.encode(record_batch(Payload().batch(0, PUT_ROWS))))
    spent = []
    for _ in range(100):
        began = time.thread_time_ns()
        copy = bytearray(data)
        wire.payload_digest(copy)
        wire.payload_digest(copy)
        spent.append(time.thread_time_ns() - began)
    return statistics.median(spent) / 1e3 / PUT_ROWS


def show(costs: dict[str, list[dict[str, int]]], console: Console) -> None:
    parts = [*PARTS, REST]
    table = Table("request", "for 64 rows", *parts, "all, µs per row", title="broker, CPU µs per row")
    totals = dict.fromkeys(parts, 0.0)
    for name, found in costs.items():
        if len(found) <= 2 * WARM_UP:
            continue  # hellos
        times = 1 if name.startswith("PutTasks") else PUT_ROWS // LEASE_ROWS
        steady = found[WARM_UP * times :]
        by_part = {p: statistics.median(cost.get(p, 0) for cost in steady) * times / 1e3 / PUT_ROWS for p in parts}
        for part, value in by_part.items():
            totals[part] += value
        table.add_row(name, str(times), *(f"{by_part[p]:.1f}" for p in parts), f"{sum(by_part.values()):.1f}")
    table.add_section()
    table.add_row("a row", "", *(f"{totals[p]:.1f}" for p in parts), f"{sum(totals.values()):.1f}")
    console.print(table)
    console.print(f"floor: one copy and two digests of what is put: {floor():.1f} µs per row")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--puts", type=int, default=200)
    parser.add_argument("--mapped", action="store_true", help="consumers read columns in place")
    options = parser.parse_args()
    show(trio.run(measure, options.puts, options.mapped), Console(width=150))


if __name__ == "__main__":
    main()
