"""What a step tells about itself, as sums that add up over micro-batches and ranks, whatever their sizes."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..ranks import Ranks
from .penalties import divergence
from .sampled import LOG_RATIO_LIMIT, Sampled, bounded_exp, row_sum, saturated

# Lags that are told apart, in steps: 0, 1, … and in the last one all that are older.
LAGS: Final = 9
# Of sampled tokens that were computed, by lag.
BY_LAG: Final = ("computed", "k1", "k2", "k3", "clipped", "ratio", "ratio_squared")
SUMS: Final = (
    *(f"{name}/{lag}" for lag in range(LAGS) for name in BY_LAG),
    # of sampled tokens that were computed
    "saturated", "rejected", "masked", "signal", "rejected_weight", "rejected_rows", "entropy", "loss",
    # of all rows of the step
    "rows", "weight", "sampled_tokens", "tokens", "reward", "lag", "signal_rows", "empty_rows",
)  # fmt: skip
MAXIMA: Final = ("ratio_max", "lag_max", "tokens_max")


class Observed(NamedTuple):
    """What the objective found for each sampled token `[n]`, without gradient.

    `clipped`, `kept`: bool. `weight`: of the correction. `shares`: in the denominator. `entropy`: nats, if it was
    computed.
    """

    sampled: Sampled
    clipped: Tensor
    weight: Tensor
    kept: Tensor
    shares: Tensor
    entropy: Tensor | None = None


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

    @property
    def denominator(self) -> float:
        """What the step's summed gradients are divided by: the rows that were not rejected."""
        return self.sums["weight"] - self.sums["rejected_weight"]

    def summary(self) -> dict[str, float]:
        """The step's metrics as means; 0 where nothing was counted, never 0/0. `lag_1/…` is of tokens of lag 1."""
        s, m = self.sums, self.maxima
        lags = [{name: s[f"{name}/{lag}"] for name in BY_LAG} for lag in range(LAGS)]
        whole = {name: sum(one[name] for one in lags) for name in BY_LAG}
        tokens, rows = max(whole["computed"], 1.0), max(s["rows"], 1.0)
        return {
            "loss": _share(s["loss"], self.denominator),
            **_policy(whole),
            "ratio_max": m["ratio_max"],
            "saturated": s["saturated"],
            "rejected_rows": s["rejected_rows"],
            "rejected_share": s["rejected"] / tokens,
            "masked_share": s["masked"] / tokens,
            **({"entropy": s["entropy"] / tokens} if s["entropy"] else {}),
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
            **{
                f"lag_{lag}/{name}": value
                for lag, one in enumerate(lags)
                if one["computed"]
                for name, value in ({"tokens": one["computed"]} | _policy(one)).items()
            },
        }


def _policy(s: dict[str, float]) -> dict[str, float]:
    """How far the policy is from the one that sampled, from sums over tokens.

    `kl` is the k3 estimate of KL(mu || pi), nats. The effective sample size is (sum r)^2 / (n sum r^2) (Kong 1992), a
    share of the tokens.
    """
    tokens = max(s["computed"], 1.0)
    return {
        "kl": s["k3"] / tokens,
        "kl_k1": s["k1"] / tokens,
        "kl_k2": s["k2"] / tokens,
        "clip_share": s["clipped"] / tokens,
        "ratio_mean": s["ratio"] / tokens,
        "ess": _share(s["ratio"] ** 2, s["computed"] * s["ratio_squared"]),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0 if math.isfinite(part) else part


@torch.no_grad()
def observe(tally: Tally, found: Observed) -> None:
    """Add what one micro-batch tells."""
    sampled, kept = found.sampled, found.kept
    if not len(kept):
        return
    to_behaviour = sampled.log_ratio().double()
    log_ratio = to_behaviour.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio, kl = bounded_exp(log_ratio), divergence(log_ratio)
    columns = (torch.ones_like(ratio), kl.k1, kl.k2, kl.k3, found.clipped.double(), ratio, ratio.square())
    table = torch.zeros(LAGS, len(BY_LAG), dtype=torch.float64, device=ratio.device)
    table.index_add_(0, sampled.lags.clamp(max=LAGS - 1), torch.stack(columns, 1))
    masked = found.weight == 0
    others = {
        "saturated": saturated(to_behaviour),
        "rejected": ~kept,
        "rejected_rows": ~kept / row_sum(torch.ones_like(ratio), sampled.rows),
        "rejected_weight": ~kept * found.shares,
        "masked": kept & masked,
        "signal": kept & ~masked & (sampled.advantages != 0),
        "entropy": torch.zeros_like(ratio) if found.entropy is None else found.entropy,
    }
    sums = torch.stack([*(values.double().sum() for values in others.values()), ratio.max()])
    # One transfer from the device for all of them.
    *numbers, highest = torch.cat([table.flatten(), sums]).tolist()
    tally.add(**dict(zip((*SUMS[: LAGS * len(BY_LAG)], *others), numbers, strict=True)))
    tally.highest(ratio_max=highest)
