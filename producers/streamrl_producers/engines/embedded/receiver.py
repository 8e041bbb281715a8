"""Receiving weights while requests run: prepare, receive, apply, then resume or abort.

At most one update is under way. Received tensors become a complete, probed `Weights` object while decoding goes on
with the one before it; a swap is one assignment at a token boundary, and an abort has nothing to repair.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import numpy as np
import torch
import trio

from streamrl_queue.errors import DeadlineExceeded, WeightError
from streamrl_queue.weights import (
    Abort,
    Aborted,
    Applied,
    Apply,
    Circle,
    Prepare,
    Prepared,
    Probe,
    Resume,
    Resumed,
    buffer_digest,
    unpack,
)

from .decoder import Weights
from .runner import Runner


class _Update:
    """One version on its way in."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare
        self.version = prepare.manifest.version
        self.scope = trio.CancelScope()
        self.received = trio.Event()
        self.tensors: dict[str, torch.Tensor] = {}
        self.error: WeightError | None = None
        self.weights: Weights | None = None
        self.paused_at: float | None = None
        self.settled = trio.Event()


class WeightReceiver:
    """The engine's side of a publish.

    `committed(version)` asks the queue whether a version exists; `announce(version)` tells it that this engine now
    samples from it.
    """

    def __init__(
        self,
        runner: Runner,
        nursery: trio.Nursery,
        *,
        recompute: bool,
        committed: Callable[[int], Awaitable[bool]],
        announce: Callable[[int], Awaitable[None]],
    ) -> None:
        self._runner, self._nursery, self._recompute = runner, nursery, recompute
        self._committed, self._announce = committed, announce
        self._circle = Circle()
        self._update: _Update | None = None
        self.pause_seconds = 0.0

    async def prepare(self, request: Prepare) -> Prepared:
        """Check the manifest against the model and start to receive. An unfinished older update is settled first.

        The version that is sampled from may be sent again: that is how a doubtful engine is repaired.

        Raises:
            WeightError: missing, unexpected or wrongly shaped tensors, by name.
        """
        specs = [spec for bucket in request.manifest.buckets for spec in bucket.tensors]
        self._runner.batch.decoder.architecture.check((spec.name, spec.shape) for spec in specs)
        if self._update is not None:
            await self._settle(self._update)
        update = self._update = _Update(request)
        self._nursery.start_soon(self._receive, update)
        return Prepared()

    async def _receive(self, update: _Update) -> None:
        """consumes: one broadcast per bucket. produces: staged tensors. waits for: the learner, at most the
        update's seconds per bucket. unblocked by: its broadcasts, or `abort`.
        """
        with update.scope:
            try:
                update.tensors = await trio.to_thread.run_sync(
                    _receive_buckets,
                    update.prepare,
                    self._circle,
                    self._runner.batch.decoder.device,
                    abandon_on_cancel=True,
                )
            except WeightError as error:
                update.error = error
        update.received.set()

    async def apply(self, request: Apply) -> Applied:
        """Wait for all buckets, build and probe the weights, then pause at a token boundary.

        Raises:
            DeadlineExceeded: buckets are missing after the update's seconds.
            WeightError: digests or names are wrong, the transfer broke, or another version was prepared.
        """
        update = self._expect(request.version)
        with trio.move_on_after(update.prepare.seconds):
            await update.received.wait()
        if not update.received.is_set():
            raise DeadlineExceeded.waiting(
                f"the buckets of version {update.version}", "learner", update.prepare.seconds
            )
        if update.error is not None:
            raise update.error
        decoder = self._runner.batch.decoder
        if update.weights is None:
            update.weights = await trio.to_thread.run_sync(decoder.build, update.tensors)
            update.tensors = {}
        error = await trio.to_thread.run_sync(self._probe, update.weights, request.probe)
        async with self._runner.boundary:
            self._expect(request.version)
            if update.paused_at is None:
                update.paused_at = time.monotonic()
                self._runner.pause()
                self._nursery.start_soon(self._await_verdict, update)
        digests = tuple(bucket.digest for bucket in update.prepare.manifest.buckets)
        return Applied(update.version, digests, error)

    def _probe(self, weights: Weights, probe: Probe) -> float:
        ours = self._runner.batch.decoder.logprobs(np.asarray(probe.tokens, np.int32), weights)
        return float(np.abs(ours - np.asarray(probe.logprobs, np.float32)).max(initial=0.0))

    async def resume(self, request: Resume) -> Resumed:
        """The version is committed: sample from it. Repeating it is harmless."""
        if self._update is None and self._runner.version == request.version:
            return Resumed(self.pause_seconds)
        update = self._expect(request.version)
        if update.paused_at is None:
            raise WeightError(f"version {request.version} was not applied; send Apply before Resume")
        await self._take(update)
        if self._runner.version != request.version:
            raise WeightError(f"version {request.version} was aborted while it was resumed")
        return Resumed(self.pause_seconds)

    async def abort(self, request: Abort) -> Aborted:
        """The version will not exist: sample on with the weights before it. Repeating it is harmless."""
        if self._update is not None and self._update.version == request.version:
            await self._give_up(self._update)
        elif self._runner.version == request.version:
            raise WeightError(f"version {request.version} was resumed and is sampled from; it cannot be aborted")
        return Aborted()

    def _expect(self, version: int) -> _Update:
        if self._update is None or self._update.version != version:
            here = "none" if self._update is None else f"version {self._update.version}"
            raise WeightError(f"version {version} was not prepared here; prepared: {here}")
        return self._update

    async def _take(self, update: _Update) -> None:
        assert update.weights is not None
        assert update.paused_at is not None
        async with self._runner.boundary:
            if self._update is not update:
                return
            self._runner.reweigh(update.weights, update.version, recompute=self._recompute)
            self._close(update)
            self.pause_seconds = time.monotonic() - update.paused_at
        await self._announce(update.version)

    async def _give_up(self, update: _Update) -> None:
        async with self._runner.boundary:
            if self._update is update:
                self._close(update)

    def _close(self, update: _Update) -> None:
        self._update = None
        update.scope.cancel()
        update.settled.set()
        self._runner.resume()

    async def _settle(self, update: _Update) -> None:
        """Nobody will say what became of `update`: the queue knows."""
        if update.paused_at is not None and await self._committed(update.version):
            await self._take(update)
        else:
            await self._give_up(update)

    async def _await_verdict(self, update: _Update) -> None:
        """A learner that dies between Apply and Resume must not leave the engine paused.

        consumes: nothing. produces: a verdict. waits for: Resume or Abort, at most the update's seconds.
        unblocked by: either, or that deadline, after which the queue's record decides.
        """
        with trio.move_on_after(update.prepare.seconds):
            await update.settled.wait()
        if not update.settled.is_set():
            await self._settle(update)


def _receive_buckets(request: Prepare, circle: Circle, device: torch.device) -> dict[str, torch.Tensor]:
    """Take part in every broadcast, even after a wrong digest: the other members of the group wait for this one."""
    version = request.manifest.version
    tensors: dict[str, torch.Tensor] = {}
    wrong: list[str] = []
    try:
        group = circle.join(request.store, request.group, request.rank, request.world, request.backend, request.seconds)
        for index, bucket in enumerate(request.manifest.buckets):
            buffer = torch.empty(bucket.bytes, dtype=torch.uint8, device=device)
            group.broadcast(buffer)
            if (digest := buffer_digest(buffer)) != bucket.digest:
                wrong.append(f"bucket {index}: expected {bucket.digest[:16]}, got {digest[:16]}")
            else:
                tensors |= unpack(bucket.tensors, buffer)
    except (RuntimeError, DeadlineExceeded) as error:  # torch.distributed has no narrower base for a lost or late peer
        circle.leave(request.group)
        raise WeightError(f"the transfer of version {version} broke: {error}") from error
    if wrong:
        raise WeightError(f"version {version} arrived with other bytes than were sent: {'; '.join(wrong)}")
    return tensors
