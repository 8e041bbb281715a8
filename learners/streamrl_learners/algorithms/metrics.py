"""What a step tells about itself, as sums that add up over micro-batches and ranks, whatever their sizes."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from ..config import AlgorithmConfig
from ..ranks import Ranks
from .corrections import bounded_exp, saturated
from .losses import clip_range

SUMS: Final = (
    # of sampled tokens that were computed
    "computed", "loss", "k3", "clipped", "ratio", "ratio_squared", "saturated",
    # of all rows of the step
    "rows", "weight", "sampled_tokens", "tokens", "reward", "lag", "signal_rows", "empty_rows",
)  # fmt: skip
MAXIMA: Final = ("ratio_max", "lag_max", "tokens_max")


class Tally:
    """Sums and maxima of one step, filled by the stream (rows) and the objective (tokens)."""

    def __init__(self) -> None:
        self.sums = dict.fromkeys(SUMS, 0.0)
        self.maxima = dict.fromkeys(MAXIMA, 0.0)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.sums[name] += value

    def highest(self, **values: float) -> None:
        for name, value in values.items():
            # Written so that a NaN stays.
            self.maxima[name] = self.maxima[name] if value <= self.maxima[name] else value

    def take(self, ranks: Ranks) -> Tally:
        """What all ranks counted together; this tally starts at zero again. Collective."""
        total = Tally()
        total.sums = dict(zip(SUMS, ranks.summed(list(self.sums.values())), strict=True))
        total.maxima = dict(zip(MAXIMA, ranks.highest(list(self.maxima.values())), strict=True))
        self.sums, self.maxima = dict.fromkeys(SUMS, 0.0), dict.fromkeys(MAXIMA, 0.0)
        return total

    def summary(self) -> dict[str, float]:
        """The step's metrics as means; 0 where nothing was counted, never 0/0."""
        s, m = self.sums, self.maxima
        tokens, rows = max(s["computed"], 1.0), max(s["rows"], 1.0)
        return {
            "loss": _share(s["loss"], s["weight"]),
            "kl": s["k3"] / tokens,
            "clip_share": s["clipped"] / tokens,
            "ratio_mean": s["ratio"] / tokens,
            "ratio_max": m["ratio_max"],
            "ess": _share(s["ratio"] ** 2, s["computed"] * s["ratio_squared"]),
            "saturated": s["saturated"],
            "rows": s["rows"],
            "signal_share": s["signal_rows"] / rows,
            "empty_rows": s["empty_rows"],
            "reward_mean": s["reward"] / rows,
            "lag_mean": s["lag"] / rows,
            "lag_max": m["lag_max"],
            "tokens": s["tokens"],
            "sampled_tokens": s["sampled_tokens"],
            "length_mean": s["tokens"] / rows,
            "length_max": m["tokens_max"],
        }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0 if math.isfinite(part) else part


def observe(tally: Tally, config: AlgorithmConfig, to_behaviour: Tensor, log_ratio: Tensor, advantages: Tensor) -> None:
    """Add what the ratios of one micro-batch tell; all `[tokens]`, nats, without gradient.

    `to_behaviour` is log pi - log pi_behaviour, `log_ratio` the one that went into the loss. KL is Schulman's
    k3 estimator of KL(behaviour || pi), r - 1 - log r (http://joschu.net/blog/kl-approx.html); the effective
    sample size is (sum r)^2 / (n sum r^2) (Kong 1992), a share of the tokens.
    """
    if not len(to_behaviour):
        return
    ratio, used = bounded_exp(to_behaviour).double(), bounded_exp(log_ratio)
    low, high = clip_range(config)
    clipped = ((used > high) & (advantages > 0)) | ((used < low) & (advantages < 0))
    sums = (ratio - 1 - ratio.log(), clipped, ratio, ratio.square(), saturated(to_behaviour))
    # One transfer from the device for all of them.
    values = torch.stack([*(s.double().sum() for s in sums), ratio.max()]).tolist()
    names = ("k3", "clipped", "ratio", "ratio_squared", "saturated")
    tally.add(computed=len(ratio), **dict(zip(names, values, strict=False)))
    tally.highest(ratio_max=values[-1])
