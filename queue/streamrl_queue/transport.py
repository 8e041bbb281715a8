"""ZeroMQ sockets under trio: a ROUTER that many peers talk to, and a DEALER that talks to one.

A message is a list of frames. Sockets never block the event loop: a ROUTER drops a reply that its peer does not
take (the peer asks again), a DEALER waits for its connection within the caller's deadline.

ZeroMQ's file descriptor is edge-triggered: it may stay silent while messages wait. So every receive reads the
socket's event flags first, and a send that finds input waiting wakes the sleeping receiver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self
from urllib.parse import urlsplit

import trio
import zmq

from .errors import AddressError

Buffer = bytes | bytearray | memoryview

# A frame above this is refused by the receiver; senders refuse earlier (wire.MAX_MESSAGE_BYTES), with an error.
MAX_FRAME_BYTES: Final = 1 << 30
# At exit, give the last replies this long to leave the process.
LINGER_MILLISECONDS: Final = 200
# A DEALER without a connection looks again this often, within its caller's deadline.
RECONNECT_POLL_SECONDS: Final = 0.02
# Copying a small frame costs less than tracking it.
COPY_BELOW_BYTES: Final = 1 << 16
# Peer and header; what follows is payload.
SMALL_FRAMES: Final = 2

SCHEMES: Final = ("tcp://", "ipc://")
# Before an address: what passes there is encrypted; see `curve`.
ENCRYPTED: Final = "curve+"
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})


def is_local(address: str) -> bool:
    """Whether only this host's processes can reach `address`."""
    address = address.removeprefix(ENCRYPTED)
    return address.startswith("ipc://") or urlsplit(address).hostname in LOOPBACK


class Router(Protocol):
    """The serving side. The first frame of every message names the peer."""

    address: str

    async def recv(self, deadline: float = inf) -> list[Buffer] | None:
        """The next message; None when there is none until `deadline`. Cancellation loses none."""

    def try_recv(self) -> list[Buffer] | None:
        """The next message if one has already arrived."""

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send to the peer that the first frame names; False when it is gone or does not keep up."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Dealer(Protocol):
    """The asking side, connected to one Router; reconnects by itself when the Router comes back."""

    address: str

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Send as soon as there is a connection. The caller bounds the wait."""

    def try_send(self, frames: Sequence[Buffer]) -> bool:
        """Send if there is a connection; tells whether it was sent."""

    async def recv(self, deadline: float = inf) -> list[Buffer] | None:
        """The next message; None when there is none until `deadline`. Cancellation loses none."""

    def try_recv(self) -> list[Buffer] | None:
        """The next message if one has already arrived."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Transport(Protocol):
    """How processes reach each other: ZeroMQ, or the simulator's network."""

    # Whether a client on the broker's host may also look at its files.
    shares_files: bool

    def entropy(self, size: int) -> bytes:
        """That many bytes that nobody can foretell."""

    def router(self, address: str, *, key: bytes | None) -> Router:
        """Listen at `address`."""

    def dealer(self, address: str, *, key: bytes | None = None) -> Dealer:
        """Connect to the router at `address`; the key is for encrypted ones."""


Configure = Callable[["zmq.Socket[bytes]"], None]


