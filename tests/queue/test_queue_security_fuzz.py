"""Ten thousand damaged messages, without the key and with it: the broker serves on and holds nothing wrong."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import trio
from test_queue_broker import pass_all, publish, run, tasks, trajectory

from streamrl_queue import Broker, QueueConfig, TransferQueue, open_broker, schema, training_flow, wire
from streamrl_queue import messages as m
from streamrl_queue.batches import Part, RowKeys, assemble, encode, unpack
from streamrl_queue.errors import SchemaError
from streamrl_queue.nonces import NONCE_BYTES
from streamrl_queue.rpc import Forget, RpcClient
from streamrl_queue.transport import ZEROMQ
from streamrl_queue.waits import Waiting

KEY = b"k" * 32
FLOW = training_flow(QueueConfig(max_staleness=2, session_seconds=60.0, waiting_rows=256), rows_per_step=8)
SESSION = "fuzz"
# Of messages that were damaged on their way; of structures under a good digest; of payloads under a good digest.
ON_THEIR_WAY, STRUCTURES, PAYLOADS = 5000, 3000, 2000

Message = tuple[msgspec.Struct, bytes | None]

NONCE = bytes(NONCE_BYTES)


def honest(rows: Sequence[int]) -> list[Message]:
    """One message of each kind that a client may send, about rows that are there."""
    ids = tuple(rows[:4])
    written = bytes(encode(schema.trajectory_batch(ids, [trajectory(1)] * len(ids))))
    return [
        (m.Hello(SESSION, "producer", "ipc://x"), None),
        (m.Heartbeat("works", 1.0, {"rows": 2.0}, (3, 4), (Waiting("a tool", 1.0, 3, "engine"),)), None),
        (m.Announce(True, 1, 1), None),
        (m.Fence("nobody", "why", 0.0), None),
        (m.Members("engine", 3, 0.0), None),
        (m.PutTasks(("k1", "k2"), 4, "train", 0, {"s": 2}, 0.0), bytes(encode(schema.task_batch(tasks(2))))),
        (m.PutTasks(("e1",), 1, "eval", 1, {}, 0.0, ("rollout",)), written),
        (m.LeaseRows("rollout", 4, 1, 0.0, None, None, True, None), None),
        (m.LeaseRows("reward", 4, 1, 0.0, "e", None, True, ("tokens",), False, ("k1",)), None),
        (m.LeaseRows("learn", 8, 1, 0.0, None, 1, False, None), None),
        (m.Fetch(ids, ("task",)), None),
        (m.Peek("rollout", 3), None),
        (m.WriteColumns(1), written),
        (m.Extend(1), None),
        (m.Release(1, ids, "why"), None),
        (m.Drop(1, ids, "why"), None),
        (m.BeginVersion(1, None), None),
        (m.CommitVersion(2, "digest"), None),
        (m.ListVersions(), None),
        (m.CommitStep(1, ids), None),
        (m.Retire(0), None),
        (m.Reconcile(1), None),
        (m.GetStatistics(), None),
        (m.GetLeased(ids, 8), None),
        (Forget(), None),
    ]


def damaged(frames: list[bytes], other: list[bytes], rng: random.Random) -> list[bytes]:
    """Bits flip; frames are cut, lost, doubled, added, or come from another message."""
    frames = list(frames)
    at = rng.randrange(len(frames))
    frame = bytearray(frames[at])
    match rng.randrange(7):
        case 0 | 1:
            for _ in range(rng.randint(1, 3)):
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            frames[at] = bytes(frame)
        case 2:
            frames[at] = bytes(frame[: rng.randrange(len(frame))])
        case 3:
            del frames[at]
        case 4:
            frames.insert(at, frames[at])
        case 5:
            frames.insert(at, rng.choice((b"", rng.randbytes(40), pickle.dumps({"a": 1}), b"GET / HTTP/1.1\r\n\r\n")))
        case _:
            frames[at:] = other[-1:]
    return frames


ODD: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1, 2, 7, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.5, float("nan"),
    float("inf"), -1e300, "", "x", "rollout", "reward", "learn", "k1", "\0", "é" * 99, b"", b"\xff" * 40, [], [1],
    [[]], [0, -1], ["k1", "k1"], [1, 1, 1], {}, {"type": "Bye"}, {"s": -1}, "train", "eval", "row", "*",
)  # fmt: skip


def twisted(value: Any, rng: random.Random) -> Any:
    """The same structure with something odd somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        value = dict(value)
        name = rng.choice(list(value))
        match rng.randrange(10):
            case 0:
                del value[name]
            case 1:
                value[rng.choice(("type", "extra", "rows", "keys"))] = rng.choice(ODD)
            case _:
                value[name] = twisted(value[name], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        value = list(value)
        at = rng.randrange(len(value))
        match rng.randrange(4):
            case 0:
                del value[at]
            case 1:
                value.insert(at, value[at])
            case _:
                value[at] = twisted(value[at], rng)
        return value
    return rng.choice(ODD)


class Inside:
    """A client with the key, that says things no client of ours says, and sees what they lead to at once."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.outcomes: Counter[str] = Counter()
        self._id = 0
        self._nonce = NONCE + broker.door.token(SESSION, NONCE)

    def say(self, body: bytes, payload: bytes | None) -> object:
        self._id += 1
        of_payload = b"" if payload is None else wire.payload_digest(payload)
        header = msgspec.msgpack.encode(
            wire.Envelope(wire.PROTOCOL, SESSION, self._id, msgspec.Raw(body), of_payload, (), self._nonce)
        )
        return self.say_sealed(header, payload)

    def say_sealed(self, header: bytes, payload: bytes | None) -> object:
        broker, before = self.broker, self.broker.store.journal.size
        frames = [wire.digest(header, KEY) + header, *([] if payload is None else [payload])]
        broker._take([b"inside", *frames])
        said, broker._outbox = broker._outbox, []
        broker._forget(SESSION, self._id)
        mine = [frames[1:] for frames in said if bytes(frames[0]) == b"inside"]
        if not mine:
            self.outcomes["nothing"] += 1
            return None
        envelope, _ = wire.unseal(mine[0], KEY)
        reply = msgspec.msgpack.decode(envelope.body, type=m.Reply | wire.Refused | wire.Challenge)
        self.outcomes[type(reply).__name__] += 1
        if isinstance(reply, wire.Refused):
            assert broker.store.journal.size == before, reply
            # What the broker itself could not foresee is an error in the broker.
            self.outcomes[reply.error] += 1
            assert "could not handle" not in reply.message, (header, reply)
        return reply


async def readable(queue: TransferQueue, rows: Sequence[int]) -> None:
    """Every row that is there has columns that are whole."""
    batch = await queue.fetch(rows, ("env", "task"))
    batch.validate(full=True)
    assert batch.num_rows == len(rows)


def test_ten_thousand_mutants_neither_stop_the_broker_nor_leave_a_wrong_row(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        rng = random.Random(4)
        async with (
            open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock", key=KEY) as broker,
            TransferQueue.connect(broker.address, key=KEY, mapped=False) as queue,
        ):
            rows = (await queue.put(tasks(4), members=4)).rows
            await publish(queue)
            before = await queue.statistics()
            await _on_their_way(broker, honest(rows), rng)
            assert await queue.statistics() == before
            assert sorted((await queue.protocol_errors()).values()) == [ON_THEIR_WAY, ON_THEIR_WAY]
            inside = Inside(broker)
            inside.say(msgspec.msgpack.encode(m.Hello(SESSION, "producer")), None)
            for number in range(STRUCTURES):
                if number % 100 == 0:
                    await trio.lowlevel.checkpoint()
                    await queue.put(tasks(1, start=1000 + number), members=2, split="eval")
                request, payload = rng.choice(honest(rows))
                said = twisted(msgspec.to_builtins(request, builtin_types=(bytes,)), rng)
                inside.say(msgspec.msgpack.encode(said), payload)
                inside.say(msgspec.msgpack.encode(m.Hello(SESSION, "producer")), None)
            whole = [(r, p) for r, p in honest(rows) if p is not None]
            for number in range(PAYLOADS):
                if number % 100 == 0:
                    await trio.lowlevel.checkpoint()
                request, payload = rng.choice(whole)
                assert payload is not None
                flipped = bytearray(payload)
                for _ in range(rng.randint(1, 4)):
                    flipped[rng.randrange(len(flipped))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
                cut = len(flipped) if rng.random() < 0.8 else rng.randrange(len(flipped))
                if isinstance(request, m.PutTasks):
                    keys = tuple(f"{key}/{number}" for key in request.keys)
                    request = msgspec.structs.replace(
                        request, keys=keys, split="eval", members=1, filled=request.filled
                    )
                elif isinstance(request, m.WriteColumns):
                    granted = inside.say(
                        msgspec.msgpack.encode(m.LeaseRows("rollout", 4, 1, 0.0, None, None, False, None)), None
                    )
                    if isinstance(granted, m.Grant) and granted.rows:
                        request = m.WriteColumns(granted.lease)
                inside.say(msgspec.msgpack.encode(request), bytes(flipped[:cut]))
            assert inside.outcomes["Refused"] > 2000
            assert inside.outcomes["Receipt"] > 100
            counts = await queue.statistics()
            counts.check()
            await readable(queue, sorted(broker.rows.rows))
            await pass_all(queue)
        async with open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock", key=KEY) as again:
            again.rows.statistics().check()
            assert again.rows.statistics().tasks == counts.tasks
            async with TransferQueue.connect(again.address, key=KEY, mapped=False) as queue:
                await readable(queue, sorted(again.rows.rows))

    run(body, tmp_path, seconds=60)


async def _on_their_way(broker: Broker, messages: list[Message], rng: random.Random) -> None:
    nonce = NONCE + broker.door.token(SESSION, NONCE)
    whole = [
        [bytes(frame) for frame in wire.seal(SESSION, 7 + i, request, payload, KEY, (), nonce)]
        for i, (request, payload) in enumerate(messages)
    ]
    with ZEROMQ.dealer(broker.address) as dealer:
        sent = 0
        while sent < ON_THEIR_WAY:
            frames = damaged(rng.choice(whole), rng.choice(whole), rng)
            if frames and frames not in whole:
                await dealer.send(frames)
                sent += 1
        while broker.protocol_errors < ON_THEIR_WAY:
            await trio.sleep(0.001)
        assert dealer.try_recv() is None


def test_headers_under_a_good_digest_that_are_no_headers_are_dropped(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock", key=KEY) as broker:
            inside = Inside(broker)
            deep = b"\x91" * 100_000 + b"\xc0"
            rng = random.Random(1)
            wrong = [b"", b"\xc1", deep, b"\x97\x03\xa1s\x01" + deep, msgspec.msgpack.encode({"protocol": 3})]
            for _ in range(500):
                fields = [3, SESSION, 5, {"type": "GetStatistics"}, b"", [], b""]
                wrong.append(msgspec.msgpack.encode(twisted(fields, rng)))
            for header in wrong:
                inside.say_sealed(header, None)
            assert broker.rows.statistics().tasks == 0
            assert not broker.sessions.membership(None).members
            assert broker.protocol_errors > 400
            before = broker.protocol_errors
            inside.say(b"\x82\xa4type\xadGetStatistics\xa1x" + deep, None)
            assert broker.protocol_errors == before + 1

    run(body, tmp_path)


def test_clients_refuse_damaged_columns_before_they_touch_them() -> None:
    rng = random.Random(2)
    ids = [1, 2, 3]
    data = bytes(encode(schema.trajectory_batch(ids, [trajectory(1)] * 3)))
    keys = [RowKeys(row, row, 0, 1, "train", 5) for row in ids]
    outcomes: Counter[str] = Counter()
    for _ in range(3000):
        flipped = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        rows = rng.choice(((0, 1, 2), (0, 1), (2, 1, 0), (0, 1, 2, 3), (-1, 5, 1 << 40)))
        start, length = rng.choice(((0, len(data)), (0, len(data)), (8, 40), (-5, 1 << 40)))
        try:
            batch = assemble(keys, unpack([Part("rollout", rows, start, length)], memoryview(bytes(flipped))))
        except SchemaError:
            outcomes["refused"] += 1
        else:
            batch.validate(full=True)
            assert batch.num_rows == 3
            outcomes["taken"] += 1
    assert outcomes["refused"] > 500


def test_replies_that_are_no_replies_are_dropped_by_the_client_that_goes_on(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        rng = random.Random(3)
        with ZEROMQ.router(f"ipc://{path}/q.sock", key=KEY) as router:

            async def broker() -> None:
                while True:
                    message = await router.recv()
                    assert message is not None
                    envelope, _ = wire.unseal(message[1:], KEY)
                    nonce = envelope.nonce[:NONCE_BYTES]
                    for _ in range(100):
                        said = msgspec.msgpack.encode(
                            twisted({"type": rng.choice(("Gran", "Held", "")), "rows": 1}, rng)
                        )
                        header = wire.Envelope(wire.PROTOCOL, "", envelope.id, msgspec.Raw(said), b"", (), nonce)
                        sealed = msgspec.msgpack.encode(header)
                        router.send([message[0], wire.digest(sealed, KEY) + sealed])
                    router.send([message[0], *wire.seal("", envelope.id, m.Number(7), None, KEY, (), nonce)])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(broker)
                async with RpcClient.connect(router.address, m.Reply, key=KEY) as client:
                    assert await client.call(m.Extend(1), deadline=5) == m.Number(7)
                    assert client.protocol_errors > 90
                nursery.cancel_scope.cancel()

    run(body, tmp_path)


@pytest.mark.parametrize("stuff", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", pickle.dumps({"a": 1}), b"\xff" * 5000])
def test_strange_bytes_in_a_frame_are_counted_with_their_peer(tmp_path: Path, stuff: bytes) -> None:
    async def body(path: Path) -> None:
        async with (
            open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock", key=KEY) as broker,
            TransferQueue.connect(broker.address, key=KEY) as queue,
        ):
            with ZEROMQ.dealer(broker.address) as one, ZEROMQ.dealer(broker.address) as other:
                for dealer, times in ((one, 1), (other, 2)):
                    for _ in range(times):
                        await dealer.send([stuff])
                        await dealer.send([stuff, b"", b"", b""])
                while broker.protocol_errors < 6:
                    await trio.sleep(0.01)
            assert sorted((await queue.protocol_errors()).values()) == [2, 4, 6]
            assert (await queue.statistics()).tasks == 0

    run(body, tmp_path)
