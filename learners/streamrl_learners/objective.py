"""What the learner minimises: advantages, a surrogate and a correction, as the configuration combines them."""

from __future__ import annotations

from torch import Tensor, nn

from .algorithms.corrections import correct
from .algorithms.losses import surrogate
from .algorithms.metrics import Tally, observe
from .batches import MicroBatch
from .config import AlgorithmConfig
from .model import token_logprobs


class Objective:
    """loss = -sum_t weight_t * w_t * L(ratio_t, A_t) over the sampled tokens of a micro-batch.

    A plain sum: the optimiser divides it once, by what the whole step counted, so that neither the order nor
    the size of micro-batches, nor the number of ranks, changes the gradient.
    """

    def __init__(self, config: AlgorithmConfig, tally: Tally) -> None:
        self.config = config
        self._tally = tally

    def loss(self, policy: nn.Module, micro: MicroBatch) -> Tensor:
        """The loss sum of `micro`, a scalar with gradient; 0 when nothing in it was sampled."""
        logprobs = token_logprobs(policy, micro)
        log_ratio, weight = correct(self.config.correction, logprobs, micro.behaviour)
        gains = surrogate(self.config, log_ratio, micro.advantages)
        loss = -(micro.weights * weight * gains).sum()
        to_behaviour = logprobs.detach() - micro.behaviour
        observe(self._tally, self.config, to_behaviour, log_ratio.detach(), micro.advantages)
        self._tally.add(loss=float(loss.detach()))
        return loss
