"""Weights for the embedded engine.

Received tensors become a complete, probed `Weights` object while decoding goes on with the one before it; a swap is one
assignment at a token boundary, and an abort has nothing to repair.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
import trio

from streamrl_queue.weights import Manifest, Probe

from ..receiver import Update, WeightReceiver
from .decoder import Weights
from .runner import Runner


class EmbeddedReceiver(WeightReceiver):
    """Builds beside what is sampled from, and swaps."""

    def __init__(
        self,
        runner: Runner,
        nursery: trio.Nursery,
        *,
        recompute: bool,
        committed: Callable[[int], Awaitable[bool]],
        announce: Callable[[int], Awaitable[None]],
    ) -> None:
        device = runner.batch.decoder.device
        super().__init__(nursery, runner.boundary, device, committed=committed, announce=announce)
        self._runner, self._recompute = runner, recompute

    @property
    def version(self) -> int | None:
        return self._runner.version

    def check(self, manifest: Manifest) -> None:
        specs = [spec for bucket in manifest.buckets for spec in bucket.tensors]
        self._runner.batch.decoder.architecture.check((spec.name, spec.shape) for spec in specs)

    async def load(self, update: Update, probe: Probe) -> float:
        if update.staged is None:
            update.staged = await trio.to_thread.run_sync(self._runner.batch.decoder.build, update.tensors)
            update.tensors = {}
        error = await trio.to_thread.run_sync(self._probe, update.staged, probe)
        async with self._boundary:
            self.expect(update.version)
            if update.paused_at is None:
                self._runner.pause()
                self.paused(update)
        return error

    def _probe(self, weights: Weights, probe: Probe) -> float:
        ours = self._runner.batch.decoder.logprobs(np.asarray(probe.tokens, np.int32), weights)
        return float(np.abs(ours - np.asarray(probe.logprobs, np.float32)).max(initial=0.0))

    async def take(self, update: Update) -> None:
        self._runner.reweigh(update.staged, update.version, recompute=self._recompute)
        self._runner.resume()

    async def give_up(self, update: Update) -> None:
        self._runner.resume()
