"""Receiving weights while requests run: prepare, receive, apply, then resume or abort.

At most one update is under way. `WeightReceiver` keeps the order of things; what loading, taking and giving up mean
is the engine's own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

import torch
import trio

from streamrl_queue.errors import DeadlineExceeded, WeightError
from streamrl_queue.weights import (
    Abort,
    Aborted,
    Applied,
    Apply,
    Circle,
    Manifest,
    Prepare,
    Prepared,
    Probe,
    Resume,
    Resumed,
    buffer_digest,
    unpack,
)


class Update:
    """One version on its way in."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare
        self.version = prepare.manifest.version
        self.scope = trio.CancelScope()
        self.received = trio.Event()
        self.tensors: dict[str, torch.Tensor] = {}
        self.error: WeightError | None = None
        # What the engine made of the tensors.
        self.staged: Any = None
        self.paused_at: float | None = None
        self.settled = trio.Event()


class WeightReceiver(ABC):
    """The engine's side of a publish.

    `boundary` is held while sampling stops and starts. `committed(version)` asks the queue whether a version exists;
    `announce(version)` tells it that this engine now samples from it.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        boundary: trio.Lock,
        device: torch.device,
        *,
        committed: Callable[[int], Awaitable[bool]],
        announce: Callable[[int], Awaitable[None]],
    ) -> None:
        self._nursery, self._boundary, self._device = nursery, boundary, device
        self._committed, self._announce = committed, announce
        self._circle = Circle()
        self._update: Update | None = None
        self.pause_seconds = 0.0

    @property
    @abstractmethod
    def version(self) -> int | None:
        """The version that is sampled from."""

    @abstractmethod
    def check(self, manifest: Manifest) -> None:
        """Raises WeightError when a version cannot fit, with the tensors by name."""

    @abstractmethod
    async def load(self, update: Update, probe: Probe) -> float:
        """Bring the received tensors in, call `paused` once sampling stands still, and return the probe's error in
        nats. Sampling stands still afterwards. A repeated call repeats only the probe.
        """

    @abstractmethod
    async def take(self, update: Update) -> None:
        """Sample from what was loaded. The boundary is held."""

    @abstractmethod
    async def give_up(self, update: Update) -> None:
        """Sample from what there was before, however far `load` came. The boundary is held."""

    async def prepare(self, request: Prepare) -> Prepared:
        """Check the manifest against the model and start to receive. An unfinished older update is settled first.

        The version that is sampled from may be sent again: that is how a doubtful engine is repaired.

        Raises:
            WeightError: missing, unexpected or wrongly shaped tensors, by name.
        """
        self.check(request.manifest)
        if self._update is not None:
            await self._settle(self._update)
        update = self._update = Update(request)
        self._nursery.start_soon(self._receive, update)
        return Prepared()

    async def _receive(self, update: Update) -> None:
        """consumes: one broadcast per bucket. produces: staged tensors. waits for: the learner, at most the
        update's seconds per bucket. unblocked by: its broadcasts, or `abort`.
        """
        with update.scope:
            try:
                update.tensors = await trio.to_thread.run_sync(
                    _receive_buckets, update.prepare, self._circle, self._device, abandon_on_cancel=True
                )
            except WeightError as error:
                update.error = error
        update.received.set()

    async def apply(self, request: Apply) -> Applied:
        """Wait for all buckets, load and probe the weights, and leave sampling paused.

        Raises:
            DeadlineExceeded: buckets are missing after the update's seconds.
            WeightError: digests or names are wrong, the transfer broke, or another version was prepared.
        """
        update = self.expect(request.version)
        with trio.move_on_after(update.prepare.seconds):
            await update.received.wait()
        if not update.received.is_set():
            raise DeadlineExceeded.waiting(
                f"the buckets of version {update.version}", "learner", update.prepare.seconds
            )
        if update.error is not None:
            raise update.error
        error = await self.load(update, request.probe)
        digests = tuple(bucket.digest for bucket in update.prepare.manifest.buckets)
        return Applied(update.version, digests, error)

    def paused(self, update: Update) -> None:
        """Sampling stands still for `update` from now on, until a verdict."""
        update.paused_at = time.monotonic()
        self._nursery.start_soon(self._await_verdict, update)

    async def resume(self, request: Resume) -> Resumed:
        """The version is committed: sample from it. Repeating it is harmless."""
        if self._update is None and self.version == request.version:
            return Resumed(self.pause_seconds)
        update = self.expect(request.version)
        if update.paused_at is None:
            raise WeightError(f"version {request.version} was not applied; send Apply before Resume")
        await self._take(update)
        if self.version != request.version:
            raise WeightError(f"version {request.version} was aborted while it was resumed")
        return Resumed(self.pause_seconds)

    async def abort(self, request: Abort) -> Aborted:
        """The version will not exist: sample on with the weights before it. Repeating it is harmless."""
        if self._update is not None and self._update.version == request.version:
            await self._give_up(self._update)
        elif self.version == request.version:
            raise WeightError(f"version {request.version} was resumed and is sampled from; it cannot be aborted")
        return Aborted()

    def expect(self, version: int) -> Update:
        """The update under way.

        Raises:
            WeightError: it is of another version.
        """
        if self._update is None or self._update.version != version:
            here = "none" if self._update is None else f"version {self._update.version}"
            raise WeightError(f"version {version} was not prepared here; prepared: {here}")
        return self._update

    async def _take(self, update: Update) -> None:
        assert update.paused_at is not None
        async with self._boundary:
            if self._update is not update:
                return
            await self.take(update)
            self._close(update)
            self.pause_seconds = time.monotonic() - update.paused_at
        await self._announce(update.version)

    async def _give_up(self, update: Update) -> None:
        async with self._boundary:
            if self._update is update:
                await self.give_up(update)
                self._close(update)

    def _close(self, update: Update) -> None:
        self._update = None
        update.scope.cancel()
        update.settled.set()

    async def _settle(self, update: Update) -> None:
        """Nobody will say what became of `update`: the queue knows."""
        if update.paused_at is not None and await self._committed(update.version):
            await self._take(update)
        else:
            await self._give_up(update)

    async def _await_verdict(self, update: Update) -> None:
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
