"""Sampling by inverse CDF, with the log-probs of the distribution that was really sampled from.

Random numbers are a function of (seed, position): a seeded request gets the same ones whatever is batched with it,
in how many slices it is sampled and on which engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Settings:
    """Sampling settings by row, each `[rows]`; temperature 0 is greedy, top_p 1 and top_k 0 are off."""

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Numbers in [0, 1) from (seed, position), `[rows]`: the output function of SplitMix64 (Steele et al., 2014)."""
    z = seeds + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    # 24 bits: the largest value, 1 - 2^-24, is a float32 and stays below 1.
    drawn: npt.NDArray[np.float32] = (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return drawn


def sample(logits: Tensor, settings: Settings, random: npt.NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Sample one token per row of `logits` `[rows, vocab]` -> (tokens `[rows]`, log-probs `[rows]` in nats).

    The log-prob is that of the token under the temperature-scaled distribution, renormalised over what top-k and
    then top-p left; greedy rows report the log-prob at temperature 1.
    """
    greedy = settings.temperature == 0
    logprobs = distribution(logits, settings, greedy)
    cumulative = logprobs.exp().cumsum(-1)
    draws = _column(random, logits.device) * cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the draw: never one of probability 0.
    tokens = torch.searchsorted(cumulative, draws, right=True).clamp_(max=logits.shape[1] - 1)
    if greedy.any():
        chosen = _column(greedy, logits.device)
        tokens = torch.where(chosen, logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def distribution(logits: Tensor, settings: Settings, greedy: npt.NDArray[np.bool_]) -> Tensor:
    """Log-probs `[rows, vocab]` of what is sampled from; minus infinity where top-k or top-p cut."""
    if (settings.temperature != 1).any():
        logits = logits / _column(np.where(greedy, np.float32(1), settings.temperature), logits.device)
    cut = np.flatnonzero(((settings.top_p < 1) | (settings.top_k > 0)) & ~greedy)
    if len(cut):
        rows = torch.from_numpy(cut).to(logits.device)
        kept = _cut(logits[rows], settings.top_p[cut], settings.top_k[cut])
        logits = logits.index_copy(0, rows, kept)
    return logits.log_softmax(-1)


def _cut(logits: Tensor, top_p: npt.NDArray[np.float32], top_k: npt.NDArray[np.int64]) -> Tensor:
    """`logits` with minus infinity outside the `top_k` best and, of those, outside the nucleus of mass `top_p`."""
    ranked, order = logits.sort(stable=True, dim=-1, descending=True)
    limit = _column(np.where(top_k > 0, top_k, logits.shape[1]), logits.device)
    ranked = ranked.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= limit, -torch.inf)
    probabilities = ranked.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # The best token has nothing before it and always stays.
    outside = before >= _column(top_p, logits.device)
    outside[:, 0] = False
    return torch.empty_like(logits).scatter_(1, order, ranked.masked_fill(outside, -torch.inf))


def _column(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)[:, None]
