"""The broker's memory: the journal's pages are the kernel's, rows cost little, and what has ended costs nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from test_queue_broker import run

from streamrl_queue import TransferQueue

SCRIPT = """
import sys, trio
from pathlib import Path
from streamrl_queue import open_broker, work_flow

async def main(directory, bind):
    async with open_broker(work_flow(), Path(directory), bind=bind, segment_bytes=16 << 20) as broker:
        print(broker.address, flush=True)
        await trio.sleep_forever()

trio.run(main, *sys.argv[1:])
"""
MIB = 1 << 20


@contextmanager
def broker_process(path: Path) -> Iterator[tuple[str, int]]:
    """A broker in a process of its own: its address and its process id."""
    command = [sys.executable, "-c", SCRIPT, str(path / "journal"), f"ipc://{path}/q.sock"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.communicate()


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that no file backs."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def ids(rows: tuple[int, ...]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"row": pa.array(rows, pa.uint64())})


def test_a_broker_holds_twenty_times_as_many_bytes_of_rows_as_it_has_memory_for(tmp_path: Path) -> None:
    budget, batch_bytes = 12 * MIB, 2 * MIB

    async def body(path: Path) -> None:
        with broker_process(path) as (address, pid):
            async with TransferQueue.connect(address, mapped=False) as queue:
                batch = pa.RecordBatch.from_pydict({"blob": [bytes(batch_bytes)]})
                for _ in range(3):
                    await queue.put(batch)
                before = anonymous_bytes(pid)
                for _ in range(20 * budget // batch_bytes):
                    await queue.put(batch)
                for _ in range(20):
                    lease = await queue.lease("work", rows=1)
                    assert lease is not None
                    assert lease.batch is not None
                assert await queue.journal_bytes() > 20 * budget
                assert anonymous_bytes(pid) - before < budget

    run(body, tmp_path, seconds=60)


def test_many_rows_cost_little_while_they_live_and_nothing_when_they_have_ended(tmp_path: Path) -> None:
    rows, waves = 5_000, 8

    async def body(path: Path) -> None:
        with broker_process(path) as (address, pid):
            async with TransferQueue.connect(address) as queue:

                async def wave() -> int:
                    """Rows come and go; returns the memory while they are all there."""
                    for _ in range(5):
                        await queue.put(pa.RecordBatch.from_pydict({"x": list(range(rows // 5))}))
                    alive = anonymous_bytes(pid)
                    while lease := await queue.lease("work", rows=500, payload=False):
                        await queue.write(lease, ids(lease.ids))
                    return alive

                empty = anonymous_bytes(pid)
                first = await wave()
                assert first - empty < rows * 4096
                for _ in range(2):
                    await wave()
                settled = anonymous_bytes(pid)
                for _ in range(waves):
                    await wave()
                assert anonymous_bytes(pid) - settled < 16 * MIB
                assert (await queue.statistics()).done == (3 + waves) * rows

    run(body, tmp_path, seconds=60)
