"""Whoever can record and send messages, but has no key, changes nothing: each copy is dropped and counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from test_queue_broker import FLOW, publish, run, tasks

from streamrl_queue import Broker, TransferQueue, open_broker, wire, work_flow
from streamrl_queue import messages as m
from streamrl_queue.errors import AddressError, ConfigError, DeadlineExceeded, MessageTooLarge
from streamrl_queue.nonces import MOST_PEERS, NONCE_BYTES, Door, Strangers
from streamrl_queue.rpc import RpcClient, RpcServer
from streamrl_queue.sessions import Sessions
from streamrl_queue.transport import ZEROMQ, Buffer, Dealer, ZeroMQ, ZmqDealer

KEY = b"k" * 32


class Tap(ZeroMQ):
    """What a client says and hears, for whoever listens on the way."""

    def __init__(self) -> None:
        self.said: list[list[bytes]] = []
        self.heard: list[list[bytes]] = []

    def dealer(self, address: str, *, key: bytes | None = None) -> ZmqDealer:
        tap = self

        class Tapped(ZmqDealer):
            def _send_now(self, frames: Sequence[Buffer]) -> bool:
                # Before there is a connection nothing leaves, and it is said again.
                if sent := super()._send_now(frames):
                    tap.said.append([bytes(frame) for frame in frames])
                return sent

            def try_recv(self) -> list[Buffer] | None:
                frames = super().try_recv()
                if frames is not None:
                    tap.heard.append([bytes(frame) for frame in frames])
                return frames

        return Tapped(address)


async def recorded(broker: Broker) -> Tap:
    """A whole session: it puts, publishes, leases, gives back, and leaves."""
    tap = Tap()
    async with TransferQueue.connect(broker.address, key=KEY, transport=tap, mapped=False, name="victim") as queue:
        await queue.put(tasks(2), members=4)
        await publish(queue)
        lease = await queue.lease("rollout", rows=4)
        assert lease is not None
        await queue.release(lease)
    return tap


async def replay(dealer: Dealer, messages: Sequence[Sequence[bytes]]) -> list[Any]:
    """Say all of it again; returns what is heard for a while."""
    for frames in messages:
        await dealer.send(frames)
    heard: list[Any] = []
    while (frames := await dealer.recv(trio.current_time() + 0.3)) is not None:
        envelope, _ = wire.unseal(frames, KEY)
        heard.append(msgspec.msgpack.decode(envelope.body, type=m.Reply | wire.Refused | wire.Challenge))
    return heard


def standing(broker: Broker) -> object:
    return broker.rows.statistics(), len(broker.sessions.membership(None).members), broker.store.journal.size


def test_a_session_that_is_said_again_after_it_left_changes_nothing(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock", key=KEY) as broker:
            tap = await recorded(broker)
            before = standing(broker)
            with ZEROMQ.dealer(broker.address) as dealer:
                heard = await replay(dealer, tap.said)
            assert standing(broker) == before
            assert not [reply for reply in heard if not isinstance(reply, wire.Challenge | wire.Refused)]

    run(body, tmp_path)


def test_a_session_that_is_said_again_to_a_broker_that_was_restarted_changes_nothing_and_is_counted(
    tmp_path: Path,
) -> None:
    async def body(path: Path) -> None:
        bind = f"ipc://{path}/q.sock"
        async with open_broker(FLOW, path / "j", bind=bind, key=KEY) as broker:
            tap = await recorded(broker)
        async with open_broker(FLOW, path / "j", bind=bind, key=KEY) as broker:
            before = standing(broker)
            with ZEROMQ.dealer(broker.address) as dealer:
                heard = await replay(dealer, tap.said)
            assert standing(broker) == before
            assert all(isinstance(reply, wire.Challenge) for reply in heard)
            # All but the very first message name the token of the life before.
            assert broker.protocol_errors == len(tap.said) - 1
            async with TransferQueue.connect(bind, key=KEY) as queue:
                counted = await queue.protocol_errors()
            assert counted.pop("total") == len(tap.said) - 1
            assert list(counted.values()) == [len(tap.said) - 1]

    run(body, tmp_path)


def test_messages_of_one_queue_change_nothing_at_another_that_has_the_same_key(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with (
            open_broker(FLOW, path / "a", bind=f"ipc://{path}/a.sock", key=KEY) as one,
            open_broker(FLOW, path / "b", bind=f"ipc://{path}/b.sock", key=KEY) as other,
        ):
            tap = await recorded(one)
            before = standing(other)
            with ZEROMQ.dealer(other.address) as dealer:
                await replay(dealer, tap.said)
            assert standing(other) == before
            assert other.protocol_errors == len(tap.said) - 1

    run(body, tmp_path)


def test_replies_to_another_client_and_a_clients_own_requests_are_no_replies(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        async with open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock", key=KEY) as broker:
            tap = await recorded(broker)
        # Somebody else listens there now, and has no key.
        with ZEROMQ.router(broker.address, key=None) as router:

            async def impostor() -> None:
                number = 0
                while True:
                    message = await router.recv()
                    assert message is not None
                    for frames in (message[1:], *tap.heard):
                        router.send([message[0], *frames])
                        number += 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(impostor)
                async with RpcClient.connect(broker.address, m.Reply, key=KEY, session="fresh") as client:
                    with pytest.raises(DeadlineExceeded):
                        await client.call(m.Hello("fresh", "client"), deadline=0.5)
                    assert client.protocol_errors >= 1 + len(tap.heard)
                nursery.cancel_scope.cancel()

    run(body, tmp_path)


def test_a_copy_of_a_heartbeat_is_no_sign_of_life() -> None:
    sessions = Sessions(6.0)
    sessions.open(0.0, 0.0, "s", m.Hello("s", "client"))
    beat = m.Heartbeat("works", 0.0, {})
    sessions.beat(1.0, "s", beat, 2)
    sessions.beat(5.0, "s", beat, 2)
    assert sessions.late(7.5) == ["s"]
    sessions.beat(7.0, "s", beat, 3)
    assert sessions.late(7.5) == []


def test_clients_of_a_broker_that_was_restarted_go_on_under_a_key(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        bind = f"ipc://{path}/q.sock"
        restart, restarted = trio.Event(), trio.Event()

        async def broker() -> None:
            async with open_broker(FLOW, path / "j", bind=bind, key=KEY):
                await restart.wait()
            async with open_broker(FLOW, path / "j", bind=bind, key=KEY):
                restarted.set()
                await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(broker)
            async with TransferQueue.connect(bind, key=KEY) as queue:
                await queue.put(tasks(1), members=4)
                await publish(queue)
                lease = await queue.lease("rollout", rows=4)
                assert lease is not None
                restart.set()
                await restarted.wait()
                assert await queue.extend(lease) == lease.ids
                assert [member.session for member in (await queue.members()).members] == [queue.session]
            nursery.cancel_scope.cancel()

    run(body, tmp_path)


def test_calls_go_on_when_their_server_was_started_again(tmp_path: Path) -> None:
    handled: list[object] = []

    async def handle(peer: str, request: object) -> m.Number:
        handled.append(request)
        return m.Number(len(handled))

    async def body(path: Path) -> None:
        address = f"ipc://{path}/rpc"
        tap = Tap()
        async with RpcClient.connect(address, m.Reply, key=KEY, transport=tap) as client:
            for number in (1, 2):
                async with RpcServer.bind(address, m.Request, handle, key=KEY) as server:
                    assert (await client.call(m.Extend(7), deadline=5, resend=0.2)).value == number
                    if number == 2:
                        with ZEROMQ.dealer(address) as dealer:
                            await dealer.send(tap.said[1])
                            heard = await replay(dealer, [])
                        assert [type(reply) for reply in heard] == [wire.Challenge]
                        assert server.strangers.total >= 1
        assert handled == [m.Extend(7)] * 2

    run(body, tmp_path)


def test_a_reply_that_is_too_large_reaches_its_caller_as_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(peer: str, request: object) -> m.Held:
        return m.Held(tuple(range(5000)))

    async def body(path: Path) -> None:
        monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 4096)
        async with (
            RpcServer.bind(f"ipc://{path}/rpc", m.Request, handle) as server,
            RpcClient.connect(server.address, m.Reply) as client,
        ):
            with pytest.raises(MessageTooLarge, match="Held is"):
                await client.call(m.Extend(7), deadline=5)
            with pytest.raises(MessageTooLarge, match="Drop is"):
                await client.call(m.Drop(1, tuple(range(5000)), "x"), deadline=5)

    run(body, tmp_path)


def test_every_message_has_its_limit_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 4096)
    long = "x" * 5000
    for message in (
        m.Hello(long, "x"),
        m.Heartbeat(long, 0.0, {}),
        m.Fence("s", long, 0.0),
        m.PutTasks((long,), 1, "train", 0, {}, 0.0),
        m.Fetch(tuple(range(5000)), ()),
        m.CommitStep(1, tuple(range(5000))),
        wire.Refused("QueueError", long),
    ):
        with pytest.raises(MessageTooLarge, match=type(message).__name__):
            wire.seal("s", 1, message, None, None)
    with pytest.raises(MessageTooLarge):
        wire.seal("s", 1, m.WriteColumns(1), bytes(5000), None)


def test_a_token_is_of_one_session_one_client_and_one_life() -> None:
    door, nonce = Door(b"1" * 32), b"n" * NONCE_BYTES
    token = door.token("s", nonce)
    assert door.admits("s", nonce + token)
    assert not door.admits("other", nonce + token)
    assert not door.admits("s", b"m" * NONCE_BYTES + token)
    assert not Door(b"2" * 32).admits("s", nonce + token)
    for wrong in (b"", nonce, nonce + token + b"x", nonce + token[:-1], bytes(2 * NONCE_BYTES)):
        assert not door.admits("s", wrong)


def test_any_number_of_peers_are_counted_in_a_bounded_table() -> None:
    strangers = Strangers()
    for number in range(1000):
        strangers.count(number.to_bytes(5, "big"), "digest")
    assert strangers.total == 1000
    assert len(strangers.by_peer) == MOST_PEERS


def test_a_key_of_another_length_is_refused_without_being_shown(tmp_path: Path) -> None:
    async def body(path: Path) -> None:
        with pytest.raises(ConfigError, match="expected 32 bytes, got 6") as refused:
            async with TransferQueue.connect(f"ipc://{path}/q.sock", key=b"secret"):
                pass
        assert "secret" not in str(refused.value)
        with pytest.raises(ConfigError, match="expected 32 bytes, got 6"):
            async with open_broker(work_flow(), path / "j", bind=f"ipc://{path}/q.sock", key=b"secret"):
                pass
        with pytest.raises(AddressError, match="streamrl keygen"):
            async with open_broker(work_flow(), path / "j", bind="tcp://0.0.0.0:0"):
                pass

    run(body, tmp_path)


def test_nothing_that_has_the_key_shows_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    key = bytes(range(65, 97))

    async def body(path: Path) -> None:
        async with (
            open_broker(FLOW, path / "j", bind=f"ipc://{path}/q.sock", key=key) as broker,
            TransferQueue.connect(broker.address, key=key) as queue,
        ):
            await queue.statistics()
            with ZEROMQ.dealer(broker.address) as dealer:
                await dealer.send([b"no message"])
            while not broker.protocol_errors:
                await trio.sleep(0.01)
            shown = " ".join(map(repr, (broker, queue, queue._rpc, broker.door, broker.strangers))) + caplog.text
            for secret in (key.decode(), key.hex(), repr(key)):
                assert secret not in shown

    run(body, tmp_path)
