"""One process of a system under test: its server, or the producer, reward worker or learner that uses it.

    python -m bench.queues.role SYSTEM server|producer|reward|learner DIRECTORY [ADDRESS]

The driver's commands are lines of JSON on standard input, the answers lines of JSON on standard output; the end of
the input ends the process. Runs in the system's own environment: numpy, trio and the system's packages are all it has.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final, TextIO, cast

import numpy as np
import numpy.typing as npt
import trio

from .payload import Payload, WrongRow, reward_of
from .system import ENTRIES, Client, Role, System, Taken, load

# Of so many takes the learner keeps one, to compare it byte by byte afterwards.
SAMPLED: Final = 16


class Producer:
    """Puts rows; the clock of every put starts with arrays and ends with the system's word that it has them."""

    def __init__(self, client: Client, payload: Payload) -> None:
        self._client = client
        self._payload = payload

    async def put(self, first: int, rows: int, size: int, in_flight: int) -> dict[str, Any]:
        starts = iter(range(first, first + rows, size))
        seconds: list[float] = []

        async def work() -> None:
            for start in starts:
                began = time.perf_counter()
                await self._client.put(self._payload.batch(start, min(size, first + rows - start)))
                seconds.append(time.perf_counter() - began)

        return await _timed(work, in_flight or self._client.in_flight, seconds)


class Consumer:
    """Takes rows for a stage. The reward worker writes a reward into each, the learner finishes them."""

    def __init__(self, client: Client, payload: Payload, role: Role) -> None:
        self._client = client
        self._payload = payload
        self._role = role
        self._uids: list[npt.NDArray[np.int64]] = []
        self._kept: list[Taken] = []

    async def get(self, rows: int, size: int, ahead: int) -> dict[str, Any]:
        left = rows
        seconds: list[float] = []

        async def work() -> None:
            nonlocal left
            while left > 0:
                wanted = min(size, left)
                left -= wanted
                began = time.perf_counter()
                taken = await self._client.get(wanted)
                seconds.append(time.perf_counter() - began)
                left += wanted - len(taken.uids)
                if len(self._uids) % SAMPLED == 0:
                    self._kept.append(taken)
                # A copy: a view would keep the whole batch.
                self._uids.append(taken.uids.copy())
                await self._client.finish(taken, reward_of(taken.uids) if self._role == "reward" else None)

        return await _timed(work, 1 + (self._client.ahead if ahead < 0 else ahead), seconds)

    async def verify(self, first: int, rows: int) -> dict[str, Any]:
        """Every row came exactly once; those of the sample with every byte."""
        uids = np.sort(np.concatenate(self._uids)) if self._uids else np.empty(0, np.int64)
        if not np.array_equal(uids, np.arange(first, first + rows)):
            raise WrongRow(f"{self._role}: expected rows {first} to {first + rows} once each, got {len(uids)} rows")
        compared = 0
        if self._role == "learner":
            compared = sum(self._payload.check(self._client.columns(taken)) for taken in self._kept)
        self._uids.clear()
        self._kept.clear()
        return {"compared": compared}


async def _timed(work: Callable[[], Any], tasks: int, seconds: list[float]) -> dict[str, Any]:
    """Run `work` in so many tasks; the clock is the machine's, so that other processes' times compare."""
    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        for _ in range(tasks):
            nursery.start_soon(work)
    return {"began": began, "ended": time.monotonic(), "seconds": seconds}


async def _commands() -> AsyncIterator[dict[str, Any]]:
    """Consumes standard input; produces the driver's commands; unblocked by its next line or its end."""
    rest = b""
    async with trio.lowlevel.FdStream(os.dup(0)) as stream:
        async for data in stream:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield json.loads(line)


async def _serve(system: System, variant: str, where: Path, say: Callable[[Any], None]) -> None:
    async with system.serve(variant, where) as address:
        say({"address": address})
        async for _ in _commands():
            pass


async def _work(
    system: System, variant: str, where: Path, address: str, role: Role, say: Callable[[Any], None]
) -> None:
    payload = Payload()
    async with system.connect(variant, where, address, role) as client:
        worker = Producer(client, payload) if role == "producer" else Consumer(client, payload, role)
        say({"row_bytes": payload.row_bytes})
        async for command in _commands():
            say(await getattr(worker, command.pop("do"))(**command))


def _answers() -> TextIO:
    """Standard output, for answers alone: whatever else prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def main() -> None:
    name, role, where, *address = sys.argv[1:]
    answers = _answers()

    def say(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")

    entry = ENTRIES[name]
    system = load(entry)
    if role == "server":
        trio.run(_serve, system, entry.variant, Path(where), say)
    else:
        trio.run(_work, system, entry.variant, Path(where), address[0], cast(Role, role), say)


if __name__ == "__main__":
    main()
