"""Which life of a server a request was made for: copies of another session, server or life are nobody's. Pure.

    request   nonce = client's nonce (16 bytes, of this connection) · token (16 bytes, the server's answer to it)
    reply     nonce = client's nonce

A token is a digest of the session's name and its client's nonce under a secret that the server draws at its start and
tells nobody. A request with another token changes nothing: it is answered with a `Challenge`, which tells its sender
the right one. Only who has the queue's key can put that under a digest, so whoever recorded messages cannot make them
count again: not at a server that was restarted, not at another one, and not (by the nonce) at another client. The two
directions differ in length, so no message counts on its way back.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from hmac import compare_digest
from typing import Final, Literal

import msgspec
from blake3 import blake3

from .recent import remember

NONCE_BYTES: Final = 16
# What a client sends before it knows better.
NO_TOKEN: Final = bytes(NONCE_BYTES)
SECRET_BYTES: Final = 32
# Peers that are counted by themselves, those heard of last. Whoever floods a queue may come as any number of peers.
MOST_PEERS: Final = 64
# Why a message is dropped: it is not under the queue's digest (damage, garbage, another key), it was made for another
# life, or its body is nothing that is understood.
Reason = Literal["digest", "life", "body"]


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The request was not looked at: it lacks this token. Seal it again, with the token, if it is still meant."""

    token: bytes


class Door:
    """Tells requests made for this life of a server from all others."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "<Door>"

    def token(self, session: str, nonce: bytes) -> bytes:
        """The token of the session's client whose nonce begins a request's `nonce`."""
        # The nonce has a fixed length, so no two pairs run together.
        named = nonce[:NONCE_BYTES].ljust(NONCE_BYTES, b"\0") + session.encode()
        return blake3(named, key=self._secret).digest(length=NONCE_BYTES)

    def admits(self, session: str, nonce: bytes) -> bool:
        """Whether a request with this nonce was made for this life."""
        return len(nonce) == 2 * NONCE_BYTES and compare_digest(nonce[NONCE_BYTES:], self.token(session, nonce))


class Strangers:
    """Messages that were dropped, by the peer that they came from."""

    def __init__(self) -> None:
        self.total = 0
        self.by_reason: Counter[Reason] = Counter()
        self._by_peer: OrderedDict[str, int] = OrderedDict()

    def count(self, peer: bytes, reason: Reason) -> None:
        """One more of this peer."""
        name = peer.hex()
        self.total += 1
        self.by_reason[reason] += 1
        remember(self._by_peer, name, self._by_peer.get(name, 0) + 1, MOST_PEERS)

    @property
    def by_peer(self) -> dict[str, int]:
        """Connection → its dropped messages, of the last connections that had any."""
        return dict(self._by_peer)

    def worth_a_word(self) -> bool:
        """The first, the second, the fourth, …: a flood must not fill the disk."""
        return self.total & (self.total - 1) == 0
