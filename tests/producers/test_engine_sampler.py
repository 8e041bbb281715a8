"""Reported log-probs are those of the distribution that was sampled from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from streamrl_producers.engines.embedded.sampler import Settings, sample, uniform


def settings(rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Settings:
    return Settings(
        np.full(rows, temperature, np.float32), np.full(rows, top_p, np.float32), np.full(rows, top_k, np.int64)
    )


def truncated(logits: list[float], temperature: float, top_p: float, top_k: int) -> list[float]:
    """Probabilities by a direct transcription: scale, take the k best, then the nucleus, renormalise."""
    weights = [math.exp(x / temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: -weights[i])[: top_k or None]
    total, mass, kept = sum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        if mass < top_p or not kept:
            kept.append(i)
        mass += weights[i] / total
    norm = sum(weights[i] for i in kept)
    return [weights[i] / norm if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.6, 1.0, 0), (0.6, 0.9, 0), (1.0, 1.0, 3), (1.7, 0.8, 4), (1.0, 0.01, 0)]
)
def test_tokens_come_as_often_as_their_logprob_says(temperature: float, top_p: float, top_k: int) -> None:
    logits, n = [1.5, -0.4, 0.3, 2.1, -1.0], 40_000
    expected = truncated(logits, temperature, top_p, top_k)
    rows = torch.tensor(logits).repeat(n, 1)
    random = np.random.default_rng(0).random(n, np.float32)
    tokens, logprobs = sample(rows, settings(n, temperature, top_p, top_k), random)
    for token, probability in enumerate(expected):
        drawn = tokens == token
        assert abs(float(drawn.float().mean()) - probability) < 4 * math.sqrt(0.25 / n)
        if probability:
            assert logprobs[drawn].exp().sub(probability).abs().max() < 1e-6
        else:
            assert not drawn.any()


def test_greedy_takes_the_best_token_and_reports_its_logprob_at_temperature_one() -> None:
    logits = torch.tensor([[0.2, 1.4, -3.0], [2.0, 0.0, 1.0]])
    tokens, logprobs = sample(logits, settings(2, 0.0, 0.5, 1), np.array([0.99, 0.0], np.float32))
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_rows_of_one_batch_keep_their_own_settings() -> None:
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(0))
    mixed = Settings(np.array([0, 1, 0.6, 2], np.float32), np.array([1, 1, 0.7, 1], np.float32), np.array([0, 0, 0, 2]))
    random = np.array([0.3, 0.9, 0.5, 0.999], np.float32)
    tokens, logprobs = sample(logits, mixed, random)
    for row in range(4):
        alone = Settings(mixed.temperature[row : row + 1], mixed.top_p[row : row + 1], mixed.top_k[row : row + 1])
        token, logprob = sample(logits[row : row + 1], alone, random[row : row + 1])
        assert int(token) == int(tokens[row])
        assert float(logprob) == pytest.approx(float(logprobs[row]))


@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-24])
def test_a_token_of_probability_zero_is_never_sampled(draw: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]])
    token, logprob = sample(logits, settings(1), np.array([draw], np.float32))
    assert int(token) in (1, 2)
    assert torch.isfinite(logprob).all()


def test_random_numbers_are_uniform_and_depend_on_seed_and_position_only() -> None:
    seeds, positions = np.full(50_000, 7, np.uint64), np.arange(50_000)
    drawn = uniform(seeds, positions)
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, 20, (0, 1))[0]
    assert abs(counts - 2500).max() < 5 * math.sqrt(2500)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02
    assert np.array_equal(uniform(seeds[:5], positions[:5]), drawn[:5])
    assert not np.array_equal(uniform(seeds[:5] + np.uint64(1), positions[:5]), drawn[:5])
