"""Frames on the wire: a header under a keyed digest, and at most one payload.

    frame 0   digest (32 bytes, keyed BLAKE3 of the rest of this frame) · header: Envelope as msgpack
    frame 1   payload: Arrow IPC stream, when there is one; the header holds its BLAKE3

Both digests are checked before anything they cover is decoded. Without a key they still catch corruption, not malice.
The payload's digest is made once, by its writer: the journal keeps it, and whoever reads the payload checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hmac import compare_digest
from typing import Final

import msgspec
from blake3 import blake3

from .errors import MessageTooLarge, ProtocolError
from .nonces import Challenge as Challenge
from .transport import MAX_FRAME_BYTES, Buffer, buffer_bytes

PROTOCOL: Final = 3
MAX_MESSAGE_BYTES: Final = MAX_FRAME_BYTES // 2
DIGEST_BYTES: Final = 32
NO_KEY: Final = bytes(32)
# What msgspec raises on bytes that are no message of the type that is asked for.
MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header of every message. A reply repeats the `id` of its request."""

    protocol: int
    session: str
    id: int
    body: msgspec.Raw
    # BLAKE3 of the payload; empty when there is none.
    payload: bytes = b""
    # Which requests of the session still await replies: of the ids below the first, only those that follow it. Nobody
    # will ever listen for a reply to another. Empty: nothing is said.
    asking: tuple[int, ...] = ()
    # For whom and for which life of the server this was made; see `nonces`.
    nonce: bytes = b""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A reply that is an error: its class in `errors` and its message."""

    error: str
    message: str


_encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode


def digest(data: Buffer, key: bytes = NO_KEY) -> bytes:
    """Keyed BLAKE3, 32 bytes."""
    return blake3(data, key=key).digest()


def payload_digest(data: Buffer) -> bytes:
    """BLAKE3, 32 bytes."""
    return blake3(data).digest()


def seal(
    session: str,
    id: int,
    body: msgspec.Struct,
    payload: Buffer | None,
    key: bytes | None,
    asking: tuple[int, ...] = (),
    nonce: bytes = b"",
) -> list[Buffer]:
    """The frames of one message.

    Raises:
        MessageTooLarge: before anything is sent.
    """
    of_payload = b"" if payload is None else payload_digest(payload)
    header = _encode(Envelope(PROTOCOL, session, id, msgspec.Raw(_encode(body)), of_payload, asking, nonce))
    size = len(header) + (0 if payload is None else buffer_bytes(payload))
    if size > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"{type(body).__name__} is {size / 2**20:.0f} MiB, limit {MAX_MESSAGE_BYTES / 2**20:.0f} MiB; "
            "send fewer rows at once"
        )
    first = digest(header, key or NO_KEY) + header
    return [first] if payload is None else [first, payload]


def unseal(frames: Sequence[Buffer], key: bytes | None) -> tuple[Envelope, Buffer | None]:
    """Check and open one message.

    Raises:
        ProtocolError: wrong frame count, digest or protocol version. Nothing was decoded before the digest held.
    """
    if len(frames) not in (1, 2):
        raise ProtocolError(f"expected 1 or 2 frames, got {len(frames)}")
    first = memoryview(frames[0])
    header = first[DIGEST_BYTES:]
    if not compare_digest(bytes(first[:DIGEST_BYTES]), digest(header, key or NO_KEY)):
        raise ProtocolError("digest mismatch: the message was damaged, or its sender has another key")
    try:
        envelope = _decode_envelope(header)
    except MALFORMED as error:
        raise ProtocolError(f"malformed header: {error}") from error
    if envelope.protocol != PROTOCOL:
        raise ProtocolError(f"expected protocol {PROTOCOL}, got {envelope.protocol}; both sides need one release")
    payload = frames[1] if len(frames) == 2 else None
    if (payload_digest(payload) if payload is not None else b"") != envelope.payload:
        raise ProtocolError("digest mismatch: the payload was damaged")
    return envelope, payload
