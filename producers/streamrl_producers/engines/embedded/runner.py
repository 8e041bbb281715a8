"""The decode loop, and the token boundary at which everything else happens.

torch runs in a worker thread, so that health checks, heartbeats and arriving weights never wait for a step. Whoever
touches the batch holds `boundary`: the loop while steps run, the weight receiver while it swaps.
"""

from __future__ import annotations

import time
from typing import Final, Literal

import numpy as np
import trio

from streamrl_queue.errors import EngineError

from ..protocol import Generated, Healthy, Sampling
from .batch import Batch, Request
from .decoder import Weights

# Steps of one visit to the worker thread: short beside a heartbeat (1 s), long beside the visit's cost (50 µs).
BURST_SECONDS: Final = 0.01


class Runner:
    """Runs a `Batch` for many callers. It samples only while it has weights and is not paused."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.boundary = trio.Lock()
        self.busy_seconds = 0.0
        self._paused = False
        self._done: dict[Request, trio.Event] = {}
        self._abandoned: list[Request] = []
        self._wake = trio.Event()
        self._sampled = trio.Event()

    def __repr__(self) -> str:
        return f"Runner({self.state}, {self.batch!r})"

    @property
    def version(self) -> int | None:
        """The version that is sampled from; None before the first weights."""
        return self.batch.version if self.batch.decoder.weights is not None else None

    @property
    def state(self) -> Literal["empty", "paused", "sampling"]:
        if self.version is None:
            return "empty"
        return "paused" if self._paused else "sampling"

    async def run(self) -> None:
        """The decode loop.

        consumes: submitted and abandoned requests. produces: their results. waits for: a request, or the end of
        a pause. unblocked by: `generate`, `resume`.
        """
        while True:
            while not self._has_work():
                self._wake = trio.Event()
                await self._wake.wait()
            async with self.boundary:
                while self._abandoned:
                    self.batch.abort(self._abandoned.pop())
                if self._may_sample():
                    before = self.batch.counters.sampled
                    self.busy_seconds += await trio.to_thread.run_sync(self._burst)
                    if self.batch.counters.sampled > before:
                        self._sampled.set()
                        self._sampled = trio.Event()
            for request in self.batch.ended():
                if (done := self._done.get(request)) is not None:
                    done.set()

    def _burst(self) -> float:
        """Steps until a request ends, nothing is left, or the burst is long enough. Returns seconds."""
        start = time.perf_counter()
        while True:
            self.batch.step()
            seconds = time.perf_counter() - start
            if self.batch.has_ended or seconds > BURST_SECONDS or not self.batch.has_work:
                return seconds

    def _may_sample(self) -> bool:
        return self.state == "sampling" and self.batch.has_work

    def _has_work(self) -> bool:
        return bool(self._abandoned) or self._may_sample()

    async def generate(self, request: Request, seconds: float) -> Generated:
        """The answer to `request`; after `seconds` what there is of it. A cancelled caller's request is ended.

        Raises:
            LimitReached, SchemaError: a request that can never run (see `Batch.submit`).
            EngineError: the weights do not give finite logits.
        """
        self.batch.submit(request)
        done = self._done[request] = trio.Event()
        self._wake.set()
        try:
            with trio.move_on_after(seconds):
                await done.wait()
            if not done.is_set():
                self._abandon(request)
                await done.wait()
        except trio.Cancelled:
            self._abandon(request)
            raise
        finally:
            del self._done[request]
        if request.error is not None:
            raise request.error
        if request.result is None:
            raise EngineError(f"session {request.session} ended without a result")
        return request.result

    def _abandon(self, request: Request) -> None:
        self._abandoned.append(request)
        self._wake.set()

    async def health(self) -> Healthy:
        """Returns once a token was sampled after the call (of any request; an idle engine samples one for it)."""
        generated = self.state == "sampling"
        if generated and self.batch.running:
            await self._sampled.wait()
        elif generated:
            one = Request(np.zeros(1, np.int32), Sampling(max_tokens=1), "")
            await self.generate(one, float("inf"))
        return Healthy(self.version, self.state, generated, self.batch.running, self.batch.waiting)

    def pause(self) -> None:
        """Sample nothing until `resume`. Hold the boundary."""
        self._paused = True

    def resume(self) -> None:
        """Sample again."""
        self._paused = False
        self._wake.set()

    def reweigh(self, weights: Weights, version: int, *, recompute: bool) -> None:
        """Sample from `weights` as `version`. Hold the boundary."""
        self.batch.reweigh(weights, version, recompute=recompute)
        self._wake.set()