class _Socket:
    def __init__(
        self, kind: int, configure: Configure | None, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        self._socket = (context or zmq.Context.instance()).socket(kind)
        if configure is not None:
            configure(self._socket)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._sleeper: trio.CancelScope | None = None

    async def recv(self, deadline: float = inf) -> list[Buffer] | None:
        """The next message; None when there is none until `deadline`. One task at a time may wait here."""
        if (frames := self.try_recv()) is not None:
            # Not cancellable: the message is already taken out of the socket.
            await trio.lowlevel.cancel_shielded_checkpoint()
            return frames
        while True:
            if not self._has_input():
                with trio.CancelScope(deadline=deadline) as self._sleeper:
                    await trio.lowlevel.wait_readable(self._fd)
                self._sleeper = None
            if (frames := self.try_recv()) is not None:
                return frames
            if trio.current_time() >= deadline:
                return None

    def try_recv(self) -> list[Buffer] | None:
        """The next message if one has already arrived."""
        try:
            # The peer's name and the header are small. A payload is looked at where ZeroMQ put it.
            frames: list[Buffer] = [self._socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        while self._socket.getsockopt(zmq.RCVMORE):
            if len(frames) < SMALL_FRAMES:
                frames.append(self._socket.recv(zmq.NOBLOCK))
            else:
                frames.append(self._socket.recv(zmq.NOBLOCK, copy=False).buffer)
        return frames

    def _has_input(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _send_now(self, frames: Sequence[Buffer]) -> bool:
        """Send unless the socket would block; tells whether it was sent."""
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE, copy=buffer_bytes(frame) < COPY_BELOW_BYTES)
            self._socket.send(frames[-1], zmq.NOBLOCK, copy=buffer_bytes(frames[-1]) < COPY_BELOW_BYTES)
        except zmq.Again:
            return False
        finally:
            if self._sleeper is not None and self._has_input():
                self._sleeper.cancel()
        return True

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ZmqRouter(_Socket):
    """A Router over ZeroMQ."""

    def __init__(
        self,
        address: str,
        *,
        key: bytes | None,
        configure: Configure | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """Bind `address` (`tcp://host:0` takes a free port, `ipc://path` makes its directory with mode 0700).

        Raises:
            AddressError: the address is in use, or public while no key is configured.
        """
        if not address.startswith(SCHEMES):
            raise AddressError(f"bind address {address!r}: expected tcp://HOST:PORT or ipc://PATH")
        if not is_local(address) and key is None:
            raise AddressError(
                f"bind address {address} is reachable from other hosts and needs a key: make one with `streamrl "
                "keygen FILE` and give it (--key-file FILE), or use 127.0.0.1"
            )
        super().__init__(zmq.ROUTER, configure, context)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._socket.bind(address[:-1] + "*" if address.endswith(":0") else address)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(f"cannot bind {address}: {os.strerror(error.errno or 0)}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send to the peer that the first frame names; False when it is gone or does not keep up."""
        try:
            return self._send_now(frames)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise


class ZmqDealer(_Socket):
    """A Dealer over ZeroMQ."""

    def __init__(self, address: str, *, configure: Configure | None = None) -> None:
        super().__init__(zmq.DEALER, configure)
        # Without a connection nothing is queued: a Router that restarts must not get a flood of stale requests.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(f"cannot connect to {address}: {os.strerror(error.errno or 0)}") from error
        self.address = address

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Send as soon as there is a connection. The caller bounds the wait."""
        while not self._send_now(frames):
            await trio.sleep(RECONNECT_POLL_SECONDS)
        await trio.lowlevel.checkpoint_if_cancelled()

    def try_send(self, frames: Sequence[Buffer]) -> bool:
        """Send if there is a connection now; tells whether it was sent."""
        return not self._socket.closed and self._send_now(frames)


class ZeroMQ:
    """Sockets between real processes."""

    shares_files = True

    def entropy(self, size: int) -> bytes:
        """That many bytes that nobody can foretell."""
        return os.urandom(size)

    def router(self, address: str, *, key: bytes | None) -> ZmqRouter:
        """Listen at `address`; see `ZmqRouter` and, for `curve+tcp://…`, `curve`."""
        if address.startswith(ENCRYPTED):
            from .curve import Curve

            return Curve(key).router(address.removeprefix(ENCRYPTED))
        return ZmqRouter(address, key=key)

    def dealer(self, address: str, *, key: bytes | None = None) -> ZmqDealer:
        """Connect to `address`."""
        if address.startswith(ENCRYPTED):
            from .curve import Curve

            return Curve(key).dealer(address.removeprefix(ENCRYPTED))
        return ZmqDealer(address)


ZEROMQ: Final = ZeroMQ()


def buffer_bytes(frame: Any) -> int:
    """The size of a frame in bytes."""
    return memoryview(frame).nbytes
