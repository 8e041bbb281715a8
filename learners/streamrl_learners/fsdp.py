"""Sharding the policy over the learner's ranks with FSDP2."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .model import Policy, state_names
from .ranks import Ranks


def shard(policy: Policy, ranks: Ranks, device: str) -> Policy:
    """Shard `policy` in place, one unit per decoder layer and one for the rest; alone, only move it to `device`.

    Gradients are summed over ranks, not averaged: the step divides once, by what all ranks counted. Every
    forward and backward is a collective, so ranks take the same number of micro-batches.
    """
    policy.to(device)
    if ranks.world == 1:
        return policy
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device, (ranks.world,))
    for layer in policy.lm.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # Gloo has no pre-multiplied sum: a plain sum and a factor of 1 is what it can do.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return policy


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded. Collective where it is."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(lm: nn.Module, names: Iterable[str] | None = None, *, keep: bool) -> dict[str, Tensor]:
    """Copies of the named tensors (default: all) in host memory, on the ranks that `keep` them. Collective."""
    own = state_names(lm)
    found: dict[str, Tensor] = {}
    for name in own if names is None else names:
        full = whole(own[name].detach())
        if keep:
            found[name] = full.to("cpu", copy=True).contiguous()
    return found


def device_of(policy: nn.Module) -> torch.device:
    return next(policy.parameters()).device
