"""Encrypted connections: ZeroMQ's CURVE, with all its keys made from the queue's key.

A queue that is bound to `curve+tcp://0.0.0.0:7001` is reached at `curve+tcp://HOST:7001`, with its key. The key alone
proves who sent a message and that it came as it was sent; with CURVE nobody on the way can read it either. Who does not
know the key cannot finish the handshake: ZeroMQ turns them away, and no message of theirs is ever looked at.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import zmq
from blake3 import blake3
from zmq.utils import z85

from .errors import ConfigError
from .keys import check_key
from .transport import ENCRYPTED, ZmqDealer, ZmqRouter

SERVER: Final = "streamrl queue, CURVE key of the server, 2026-12"
CLIENT: Final = "streamrl queue, CURVE key of a client, 2026-12"


class Curve:
    """The sockets of those who share a key.

    Raises:
        ConfigError: no key, or ZeroMQ was built without CURVE.
    """

    def __init__(self, key: bytes | None) -> None:
        if key is None:
            raise ConfigError("an encrypted queue needs a key: make one with `streamrl keygen FILE`")
        check_key(key)
        if not zmq.has("curve"):
            raise ConfigError("this build of ZeroMQ has no CURVE; install pyzmq from its wheels")
        self._key = key
        self._server = _Pair(key, SERVER)
        self._client = _Pair(key, CLIENT)

    def router(self, address: str) -> ZmqRouter:
        """Listen at `address` (without `curve+`), to those who know the key."""
        return _CurveRouter(address, self._key, self._server, self._client.public)

    def dealer(self, address: str) -> ZmqDealer:
        """Connect to `address` (without `curve+`), where somebody listens who knows the key."""
        dealer = ZmqDealer(address, configure=partial(_as_client, self._client, self._server.public))
        dealer.address = ENCRYPTED + dealer.address
        return dealer


class _Pair:
    """A secret key that is made from the queue's, and its public key; as ZeroMQ writes them. Never shown."""

    def __init__(self, key: bytes, purpose: str) -> None:
        self.secret: bytes = z85.encode(blake3(key, derive_key_context=purpose).digest())
        self.public: bytes = zmq.curve_public(self.secret)


def _as_client(own: _Pair, server: bytes, socket: zmq.Socket[bytes]) -> None:
    socket.curve_secretkey, socket.curve_publickey = own.secret, own.public
    socket.curve_serverkey = server


class _CurveRouter(ZmqRouter):
    """A Router whose handshakes are judged in a context of its own: ZeroMQ has one judge for each context."""

    def __init__(self, address: str, key: bytes, own: _Pair, client: bytes) -> None:
        # Here, because it brings asyncio along.
        from zmq.auth.thread import ThreadAuthenticator

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._judge = ThreadAuthenticator(self._context)
        self._judge.start()
        self._judge.configure_curve_callback(credentials_provider=_Known(client))

        def configure(socket: zmq.Socket[bytes]) -> None:
            socket.curve_secretkey, socket.curve_publickey = own.secret, own.public
            socket.curve_server = True

        try:
            super().__init__(address, key=key, configure=configure, context=self._context)
        except BaseException:
            self._end()
            raise
        self.address = ENCRYPTED + self.address

    def close(self) -> None:
        super().close()
        self._end()

    def _end(self) -> None:
        if not self._context.closed:
            self._judge.stop()
            self._context.term()


class _Known:
    """Says whether a client may connect."""

    def __init__(self, client: bytes) -> None:
        self._client = client

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this public key, as ZeroMQ writes it, is the one that is made from the queue's key."""
        return key == self._client
