"""Supervised steps on the environment's own demonstrations, so that there are rewards to learn from."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from streamrl_queue.schema import Segment

from .algorithms.pieces import Algorithm
from .batches import MicroBatch, Row, micro_batch
from .config import WarmStart
from .model import Policy, token_logprobs

# One scripted episode: ids and mask `[tokens]` (1 on what the policy would sample); True asks for a sloppy one.
Demonstrate: TypeAlias = Callable[[random.Random, bool], tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]

RAMP_STEPS: Final = 20
BETAS: Final = (0.9, 0.98)
WEIGHT_DECAY: Final = 0.01
MAX_GRAD_NORM: Final = 1.0
FLOOR: Final = 0.1


def warm_start(
    policy: Policy,
    demonstrate: Demonstrate,
    config: WarmStart,
    seed: int,
    report: Callable[[str], None] = lambda activity: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Train `policy` in place on clean, then on sloppy demonstrations; the mean loss of each step, nats per token.

    `report` is told what is being done. After a stop request the rest is left out.
    """
    steps = config.clean_steps + config.sloppy_steps
    rng = random.Random(f"warm start {seed}")
    adamw = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    losses = []
    for step in range(steps):
        if should_stop():
            break
        report(f"warm start, step {step + 1} of {steps}")
        sloppy = step >= config.clean_steps
        micro = demonstrations([demonstrate(rng, sloppy) for _ in range(config.batch)])
        loss = -token_logprobs(policy, micro).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
        for group in adamw.param_groups:
            group["lr"] = config.learning_rate * schedule(step, steps)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


def schedule(step: int, steps: int) -> float:
    """The share of the peak learning rate at step 0, 1, …: a linear ramp, times a cosine down to FLOOR."""
    ramp = min(1.0, (step + 1) / RAMP_STEPS)
    return ramp * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def demonstrations(episodes: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]) -> MicroBatch:
    """Scripted episodes as one micro-batch; nobody sampled them, so there are no behaviour log-probs."""
    return micro_batch(
        [
            Row(
                id=number,
                tokens=ids,
                mask=mask,
                logprobs=np.full(len(ids), np.nan, np.float32),
                spans=(),
                segments=(Segment(0, len(ids)),),
                temperature=1.0,
                reward=math.nan,
                advantage=math.nan,
                lags=np.zeros(len(ids), np.int64),
            )
            for number, (ids, mask) in enumerate(episodes)
        ],
        Algorithm(),
    )
