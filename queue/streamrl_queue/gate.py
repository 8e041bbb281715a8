"""Which messages a server looks at: those of its own clients, made for this life of it. The others are counted.

frames ──► digest under the key ──► token of this life ──► envelope
│ drop, count            │ a Challenge, which tells the token
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable

import msgspec

from . import wire
from .errors import MessageTooLarge, ProtocolError
from .nonces import NO_TOKEN, NONCE_BYTES, SECRET_BYTES, Challenge, Door, Reason, Strangers
from .transport import Buffer

log = logging.getLogger(__name__)


class Gate:
    """Opens and seals the messages of one server.

    Args:
        key: the key that its clients have too.
        secret: of this life; drawn here by default.
        send: takes the frames of an answer, its peer first.
        address: where the server listens, for the log.
    """

    def __init__(
        self, key: bytes | None, secret: bytes | None, send: Callable[[list[Buffer]], object], address: str
    ) -> None:
        self.door = Door(secret or os.urandom(SECRET_BYTES))
        self.strangers = Strangers()
        # Class of an error → how often it was answered.
        self.refused: Counter[str] = Counter()
        self._key = key
        self._send = send
        self._address = address

    def open(self, peer: bytes, frames: list[Buffer]) -> tuple[wire.Envelope, Buffer | None] | None:
        """The envelope and payload of a message that counts; None for any other, with a word in the log."""
        try:
            envelope, payload = wire.unseal(frames, self._key)
        except ProtocolError as error:
            self.drop(peer, str(error), "digest")
            return None
        if self.door.admits(envelope.session, envelope.nonce):
            return envelope, payload
        # A request for another life, or a client's first one: it changes nothing, and is told the token it lacks.
        if envelope.nonce[NONCE_BYTES:] != NO_TOKEN:
            self.drop(peer, "it was made for another server, session or life of this one", "life")
        self.answer(peer, envelope, Challenge(self.door.token(envelope.session, envelope.nonce)))
        return None

    def drop(self, peer: bytes, why: str, reason: Reason) -> None:
        """A message of `peer` is not looked at."""
        self.strangers.count(peer, reason)
        if self.strangers.worth_a_word():
            told = peer.hex(), self._address, self.strangers.total, why
            log.warning("dropped a message of peer %s at %s (%d so far): %s", *told)

    def answer(self, peer: bytes, asked: wire.Envelope, reply: msgspec.Struct, payload: Buffer | None = None) -> None:
        """Send the reply to a request; one that fits no message is a refusal that says so."""
        nonce = asked.nonce[:NONCE_BYTES]
        try:
            frames = wire.seal(asked.session, asked.id, reply, payload, self._key, nonce=nonce)
        except MessageTooLarge as error:
            refused = wire.Refused(type(error).__name__, str(error))
            reply, frames = refused, wire.seal(asked.session, asked.id, refused, None, self._key, nonce=nonce)
        if type(reply) is wire.Refused:
            self.refused[reply.error] += 1
        self._send([peer, *frames])
