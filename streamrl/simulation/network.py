"""The simulated network: connections in memory between processes, with delays and faults out of a seeded random.

A connection keeps the order of its messages, as TCP does; messages of different connections overtake each other.
Whoever loses a connection loses what was on its way, and connects again after a while under a fresh identity, as
ZeroMQ does. A reply may be lost alone (its peer did not keep up), a message may arrive twice or damaged.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Protocol, Self

import msgspec
import trio

from streamrl_queue.errors import AddressError
from streamrl_queue.transport import Buffer

from .trace import Trace

# Half of all messages take less than this; the tail is long.
LATENCY_SECONDS: Final = 0.0005
LATENCY_SPREAD: Final = 1.0
MAX_LATENCY_SECONDS: Final = 1.0
# ZeroMQ's RECONNECT_IVL and RECONNECT_IVL_MAX.
RECONNECT_SECONDS: Final = (0.02, 0.5)
# A replayed message comes at most this much later than the first.
REPLAY_SECONDS: Final = 0.5


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities per message."""

    lose: float = 0.0
    """The connection breaks and takes everything on its way with it."""
    drop: float = 0.0
    """A reply is dropped because its peer did not keep up; the connection lives."""
    duplicate: float = 0.0
    """It arrives twice, the second time before what was sent later."""
    replay: float = 0.0
    """It arrives once more, when later messages may have been answered: no connection does this."""
    corrupt: float = 0.0
    """A bit flips, a frame is cut short or missing."""
    slow: float = 0.0
    """It takes up to a second."""


CALM: Final = Rates()


class Node:
    """One process on the network, from its start to its death."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.alive = True
        # Until then nothing leaves it and nothing reaches it, but no connection breaks: it stands still.
        self.held_until = 0.0
        # Until then it has no connection.
        self.cut_until = 0.0
        self.slowness = 1.0
        self.scope = trio.CancelScope()
        self.dealers: list[SimDealer] = []
        self.routers: list[SimRouter] = []

    def __repr__(self) -> str:
        return f"<Node {self.name}.{self.incarnation}>"


class Observer(Protocol):
    """Sees what passes through one router."""

    def received(self, frames: Sequence[Buffer]) -> None:
        """The router's owner takes this message; the first frame names the peer."""

    def sent(self, frames: Sequence[Buffer]) -> None:
        """The router's owner answers with this message."""

    def idle(self) -> None:
        """The router's owner has done all there was to do, and waits."""


class _Link:
    """One connection. `last` is the arrival of the last message to the router, and to the dealer."""

    def __init__(self, identity: bytes, dealer: SimDealer, router: SimRouter) -> None:
        self.identity = identity
        self.dealer = dealer
        self.router = router
        self.open = True
        self.last = [0.0, 0.0]


