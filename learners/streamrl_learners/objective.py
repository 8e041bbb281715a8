"""What the learner minimises: the pieces of an algorithm, as the configuration combines them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .algorithms.corrections import correct
from .algorithms.losses import gain
from .algorithms.metrics import Observed, Tally, observe
from .algorithms.pieces import Algorithm
from .algorithms.rejections import keep
from .algorithms.sampled import Sampled
from .batches import MicroBatch
from .model import token_logprobs, token_logprobs_and_entropy


class Objective:
    """loss = -sum_t weight_t * kept_t * (w_t * L(ratio_t, A_t) + entropy * H_t) over sampled tokens of a micro-batch.

    A plain sum: the optimiser divides it once, by what the whole step counted less the rows that were rejected, so that
    neither the order nor the size of micro-batches, nor the number of ranks, changes the gradient.
    """

    def __init__(self, algorithm: Algorithm, tally: Tally) -> None:
        self.algorithm = algorithm
        self._tally = tally

    def loss(self, policy: nn.Module, micro: MicroBatch) -> Tensor:
        """The loss sum of `micro`, a scalar with gradient; 0 when nothing in it was sampled."""
        algorithm, entropy = self.algorithm, None
        if algorithm.entropy:
            logprobs, entropy = token_logprobs_and_entropy(policy, micro)
        else:
            logprobs = token_logprobs(policy, micro)
        sampled = Sampled(logprobs, micro.behaviour, micro.advantages, micro.rows, micro.lags)
        log_ratio, weight = correct(algorithm.correction, sampled)
        gains = gain(algorithm.loss, log_ratio, sampled)
        values = weight * gains.values
        if entropy is not None:
            values = values + algorithm.entropy * entropy
        kept = keep(algorithm.rejection, sampled) if algorithm.rejection else torch.ones_like(gains.clipped)
        loss = -(micro.weights * kept * values).sum()
        observe(self._tally, Observed(sampled, gains.clipped, weight, kept, micro.shares, entropy))
        self._tally.add(loss=float(loss.detach()))
        return loss
