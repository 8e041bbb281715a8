"""An engine that speaks the protocol on a real socket and answers with what a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import trio

from streamrl_producers.engines.protocol import EngineRequest, Generate, Generated, GenerateReply, Health, Healthy
from streamrl_queue import Broker, TransferQueue
from streamrl_queue.rpc import RpcServer
from streamrl_queue.schema import Span

Answer = Callable[[Generate], Awaitable[Generated]]


def counting(version: int = 1) -> Answer:
    """Continues every prompt by its last token plus one, plus two, …; never stops by itself."""

    async def answer(request: Generate) -> Generated:
        last = int(np.frombuffer(request.tokens, "<i4")[-1])
        return generated(range(last + 1, last + 1 + request.sampling.max_tokens), version)

    return answer


def generated(tokens: object, version: int = 1, finish: str = "length") -> Generated:
    ids = np.array(list(tokens), np.int32)  # type: ignore[call-overload]
    return Generated(ids, -ids.astype(np.float32), (Span(0, version, version),), finish)  # type: ignore[arg-type]


class FakeEngine:
    """`asked` are the requests so far. `answer` and `sick` may be changed while it runs."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[Generate] = []
        self.sick = False
        self.dies = trio.CancelScope()
        self.queue: TransferQueue

    async def handle(self, peer: str, request: EngineRequest) -> msgspec.Struct:
        if isinstance(request, Health):
            if self.sick:
                await trio.sleep_forever()
            return Healthy(1, "sampling", True, 0, 0)
        assert isinstance(request, Generate)
        self.asked.append(request)
        return GenerateReply.of(await self.answer(request))

    async def run(self, broker: Broker, path: Path, name: str, started: trio.Event) -> None:
        with self.dies:
            async with (
                RpcServer.bind(f"ipc://{path}/{name}", EngineRequest, self.handle) as server,
                TransferQueue.connect(broker.address, role="engine", name=name, endpoint=server.address) as self.queue,
            ):
                await self.queue.announce(ready=True, version=1)
                started.set()
                await trio.sleep_forever()


@asynccontextmanager
async def fake_engine(broker: Broker, path: Path, name: str, answer: Answer) -> AsyncIterator[FakeEngine]:
    """A ready engine. Cancel `dies` and it is gone."""
    engine, started = FakeEngine(answer), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run, broker, path, name, started)
        await started.wait()
        yield engine
        engine.dies.cancel()
