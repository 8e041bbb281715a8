"""The engine process before a server: it speaks the engines' protocol to the run, and HTTP to the server.

    clients ── Generate, Health ──►┌───────────┐
                                   │ RpcServer ├─► Gateway ──► Adapter ── HTTP ──► SGLang, vLLM
    learner ── Prepare, Apply, … ─►└─────┬─────┘      ▲ gate
                                         └─► ServerReceiver ◄── broadcasts

A version is loaded behind a closed gate: running requests are ended with what they have, and go on from there, with the
weights that were committed meanwhile. So no token is ever sampled from a version that may not come to be.

It has no endpoint in the queue before its server is ready, and a new one after the server was started again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import trio

from streamrl_queue import TransferQueue
from streamrl_queue.errors import DeadlineExceeded, EngineError, WeightError
from streamrl_queue.nursery import open_nursery
from streamrl_queue.rpc import RpcServer
from streamrl_queue.weights import Abort, Apply, Manifest, Prepare, Probe, Resume

from ..config import ServerEngine
from . import process
from .adapter import Adapter
from .protocol import EngineRequest, Generate, Generated, GenerateReply, Health, Healthy, Sampling
from .receiver import Update, WeightReceiver
from .sglang import SGLang
from .vllm import VLLM

log = logging.getLogger(__name__)
# A line for every token of every probe would bury the rest of the log.
logging.getLogger("httpx2").setLevel(logging.WARNING)

REPORT_SECONDS: Final = 1.0  # gauges leave with the heartbeat, once a second
ABORT_SECONDS: Final = 0.2  # between two requests to end what runs: one that arrives meanwhile may have been missed
DRAIN_SECONDS: Final = 30.0  # a request that was ended answers within a step
PROBE_SECONDS: Final = 5.0  # for the one token that proves life
ADAPTERS: Final[Mapping[str, type[Adapter]]] = {"sglang": SGLang, "vllm": VLLM}


async def run_server_engine(
    connect: Callable[[str | None], AbstractAsyncContextManager[TransferQueue]],
    *,
    model_dir: Path,
    config: ServerEngine,
    number: int,
    bind: Callable[[int], str],
    log_file: Path,
    restarts: int,
    window: float,
    key: bytes | None = None,
) -> None:
    """Serve with the server of `config`, started here or running already, until cancelled.

    `connect(endpoint)` opens the engine's session with the queue; `bind(n)` is the address of its n-th life. A server
    that ends is started again at most `restarts` times within `window` seconds.

    Raises:
        ConfigError: the server is not installed. EngineError, DeadlineExceeded: it is too old, or ended too often, or
        was not ready in time.
    """
    vocab_size = int(msgspec.json.decode((model_dir / "config.json").read_bytes())["vocab_size"])
    deaths: deque[float] = deque()
    life = 0
    while True:
        try:
            async with _served(connect, model_dir, config, number, log_file, vocab_size) as adapter:
                await _serve(connect, adapter, config.slots, bind(life), key)
        except EngineError as error:
            now = time.monotonic()
            deaths.append(now)
            while deaths[0] <= now - window:
                deaths.popleft()
            # A server of somebody else is not ours to start again.
            if len(deaths) > restarts or config.urls:
                raise
            log.warning("the server is started again: %s", error)
        life += 1


@asynccontextmanager
async def _served(
    connect: Callable[[str | None], AbstractAsyncContextManager[TransferQueue]],
    model_dir: Path,
    config: ServerEngine,
    number: int,
    log_file: Path,
    vocab_size: int,
) -> AsyncIterator[Adapter]:
    """A checked adapter of a server that is ready; meanwhile the queue knows that this engine waits."""
    port = 0 if config.urls else process.free_port()
    url = config.urls[number] if config.urls else f"http://127.0.0.1:{port}"
    name = f"{config.kind} at {url}"
    waiting = trio.CancelScope()
    async with ADAPTERS[config.kind](url, vocab_size=vocab_size) as adapter, open_nursery() as nursery:
        nursery.start_soon(_wait, connect, name, waiting)
        if config.urls:
            await adapter.check()
            waiting.cancel()
            yield adapter
        else:
            command, variables = process.command(config, model_dir, port), process.variables(config)
            async with process.running(
                command, variables, log_file, ready=adapter.ready, seconds=config.start_seconds, name=name
            ):
                await adapter.check()
                waiting.cancel()
                yield adapter
        nursery.cancel_scope.cancel()


async def _wait(
    connect: Callable[[str | None], AbstractAsyncContextManager[TransferQueue]], name: str, scope: trio.CancelScope
) -> None:
    """consumes: nothing. produces: a session without an endpoint. waits for: the server. unblocked by: `scope`."""
    with scope:
        async with connect(None) as queue:
            queue.report(f"waits for {name} to be ready")
            await trio.sleep_forever()


async def _serve(
    connect: Callable[[str | None], AbstractAsyncContextManager[TransferQueue]],
    adapter: Adapter,
    slots: int,
    bind: str,
    key: bytes | None,
) -> None:
    """Answer the run until cancelled, or until the server's weights are unknown."""
    gateway = Gateway(adapter, slots)
    engine = _Engine(gateway)
    async with (
        RpcServer.bind(bind, EngineRequest, engine.handle, key=key) as rpc,
        connect(rpc.address) as queue,
        open_nursery() as nursery,
    ):
        await queue.announce(ready=False)

        async def committed(version: int) -> bool:
            return any(known.id == version and known.committed for known in await queue.versions())

        async def announce(version: int) -> None:
            await queue.announce(ready=True, version=version)

        engine.open(ServerReceiver(gateway, nursery, committed=committed, announce=announce))
        nursery.start_soon(_report, queue, gateway)
        await gateway.broke.wait()
        raise EngineError(f"{adapter.url}: nobody knows which weights it has: {gateway.why}")


