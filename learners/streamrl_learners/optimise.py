"""One optimiser step: divide the summed gradients once, clip, and move the weights."""

from __future__ import annotations

import math

import torch
from torch import nn

from streamrl_queue.errors import NoProgress, StreamRLError

from .algorithms.metrics import Tally
from .config import LearnerConfig
from .fsdp import whole
from .ranks import Ranks


class NotFinite(StreamRLError):
    """A loss or gradient that is NaN or infinite: the weights before it are good, those after it would not be."""


class Optimiser:
    """AdamW with linear warm-up and decay over the run's steps."""

    def __init__(self, policy: nn.Module, config: LearnerConfig, tally: Tally, ranks: Ranks) -> None:
        self._config = config
        self._tally = tally
        self._ranks = ranks
        self._parameters = [p for p in policy.parameters() if p.requires_grad]
        self.adamw = torch.optim.AdamW(
            self._parameters, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )

    def step(self, step: int) -> dict[str, float]:
        """Apply the gradients summed since the last step, and tell what the step looked like. Collective.

        A step in which no sampled token has an advantage, or none is left by rejection and masks, leaves weights and
        moments alone, whatever an entropy bonus asks for: `skipped` is 1.

        Raises:
            NotFinite: for a loss or gradient that is NaN or infinite, naming the step.
        """
        total = self._tally.take(self._ranks)
        report = total.summary() | {"skipped": 0.0, "grad_norm": 0.0, "learning_rate": self._schedule(step)}
        if not math.isfinite(total.sums["loss"]):
            raise NotFinite(
                f"step {step}: loss: expected a finite number, got {total.sums['loss']} {self._clues(report)}"
            )
        if total.sums["signal"]:
            report["grad_norm"] = self._apply(step, total.denominator, report)
        else:
            report["skipped"] = 1.0
        self.adamw.zero_grad(set_to_none=True)
        return report

    def _apply(self, step: int, weight: float, report: dict[str, float]) -> float:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        torch._foreach_div_(gradients, weight)
        norm = float(whole(nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)))
        if not math.isfinite(norm):
            raise NotFinite(f"step {step}: gradient norm: expected a finite number, got {norm} {self._clues(report)}")
        for group in self.adamw.param_groups:
            group["lr"] = report["learning_rate"]
        self.adamw.step()
        return norm

    def _schedule(self, step: int) -> float:
        """The learning rate of step 1, 2, …: up to the peak in `warmup_steps`, down to its share at the last step."""
        c = self._config
        warm = min(1.0, step / min(c.warmup_steps, c.steps)) if c.warmup_steps else 1.0
        return c.learning_rate * warm * (1 - (1 - c.final_learning_rate_share) * (step - 1) / c.steps)

    @staticmethod
    def _clues(report: dict[str, float]) -> str:
        names = ("kl", "ratio_max", "reward_mean", "sampled_tokens")
        return "(" + ", ".join(f"{name} {report[name]:.4g}" for name in names) + ")"


class Progress:
    """Ends a run that goes on without learning anything."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._fruitless: list[dict[str, float]] = []

    def note(self, step: int, report: dict[str, float]) -> None:
        """Count a step.

        Raises:
            NoProgress: when this is the `limit`-th step in a row without any signal, with the counts.
        """
        self._fruitless = [*self._fruitless, report] if report["skipped"] else []
        if len(self._fruitless) < self._limit:
            return
        rows = sum(r["rows"] for r in self._fruitless)
        empty = sum(r["empty_rows"] for r in self._fruitless)
        rejected = sum(r["rejected_rows"] for r in self._fruitless)
        signal = sum(r["rows"] * r["signal_share"] for r in self._fruitless)
        rewards = [r["reward_mean"] for r in self._fruitless]
        raise NoProgress(
            f"{self._limit} consecutive steps ({step - self._limit + 1} to {step}) produced no training signal: "
            f"{rows:.0f} rows, {rows - empty - signal:.0f} with advantage 0, {empty:.0f} without a sampled token, "
            f"{rejected:.0f} rejected; mean rewards {min(rewards):.3g} to {max(rewards):.3g}. Rewards of a group must "
            "differ: look at the task's difficulty and the reward function, or raise learner.no_signal_steps"
        )
