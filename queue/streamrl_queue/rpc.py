"""Requests and replies over ZeroMQ: many calls in flight, each with a deadline.

`RpcClient` matches replies to calls by id. `RpcServer` runs every request in a task of its own; a caller that
gives up sends `Forget`, which cancels that task.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import msgspec
import trio

from . import wire
from .errors import DeadlineExceeded, ProtocolError, StreamRLError, from_wire
from .gate import Gate
from .keys import check_key
from .nonces import NO_TOKEN, NONCE_BYTES, SECRET_BYTES, Challenge, Strangers
from .nursery import open_nursery
from .transport import ZEROMQ, Buffer, Dealer, Router, Transport

log = logging.getLogger(__name__)

# Requests in flight that a message names, so that the server knows which replies are still awaited: far more than one
# process has at a time. Of those behind them it says nothing.
MOST_NAMED: Final = 256


class Forget(msgspec.Struct, frozen=True, tag=True):
    """The caller of the request with this envelope's id no longer waits for its reply."""


class _Call:
    """One request in flight."""

    def __init__(self, request: msgspec.Struct, asked: Buffer | None) -> None:
        self.request = request
        self.asked = asked
        self.done = trio.Event()
        self.reply: Any = None
        self.payload: Buffer | None = None


class RpcClient:
    """Calls to one server. Open it with `connect`; share it between tasks."""

    def __init__(
        self, dealer: Dealer, reply_type: Any, key: bytes | None, session: str, nonce: bytes | None = None
    ) -> None:
        check_key(key)
        self._dealer = dealer
        self._decode = msgspec.msgpack.Decoder(reply_type | wire.Refused | Challenge).decode
        # Replies carry the first part, requests both; see `nonces`.
        self._nonce = nonce or os.urandom(NONCE_BYTES)
        self._token = NO_TOKEN
        self._key = key
        self._session = session
        self._next_id = 1
        self._calls: dict[int, _Call] = {}
        self.protocol_errors = 0
        # The ids that await a reply, in order; a dict, because sets have none.
        self._open: dict[int, None] = {}

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        address: str,
        reply_type: Any,
        *,
        key: bytes | None = None,
        session: str = "",
        transport: Transport = ZEROMQ,
    ) -> AsyncIterator[RpcClient]:
        """A client whose replies are tagged structs of `reply_type`."""
        with transport.dealer(address, key=key) as dealer:
            client = cls(dealer, reply_type, key, session, transport.entropy(NONCE_BYTES))
            async with open_nursery() as nursery:
                nursery.start_soon(client.receive)
                yield client
                nursery.cancel_scope.cancel()

    async def call(
        self, request: msgspec.Struct, *, deadline: float, source: str = "server", resend: float | None = None
    ) -> Any:
        """The reply to `request`; see `exchange`."""
        reply, _ = await self.exchange(request, None, deadline=deadline, source=source, resend=resend)
        return reply

    async def exchange(
        self,
        request: msgspec.Struct,
        payload: Buffer | None,
        *,
        deadline: float,
        source: str = "server",
        resend: float | None = None,
        id: int | None = None,
    ) -> tuple[Any, Buffer | None]:
        """Send `request` and wait at most `deadline` seconds for its reply and the reply's payload.

        An idempotent request may be sent again every `resend` seconds, for a server that restarts in between. Who
        asks the same again after an error passes the `id` (of `asking`) of the first time.

        Raises:
            DeadlineExceeded: naming the request and `source`.
            StreamRLError: whatever the server refused with, as the same class.
        """
        if id is None:
            with self.asking() as id:
                return await self.exchange(request, payload, deadline=deadline, source=source, resend=resend, id=id)
        call = self._calls[id] = _Call(request, payload)
        try:
            end = trio.current_time() + deadline
            while not call.done.is_set() and (left := end - trio.current_time()) > 0.0:
                with trio.move_on_after(min(left, resend or left)):
                    await self._dealer.send(self._seal(id, request, payload))
                    await call.done.wait()
        finally:
            del self._calls[id]
            if not call.done.is_set():
                # Cancelled or too late.
                self._open.pop(id, None)
                self._dealer.try_send(self._seal(id, Forget()))
        if not call.done.is_set():
            raise DeadlineExceeded.waiting(f"the reply to {type(request).__name__}", source, deadline)
        if isinstance(call.reply, wire.Refused):
            raise from_wire(call.reply.error, call.reply.message)
        return call.reply, call.payload

    @contextmanager
    def asking(self) -> Iterator[int]:
        """A number for one request, whose reply is awaited until the block is left."""
        id = self._next_id
        self._next_id += 1
        self._open[id] = None
        try:
            yield id
        finally:
            self._open.pop(id, None)

    def tell(self, request: msgspec.Struct) -> bool:
        """Send `request` without waiting for anything; tells whether it left."""
        with self.asking() as id:
            return self._dealer.try_send(self._seal(id, request))

    def _seal(self, id: int, request: msgspec.Struct, payload: Buffer | None = None) -> list[Buffer]:
        return wire.seal(self._session, id, request, payload, self._key, self._asking(), self._nonce + self._token)

    def _asking(self) -> tuple[int, ...]:
        """What this client still awaits, as `wire.Envelope` says it."""
        named = tuple(itertools.islice(self._open, MOST_NAMED + 1))
        below = self._next_id if len(named) <= MOST_NAMED else named[-1]
        return below, *named[:MOST_NAMED]

    async def receive(self) -> None:
        """Consumes replies; produces wake-ups of the calls they belong to; waits for the socket."""
        while True:
            frames = await self._dealer.recv()
            while frames is not None:
                self._take(frames)
                frames = self._dealer.try_recv()

    def _take(self, frames: list[Buffer]) -> None:
        try:
            envelope, payload = wire.unseal(frames, self._key)
            if envelope.nonce != self._nonce:
                raise ProtocolError("it answers no request of this connection: a copy of another one's")
            reply = self._decode(envelope.body)
        except (ProtocolError, *wire.MALFORMED) as error:
            self.protocol_errors += 1
            log.warning("dropped a message from %s: %s", self._dealer.address, error)
            return
        if isinstance(reply, Challenge):
            self._answer(envelope.id, reply)
        elif call := self._calls.get(envelope.id):
            call.reply, call.payload = reply, payload
            call.done.set()

    def _answer(self, id: int, challenge: Challenge) -> None:
        """The server is there for the first time, or again: say once more what it did not look at."""
        self._token = challenge.token
        if call := self._calls.get(id):
            self._dealer.try_send(self._seal(id, call.request, call.asked))


