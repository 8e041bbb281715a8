"""Encrypted connections: nobody on the way reads anything, and nobody without the key gets in."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import trio
import trio.testing
import zmq

from streamrl_queue import Broker, TransferQueue, curve, open_broker, work_flow
from streamrl_queue.errors import ConfigError, DeadlineExceeded

KEY = bytes(range(32))
SECRET = "what only the two of them should know"


@asynccontextmanager
async def wire_tap(port: int) -> AsyncIterator[tuple[str, bytearray]]:
    """A port that passes everything on to another one, and what has passed."""
    heard = bytearray()

    async def carry(source: trio.SocketStream, target: trio.SocketStream) -> None:
        async for data in source:
            heard.extend(data)
            await target.send_all(data)

    async def serve(stream: trio.SocketStream) -> None:
        there = await trio.open_tcp_stream("127.0.0.1", port)
        async with there, trio.open_nursery() as nursery:
            nursery.start_soon(carry, stream, there)
            nursery.start_soon(carry, there, stream)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        yield f"tcp://127.0.0.1:{listeners[0].socket.getsockname()[1]}", heard
        nursery.cancel_scope.cancel()


async def told(path: Path, scheme: str) -> bytes:
    """What somebody on the way sees of a put and a lease."""
    with trio.fail_after(20):
        async with (
            open_broker(work_flow(), path / "j", bind=f"{scheme}127.0.0.1:0", key=KEY) as broker,
            wire_tap(int(broker.address.rpartition(":")[2])) as (address, heard),
            TransferQueue.connect(address.replace("tcp://", scheme), key=KEY, mapped=False) as queue,
        ):
            await queue.put(pa.RecordBatch.from_pydict({"x": [SECRET]}))
            lease = await queue.lease("work", rows=1)
            assert lease is not None
            assert lease.batch is not None
            assert lease.batch.column("x").to_pylist() == [SECRET]
    return bytes(heard)


def test_nobody_on_the_way_reads_what_is_put_and_leased(tmp_path: Path) -> None:
    open_wire = trio.run(told, tmp_path / "open", "tcp://")
    assert open_wire.count(SECRET.encode()) >= 2, "else this test could not fail"
    encrypted = trio.run(told, tmp_path / "encrypted", "curve+tcp://")
    assert SECRET.encode() not in encrypted
    assert b"PutTasks" in open_wire
    assert b"PutTasks" not in encrypted


@asynccontextmanager
async def encrypted(path: Path) -> AsyncIterator[Broker]:
    with trio.fail_after(20):
        async with open_broker(work_flow(), path / "j", bind="curve+tcp://127.0.0.1:0", key=KEY) as broker:
            yield broker


@pytest.mark.parametrize(
    ("scheme", "key"), [("tcp://", KEY), ("curve+tcp://", bytes(32))], ids=["in the clear", "with another key"]
)
def test_who_does_not_encrypt_under_the_key_is_never_heard(tmp_path: Path, scheme: str, key: bytes) -> None:
    async def test() -> None:
        async with encrypted(tmp_path) as broker:
            address = broker.address.replace("curve+tcp://", scheme)
            with pytest.raises(DeadlineExceeded):
                async with TransferQueue.connect(address, key=key, deadline=0.5):
                    pass
            assert broker.protocol_errors == 0, "its messages do not come as far as that"
            async with TransferQueue.connect(broker.address, key=KEY) as queue:
                assert (await queue.statistics()).tasks == 0

    trio.run(test)


def test_the_public_key_of_the_server_alone_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with encrypted(tmp_path) as broker:

            def stranger(own: Any, server: bytes, socket: zmq.Socket[bytes]) -> None:
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
                socket.curve_serverkey = server

            monkeypatch.setattr(curve, "_as_client", stranger)
            with pytest.raises(DeadlineExceeded):
                async with TransferQueue.connect(broker.address, key=KEY, deadline=0.5):
                    pass

    trio.run(test)


def test_clients_go_on_when_an_encrypted_broker_is_back(tmp_path: Path) -> None:
    async def test() -> None:
        bind = f"curve+ipc://{tmp_path}/q.sock"

        async def serve(scope: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
            with scope:
                async with open_broker(work_flow(), tmp_path / "j", bind=bind, key=KEY):
                    task_status.started()
                    await trio.sleep_forever()

        first, second = trio.CancelScope(), trio.CancelScope()
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                await nursery.start(serve, first)
                async with TransferQueue.connect(bind, key=KEY) as queue:
                    await queue.put(pa.RecordBatch.from_pydict({"x": [1]}))
                    first.cancel()
                    await trio.testing.wait_all_tasks_blocked()
                    await nursery.start(serve, second)
                    await queue.put(pa.RecordBatch.from_pydict({"x": [2]}))
                    assert (await queue.statistics()).tasks == 2
                second.cancel()

    trio.run(test)


def test_encryption_without_a_key_is_refused_before_anything_listens(tmp_path: Path) -> None:
    async def serve(key: bytes | None) -> None:
        async with open_broker(work_flow(), tmp_path / "j", bind="curve+tcp://0.0.0.0:0", key=key):
            pass

    async def connect() -> None:
        async with TransferQueue.connect("curve+tcp://127.0.0.1:1"):
            pass

    with pytest.raises(ConfigError, match="needs a key: make one with `streamrl keygen FILE`"):
        trio.run(serve, None)
    with pytest.raises(ConfigError, match="needs a key"):
        trio.run(connect)
    with pytest.raises(ConfigError, match="expected 32 bytes, got 5"):
        trio.run(serve, b"short")


def test_no_file_descriptor_and_no_thread_outlives_an_encrypted_broker(tmp_path: Path) -> None:
    async def once(number: int) -> None:
        async with (
            open_broker(work_flow(), tmp_path / str(number), bind="curve+tcp://127.0.0.1:0", key=KEY) as broker,
            TransferQueue.connect(broker.address, key=KEY) as queue,
        ):
            await queue.statistics()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    trio.run(once, 0)
    before = held()
    for number in range(1, 6):
        trio.run(once, number)
    after = held()
    # Those of the clients' context, which closes its sockets a moment later.
    assert after[0] <= before[0] + 4
    assert after[1] <= before[1] + 1
