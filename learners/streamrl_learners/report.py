"""One dict of metrics per step, for `metrics.jsonl` and for the heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from .ranks import Ranks

if TYPE_CHECKING:
    from streamrl_queue import BlockingTransferQueue

    from .publisher import Publisher

Emit: TypeAlias = Callable[[dict[str, Any]], None]

# What the panel shows, by the names of its gauges.
GAUGES = {
    "step": "step",
    "reward": "reward_mean",
    "lag_mean": "lag_mean",
    "lag_max": "lag_max",
    "idle_share": "idle_share",
    "tokens_per_second": "tokens_per_second",
}


class Reporter:
    """Tells about finished steps; silent on ranks that do not lead."""

    def __init__(
        self,
        queue: BlockingTransferQueue,
        publisher: Publisher,
        emit: Emit,
        ranks: Ranks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._publisher = publisher
        self._emit = emit
        self._ranks = ranks
        self._clock = clock
        self._since = clock()

    def step(self, step: int, report: dict[str, float], *, idle_seconds: float) -> None:
        """Emit the metrics of `step`: the report, its times, and the version committed last.

        `idle_share` is the time spent waiting, for rows (`idle_seconds`) or for the publish before.
        """
        now = self._clock()
        seconds, self._since = max(now - self._since, 1e-9), now
        if not self._ranks.leads:
            return
        metrics = {"step": step} | report
        metrics["seconds"] = seconds
        metrics["publish_wait_seconds"] = self._publisher.waited_seconds
        metrics["idle_share"] = min(1.0, (idle_seconds + self._publisher.waited_seconds) / seconds)
        metrics["tokens_per_second"] = report["tokens"] / seconds
        if published := self._publisher.last:
            metrics |= {
                "version": published.version,
                "version_step": published.step,
                "engines": published.engines,
                "publish_seconds": published.seconds,
                "pause_seconds": published.pause_seconds,
            }
        self._queue.report(None, **{gauge: float(metrics[name]) for gauge, name in GAUGES.items()})
        self._emit(metrics)
