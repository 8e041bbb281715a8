"""Frames on the wire: a keyed digest, one msgpack header, and at most one payload.

    frame 0   digest (32 bytes, BLAKE3 over everything that follows)
    frame 1   header: Envelope as msgpack
    frame 2   payload: Arrow IPC stream, when there is one

The digest is checked before anything is decoded. Without a key it still catches corruption, not malice.
"""

from __future__ import annotations

from collections.abc import Sequence
from hmac import compare_digest
from typing import Final

import msgspec
from blake3 import blake3

from .errors import MessageTooLarge, ProtocolError
from .transport import MAX_FRAME_BYTES, Buffer, buffer_bytes

PROTOCOL: Final = 1
MAX_MESSAGE_BYTES: Final = MAX_FRAME_BYTES // 2
DIGEST_BYTES: Final = 32
NO_KEY: Final = bytes(32)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header of every message. A reply repeats the `id` of its request."""

    protocol: int
    session: str
    id: int
    body: msgspec.Raw


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A reply that is an error: its class in `errors` and its message."""

    error: str
    message: str


_encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode


def digest(key: bytes | None, *parts: Buffer) -> bytes:
    """Keyed BLAKE3 over `parts` in order."""
    hasher = blake3(key=key or NO_KEY)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def seal(session: str, id: int, body: msgspec.Struct, payload: Buffer | None, key: bytes | None) -> list[Buffer]:
    """The frames of one message.

    Raises:
        MessageTooLarge: before anything is sent.
    """
    header = _encode(Envelope(PROTOCOL, session, id, msgspec.Raw(_encode(body))))
    frames: list[Buffer] = [header] if payload is None else [header, payload]
    size = sum(buffer_bytes(frame) for frame in frames)
    if size > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"{type(body).__name__} is {size / 2**20:.0f} MiB, limit {MAX_MESSAGE_BYTES / 2**20:.0f} MiB; "
            "send fewer rows at once"
        )
    return [digest(key, *frames), *frames]


def unseal(frames: Sequence[Buffer], key: bytes | None) -> tuple[Envelope, Buffer | None]:
    """Check and open one message.

    Raises:
        ProtocolError: wrong frame count, digest or protocol version. Nothing was decoded before the digest held.
    """
    if len(frames) not in (2, 3):
        raise ProtocolError(f"expected 2 or 3 frames, got {len(frames)}")
    expected = digest(key, *frames[1:])
    if not compare_digest(bytes(frames[0]), expected):
        raise ProtocolError("digest mismatch: the message was damaged, or its sender has another key")
    try:
        envelope = _decode_envelope(frames[1])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed header: {error}") from error
    if envelope.protocol != PROTOCOL:
        raise ProtocolError(f"expected protocol {PROTOCOL}, got {envelope.protocol}; both sides need one release")
    return envelope, frames[2] if len(frames) == 3 else None
