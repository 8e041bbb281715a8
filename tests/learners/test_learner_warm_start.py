"""A warm start teaches what the demonstrations show, clean ones first."""

from __future__ import annotations

import random

import numpy as np
import torch
from learner_fakes import make_policy

from streamrl_learners.config import WarmStart
from streamrl_learners.model import sequence_logprobs
from streamrl_learners.warm_start import schedule, warm_start

CLEAN = (np.array([2, 3, 4, 5, 6], np.int32), np.array([0, 0, 1, 1, 1], np.uint8))
SLOPPY = (np.array([2, 3, 9, 9, 9], np.int32), np.array([0, 0, 1, 1, 1], np.uint8))


def test_demonstrations_become_likely():
    policy = make_policy()
    losses = warm_start(policy, lambda rng, sloppy: CLEAN, WarmStart(clean_steps=60, sloppy_steps=0, batch=2), seed=0)
    assert losses[-1] < 0.5 * losses[0]
    with torch.no_grad():
        assert float(sequence_logprobs(policy, torch.tensor([2, 3, 4, 5, 6]))[1:].mean()) > -1.5


def test_clean_demonstrations_come_before_sloppy_ones():
    asked: list[bool] = []

    def demonstrate(rng: random.Random, sloppy: bool):
        asked.append(sloppy)
        return SLOPPY if sloppy else CLEAN

    warm_start(make_policy(), demonstrate, WarmStart(clean_steps=2, sloppy_steps=1, batch=3), seed=0)
    assert asked == [False] * 6 + [True] * 3


def test_a_seed_repeats_the_warm_start():
    def demonstrate(rng: random.Random, sloppy: bool):
        return CLEAN if rng.random() < 0.5 else SLOPPY

    runs = [warm_start(make_policy(), demonstrate, WarmStart(clean_steps=3, sloppy_steps=0), seed=7) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_stop_request_ends_it():
    steps: list[str] = []
    config = WarmStart(clean_steps=50, sloppy_steps=0, batch=1)
    losses = warm_start(make_policy(), lambda rng, sloppy: CLEAN, config, 0, steps.append, lambda: len(steps) >= 2)
    assert len(losses) == 2
    assert steps[-1] == "warm start, step 2 of 50"


def test_the_learning_rate_ramps_up_and_falls_to_a_tenth():
    rates = [schedule(step, 150) for step in range(150)]
    assert rates[0] < 0.06
    assert rates[-1] < 0.11
    assert max(rates) == rates[19]