class Network:
    """All connections of a run. `run` moves the messages."""

    def __init__(self, rng: random.Random, trace: Trace) -> None:
        self.rates = CALM
        self.counts: defaultdict[str, int] = defaultdict(int)
        self._rng = rng
        # Of its own, so that what is drawn for a secret moves no fault.
        self._secrets = random.Random(repr(rng.getstate()))
        self._trace = trace
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._identities = itertools.count(1)
        self._routers: dict[str, SimRouter] = {}
        self._lonely: defaultdict[str, list[SimDealer]] = defaultdict(list)
        self._sleep = trio.CancelScope()

    def entropy(self, size: int) -> bytes:
        """Bytes that differ every time."""
        return self._secrets.randbytes(size)

    def transport(self, node: Node, observer: Observer | None = None) -> SimTransport:
        """How `node` reaches the others. `observer` sees what its routers receive and send."""
        return SimTransport(self, node, observer)

    async def run(self) -> None:
        """Consumes what was sent; produces arrivals; waits for and is unblocked by the clock."""
        while True:
            with trio.CancelScope(deadline=self._queue[0][0] if self._queue else float("inf")) as self._sleep:
                await trio.sleep_forever()
            now = trio.current_time()
            while self._queue and self._queue[0][0] <= now:
                heapq.heappop(self._queue)[2]()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something at a time; what is asked for first is done first."""
        heapq.heappush(self._queue, (time, next(self._numbers), action))
        if time < self._sleep.deadline:
            self._sleep.deadline = time

    # -- faults

    def kill(self, node: Node) -> None:
        """The process is gone, without a word."""
        node.alive = False
        for router in node.routers:
            self._close_router(router)
        for dealer in node.dealers:
            self._break(dealer.link)

    def hold(self, node: Node, seconds: float) -> None:
        """The process stands still."""
        node.held_until = max(node.held_until, trio.current_time() + seconds)

    def cut(self, node: Node, seconds: float) -> None:
        """The process loses all its connections and gets none for a while."""
        node.cut_until = max(node.cut_until, trio.current_time() + seconds)
        for link in [dealer.link for dealer in node.dealers] + [x for r in node.routers for x in r.links.values()]:
            self._break(link)

    def heal(self, node: Node) -> None:
        """The process is as well connected as it can be."""
        node.held_until = node.cut_until = 0.0
        node.slowness = 1.0

    # -- connections

    def open_router(self, node: Node, address: str, observer: Observer | None) -> SimRouter:
        if address.endswith(":0"):
            address = f"{address[:-2]}:{next(self._identities)}"
        if address in self._routers:
            raise AddressError(f"cannot bind {address}: Address already in use")
        router = self._routers[address] = SimRouter(self, node, address, observer)
        node.routers.append(router)
        for dealer in self._lonely.pop(address, ()):
            self._connect_soon(dealer)
        return router

    def open_dealer(self, node: Node, address: str) -> SimDealer:
        dealer = SimDealer(self, node, address)
        node.dealers.append(dealer)
        self.at(trio.current_time() + self._latency(), lambda: self._connect(dealer))
        return dealer

    def close_dealer(self, dealer: SimDealer) -> None:
        dealer.closed = True
        self._break(dealer.link)
        if dealer in dealer.node.dealers:
            dealer.node.dealers.remove(dealer)

    def close_router(self, router: SimRouter) -> None:
        self._close_router(router)
        if router in router.node.routers:
            router.node.routers.remove(router)

    def _close_router(self, router: SimRouter) -> None:
        if self._routers.get(router.address) is router:
            del self._routers[router.address]
        for link in list(router.links.values()):
            self._break(link)

    def _connect_soon(self, dealer: SimDealer, after: float = 0.0) -> None:
        moment = max(trio.current_time(), after) + self._rng.uniform(*RECONNECT_SECONDS)
        self.at(moment, lambda: self._connect(dealer))

    def _connect(self, dealer: SimDealer) -> None:
        if dealer.link is not None or dealer.closed or not dealer.node.alive:
            return
        router = self._routers.get(dealer.address)
        if router is None:
            self._lonely[dealer.address].append(dealer)
            return
        cut = max(dealer.node.cut_until, router.node.cut_until)
        if cut > trio.current_time():
            self._connect_soon(dealer, cut)
            return
        identity = b"%08d" % next(self._identities)
        dealer.link = router.links[identity] = _Link(identity, dealer, router)
        dealer.connected.set()

    def _break(self, link: _Link | None) -> None:
        if link is None or not link.open:
            return
        link.open = False
        link.router.links.pop(link.identity, None)
        link.dealer.link = None
        link.dealer.connected = trio.Event()
        if link.dealer.node.alive and not link.dealer.closed:
            self._connect_soon(link.dealer)

    # -- messages

    def transmit(self, link: _Link, frames: Sequence[Buffer], *, to_router: bool) -> None:
        """Put a message on its way, or do what the dice say."""
        sent = [bytes(frame) for frame in frames]
        rates, dice = self.rates, self._rng.random()
        if dice < rates.lose:
            self.counts["lose"] += 1
            self._break(link)
            return
        if not to_router and dice < rates.lose + rates.drop:
            self.counts["drop"] += 1
            return
        if self._rng.random() < rates.corrupt:
            self.counts["corrupt"] += 1
            sent = self._damage(sent)
        extra = 0.0
        if self._rng.random() < rates.slow:
            self.counts["slow"] += 1
            extra = self._rng.uniform(0.0, MAX_LATENCY_SECONDS)
        arrives = self._arrival(link, to_router, extra)
        self.at(arrives, lambda: self._arrive(link, sent, to_router))
        if self._rng.random() < rates.duplicate:
            self.counts["duplicate"] += 1
            again = self._arrival(link, to_router, 0.0)
            self.at(again, lambda: self._arrive(link, sent, to_router))
        if self._rng.random() < rates.replay:
            self.counts["replay"] += 1
            late = arrives + self._rng.uniform(0.0, REPLAY_SECONDS)
            self.at(late, lambda: self._arrive(link, sent, to_router))

    def _arrival(self, link: _Link, to_router: bool, extra: float) -> float:
        sender, receiver = link.dealer.node, link.router.node
        slowness = max(sender.slowness, receiver.slowness)
        leaves = max(trio.current_time(), (sender if to_router else receiver).held_until)
        arrives = max(leaves + self._latency() * slowness + extra, link.last[to_router])
        link.last[to_router] = arrives
        return arrives

    def _arrive(self, link: _Link, frames: list[bytes], to_router: bool) -> None:
        if not link.open:
            return
        node = link.router.node if to_router else link.dealer.node
        now = trio.current_time()
        if node.held_until > now:
            link.last[to_router] = max(link.last[to_router], node.held_until)
            self.at(node.held_until, lambda: self._arrive(link, frames, to_router))
            return
        self._trace.mix(now, node.name, link.identity + (frames[0] if frames else b""))
        if to_router:
            link.router.deliver([link.identity, *frames])
        else:
            link.dealer.deliver(list(frames))

    def _latency(self) -> float:
        return min(LATENCY_SECONDS * self._rng.lognormvariate(0.0, LATENCY_SPREAD), MAX_LATENCY_SECONDS)

    def _damage(self, frames: list[bytes]) -> list[bytes]:
        frames = list(frames)
        which = self._rng.randrange(len(frames))
        how = self._rng.random()
        if how < 0.1:
            del frames[which]
        elif how < 0.3 or not frames[which]:
            frames[which] = frames[which][: self._rng.randrange(len(frames[which]) + 1)]
        else:
            damaged = bytearray(frames[which])
            damaged[self._rng.randrange(len(damaged))] ^= 1 << self._rng.randrange(8)
            frames[which] = bytes(damaged)
        return frames


class _Inbox:
    """Messages that arrived at a socket. Closing is leaving the `with` block."""

    def __init__(self) -> None:
        self._messages: deque[list[Buffer]] = deque()
        self._arrived = trio.Event()

    def deliver(self, frames: list[Buffer]) -> None:
        self._messages.append(frames)
        self._arrived.set()

    async def _next(self, deadline: float) -> list[Buffer] | None:
        if self._messages:
            await trio.lowlevel.cancel_shielded_checkpoint()
        with trio.move_on_at(deadline):
            while not self._messages:
                self._arrived = trio.Event()
                await self._arrived.wait()
        return self._messages.popleft() if self._messages else None


class SimRouter(_Inbox):
    """A Router in memory."""

    def __init__(self, network: Network, node: Node, address: str, observer: Observer | None) -> None:
        super().__init__()
        self.address = address
        self.node = node
        self.links: dict[bytes, _Link] = {}
        self._network = network
        self._observer = observer

    async def recv(self, deadline: float = math.inf) -> list[Buffer] | None:
        """The next message; None when there is none until `deadline`. Cancellation loses none."""
        if self._observer and not self._messages:
            self._observer.idle()
        frames = await self._next(deadline)
        return None if frames is None else self._seen(frames)

    def try_recv(self) -> list[Buffer] | None:
        """The next message if one has already arrived."""
        return self._seen(self._messages.popleft()) if self._messages else None

    def _seen(self, frames: list[Buffer]) -> list[Buffer]:
        if self._observer:
            self._observer.received(frames)
        return frames

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send to the peer that the first frame names; False when it is gone."""
        if self._observer:
            self._observer.sent(frames)
        link = self.links.get(bytes(frames[0]))
        if link is None:
            return False
        self._network.transmit(link, frames[1:], to_router=False)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._network.close_router(self)