class Gateway:
    """Requests to one server, and the gate that holds them back while its weights change."""

    def __init__(self, adapter: Adapter, slots: int) -> None:
        """`slots` requests at a time; the server has room for one more, so that a probe of life never queues."""
        self.adapter = adapter
        self._seats = trio.Semaphore(slots)
        self.version: int | None = None
        self.tokens = 0
        self.running = 0
        self.waiting = 0
        self.busy_seconds = 0.0
        self.broke = trio.Event()
        self.why = ""
        self._open = trio.Event()
        self._open.set()
        self._drained = trio.Event()
        self._since = 0.0

    def __repr__(self) -> str:
        return f"Gateway({self.adapter.url}, version={self.version}, running={self.running})"

    async def generate(
        self, tokens: npt.NDArray[np.int32], sampling: Sampling, session: str, seconds: float
    ) -> Generated:
        """The whole answer, across changes of weights; after `seconds` what there is of it.

        Raises:
            EngineError, SchemaError, LimitReached: as `Adapter.generate`.
        """
        until, got = trio.current_time() + seconds, Generated.nothing()
        while (left := until - trio.current_time()) > 0 and await self._enter(left):
            prompt = np.concatenate([tokens, got.tokens])
            had = len(got.tokens)
            ask = msgspec.structs.replace(
                sampling, max_tokens=sampling.max_tokens - had, seed_position=sampling.seed_position + had
            )
            try:
                part = await self.adapter.generate(prompt, ask, session=session, seconds=until - trio.current_time())
            finally:
                self._leave()
            self._check_version(part)
            self.tokens += len(part.tokens)
            got = got.then(part)
            if part.finish_reason != "aborted":
                return got
            if len(got.tokens) == sampling.max_tokens:
                return msgspec.structs.replace(got, finish_reason="length")
        return msgspec.structs.replace(got, finish_reason="aborted")

    async def _enter(self, seconds: float) -> bool:
        """Take a seat while the gate is open; False when that took too long."""
        self.waiting += 1
        try:
            with trio.move_on_after(seconds):
                while True:
                    await self._open.wait()
                    await self._seats.acquire()
                    if self._open.is_set():
                        self._begin()
                        return True
                    self._seats.release()
        finally:
            self.waiting -= 1
        return False

    def _leave(self) -> None:
        self._seats.release()
        self._end()

    def _begin(self) -> None:
        if not self.running:
            self._since = trio.current_time()
        self.running += 1

    def _end(self) -> None:
        self.running -= 1
        if not self.running:
            self.busy_seconds += trio.current_time() - self._since
            self._drained.set()

    def busy(self) -> float:
        """Seconds in which at least one request was running."""
        return self.busy_seconds + (trio.current_time() - self._since if self.running else 0.0)

    def _check_version(self, part: Generated) -> None:
        if any(span.version != self.version for span in part.spans):
            told = sorted({span.version for span in part.spans})
            raise EngineError(
                f"{self.adapter.url}: tokens of versions {told}, but version {self.version} was published: "
                "somebody else changes this server's weights"
            )

    @property
    def state(self) -> Literal["empty", "paused", "sampling"]:
        if self.version is None:
            return "empty"
        return "sampling" if self._open.is_set() else "paused"

    async def health(self) -> Healthy:
        """Sample one token, unless there are no weights or the gate is closed."""
        generated = self.state == "sampling"
        if generated:
            self._begin()
            try:
                start, single = np.zeros(1, np.int32), Sampling(max_tokens=1)
                one = await self.adapter.generate(start, single, session="", seconds=PROBE_SECONDS)
            finally:
                self._end()
            # A change of weights may have ended it.
            if not len(one.tokens) and self.state == "sampling":
                raise EngineError(f"{self.adapter.url}: sampled nothing within {PROBE_SECONDS:.0f} s")
            generated = len(one.tokens) > 0
        return Healthy(self.version, self.state, generated, self.running, self.waiting)

    async def close(self) -> None:
        """Let nothing in, end what runs, and return when nothing runs.

        Raises:
            DeadlineExceeded: the server does not let go.
        """
        self._open = trio.Event()
        with trio.move_on_after(DRAIN_SECONDS):
            while self.running:
                self._drained = trio.Event()
                await self.adapter.abort_all()
                with trio.move_on_after(ABORT_SECONDS):
                    await self._drained.wait()
        if self.running:
            raise DeadlineExceeded.waiting(f"the end of {self.running} requests", self.adapter.url, DRAIN_SECONDS)

    def open(self) -> None:
        """Let requests in."""
        self._open.set()

    def give_up(self, why: str) -> None:
        """The server has unknown weights: it must be started again."""
        self.version, self.why = None, why
        self.broke.set()