Handler = Callable[[str, Any], Awaitable[msgspec.Struct]]


class RpcServer:
    """Answers requests with `handler(peer, request)`. Open it with `bind`."""

    def __init__(
        self, router: Router, request_type: Any, handler: Handler, key: bytes | None, secret: bytes | None = None
    ) -> None:
        self._gate = Gate(key, secret, router.send, router.address)
        self._router = router
        self._decode = msgspec.msgpack.Decoder(request_type | Forget).decode
        self._handler = handler
        self._running: dict[tuple[bytes, int], trio.CancelScope] = {}
        self.address = router.address

    @property
    def strangers(self) -> Strangers:
        """Who sent the messages that were dropped."""
        return self._gate.strangers

    @classmethod
    @asynccontextmanager
    async def bind(
        cls,
        address: str,
        request_type: Any,
        handler: Handler,
        *,
        key: bytes | None = None,
        transport: Transport = ZEROMQ,
    ) -> AsyncIterator[RpcServer]:
        """A server for tagged structs of `request_type`. A handler's StreamRLError becomes the caller's."""
        check_key(key)
        with transport.router(address, key=key) as router:
            server = cls(router, request_type, handler, key, transport.entropy(SECRET_BYTES))
            async with open_nursery() as nursery:
                nursery.start_soon(server._receive, nursery)
                yield server
                nursery.cancel_scope.cancel()

    async def _receive(self, nursery: trio.Nursery) -> None:
        """Consumes requests; produces a task for each; waits for the socket."""
        while True:
            if (message := await self._router.recv()) is None:
                continue
            peer = bytes(message[0])
            if (opened := self._gate.open(peer, message[1:])) is None:
                continue
            envelope, _ = opened
            try:
                request = self._decode(envelope.body)
            except wire.MALFORMED as error:
                self._gate.drop(peer, str(error), "body")
                continue
            call = (peer, envelope.id)
            if isinstance(request, Forget):
                if scope := self._running.get(call):
                    scope.cancel()
            elif call not in self._running:
                # Before its task runs: the request may come again until then.
                self._running[call] = trio.CancelScope()
                nursery.start_soon(self._answer, call, envelope, request)

    async def _answer(self, call: tuple[bytes, int], envelope: wire.Envelope, request: Any) -> None:
        reply: msgspec.Struct | None = None
        with self._running[call]:
            try:
                reply = await self._handler(call[0].hex(), request)
            except StreamRLError as error:
                reply = wire.Refused(type(error).__name__, str(error))
        del self._running[call]
        if reply is not None:
            self._gate.answer(call[0], envelope, reply)