class SimDealer(_Inbox):
    """A Dealer in memory."""

    def __init__(self, network: Network, node: Node, address: str) -> None:
        super().__init__()
        self.address = address
        self.node = node
        self.link: _Link | None = None
        self.connected = trio.Event()
        self.closed = False
        self._network = network

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Send as soon as there is a connection. The caller bounds the wait."""
        await trio.lowlevel.checkpoint()
        while not self.try_send(frames):
            await self.connected.wait()

    def try_send(self, frames: Sequence[Buffer]) -> bool:
        """Send if there is a connection now; tells whether it was sent."""
        if self.link is None or self.closed or not self.node.alive:
            return False
        self._network.transmit(self.link, frames, to_router=True)
        return True

    async def recv(self, deadline: float = math.inf) -> list[Buffer] | None:
        """The next message; None when there is none until `deadline`. Cancellation loses none."""
        return await self._next(deadline)

    def try_recv(self) -> list[Buffer] | None:
        """The next message if one has already arrived."""
        return self._messages.popleft() if self._messages else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._network.close_dealer(self)


class SimTransport:
    """The network as one process sees it: a `streamrl_queue.transport.Transport`."""

    shares_files = False

    def __init__(self, network: Network, node: Node, observer: Observer | None) -> None:
        self._network = network
        self._node = node
        self._observer = observer

    def entropy(self, size: int) -> bytes:
        """Bytes out of the seed."""
        return self._network.entropy(size)

    def router(self, address: str, *, key: bytes | None) -> SimRouter:
        """Listen at `address`; one that ends in `:0` gets a number of its own."""
        return self._network.open_router(self._node, address, self._observer)

    def dealer(self, address: str, *, key: bytes | None = None) -> SimDealer:
        """Connect to `address`."""
        return self._network.open_dealer(self._node, address)