class ServerReceiver(WeightReceiver):
    """Loads a version behind the closed gate; an abort loads the one before again, which is kept in host memory."""

    def __init__(
        self,
        gateway: Gateway,
        nursery: trio.Nursery,
        *,
        committed: Callable[[int], Awaitable[bool]],
        announce: Callable[[int], Awaitable[None]],
    ) -> None:
        super().__init__(nursery, trio.Lock(), torch.device("cpu"), committed=committed, announce=announce)
        self._gateway = gateway
        self._have: Mapping[str, torch.Tensor] = {}

    @property
    def version(self) -> int | None:
        return self._gateway.version

    def check(self, manifest: Manifest) -> None:
        """The server is the one to know its tensors; the probe finds one that it did not take."""

    async def load(self, update: Update, probe: Probe) -> float:
        adapter = self._gateway.adapter
        async with self._boundary:
            self.expect(update.version)
            if update.paused_at is None:
                self.paused(update)
                update.staged = "loading"
                try:
                    await self._gateway.close()
                    await adapter.update(update.tensors, update.version, update.prepare.seconds)
                except (EngineError, DeadlineExceeded, WeightError) as error:
                    raise WeightError(f"version {update.version}: {error}") from error
                update.staged = "loaded"
            if update.staged != "loaded":
                raise WeightError(f"version {update.version} was not loaded here")
            told = await adapter.logprobs(probe.tokens)
        return float(np.abs(told - np.asarray(probe.logprobs, np.float32)).max(initial=0.0))

    async def take(self, update: Update) -> None:
        self._gateway.version, self._have = update.version, update.tensors
        self._gateway.open()

    async def give_up(self, update: Update) -> None:
        before = self._gateway.version
        if update.staged == "loading":
            # What is left of a model that took only some of its weights is not to be repaired.
            self._gateway.give_up(f"version {update.version} was loaded in part")
        elif update.staged == "loaded" and before is not None:
            try:
                await self._gateway.adapter.update(self._have, before, update.prepare.seconds)
            except WeightError as error:
                self._gateway.give_up(str(error))
        self._gateway.open()


class _Engine:
    """Hands each request to whom it concerns."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._opened = trio.Event()
        self._receiver: ServerReceiver | None = None

    def open(self, receiver: ServerReceiver) -> None:
        self._receiver = receiver
        self._opened.set()

    async def handle(self, peer: str, request: EngineRequest) -> msgspec.Struct:
        match request:
            case Generate():
                return await self._generate(request)
            case Health():
                return await self._gateway.health()
        await self._opened.wait()
        assert self._receiver is not None
        match request:
            case Prepare():
                return await self._receiver.prepare(request)
            case Apply():
                return await self._receiver.apply(request)
            case Resume():
                return await self._receiver.resume(request)
            case Abort():
                return await self._receiver.abort(request)

    async def _generate(self, request: Generate) -> GenerateReply:
        version = self._gateway.version
        if version is None or version < request.version_at_least:
            raise EngineError(f"this engine has version {version}, asked for {request.version_at_least} or later")
        tokens = np.frombuffer(request.tokens, "<i4").astype(np.int32, copy=False)
        got = await self._gateway.generate(tokens, request.sampling, request.session, request.seconds)
        return GenerateReply.of(got)


def _activity(gateway: Gateway) -> str:
    if gateway.version is None:
        return "waits for weights"
    return "samples" if gateway.running else "waits for requests"


async def _report(queue: TransferQueue, gateway: Gateway) -> None:
    """consumes: counters. produces: gauges. waits for: the clock. unblocked by: it."""
    before = 0.0
    while True:
        busy = gateway.busy()
        queue.report(
            _activity(gateway),
            tokens_sampled=gateway.tokens,
            running=gateway.running,
            waiting=gateway.waiting,
            busy_share=min(1.0, (busy - before) / REPORT_SECONDS),
            version=-1 if gateway.version is None else gateway.version,
        )
        before = busy
        await trio.sleep(REPORT_SECONDS)
