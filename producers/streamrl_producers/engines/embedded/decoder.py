"""The forward pass of a Qwen2- or Llama-style model with a KV cache by slot, straight on torch.

Weights come by their Hugging Face names; no module tree, no autograd. Shapes in the comments: `n` flat tokens of a
step, `m` rows of a group, `w` queries per row, `t` attended positions, `d` hidden size, `K` KV heads, `G` query heads
per KV head, `D` head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from streamrl_queue.errors import WeightError

from .architecture import EMBEDDING, HEAD, Architecture
from .plan import Group, Plan, plan


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, with projections of the same input joined into one matrix."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of one version. Immutable: an update builds another one."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor

    @classmethod
    def build(
        cls, architecture: Architecture, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: str
    ) -> Weights:
        """Weights from `tensors` by Hugging Face name.

        Raises:
            WeightError: missing, unexpected or wrongly shaped tensors, by name; a tied head that differs.
        """
        architecture.check((name, tuple(tensor.shape)) for name, tensor in tensors.items())
        if architecture.tied and HEAD in tensors and not torch.equal(tensors[HEAD], tensors[EMBEDDING]):
            raise WeightError(f"{HEAD} is tied to {EMBEDDING} in this model, but their values differ")
        ours = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
        layers = tuple(_layer(ours, f"model.layers.{i}.") for i in range(architecture.layers))
        head = ours[EMBEDDING if architecture.tied else HEAD]
        return cls(ours[EMBEDDING], layers, ours["model.norm.weight"], head)


def _layer(tensors: Mapping[str, Tensor], prefix: str) -> Layer:
    def joined(pattern: str, names: str) -> Tensor:
        return torch.cat([tensors[prefix + pattern.format(name)] for name in names.split()])

    bias = f"{prefix}self_attn.q_proj.bias" in tensors
    return Layer(
        tensors[f"{prefix}input_layernorm.weight"],
        joined("self_attn.{}_proj.weight", "q k v"),
        joined("self_attn.{}_proj.bias", "q k v") if bias else None,
        tensors[f"{prefix}self_attn.o_proj.weight"],
        tensors[f"{prefix}post_attention_layernorm.weight"],
        joined("mlp.{}_proj.weight", "gate up"),
        tensors[f"{prefix}mlp.down_proj.weight"],
    )


@dataclass(frozen=True, slots=True)
class _View:
    """A group on the device. `mask` `[m, 1, w, 1, t]` is 0 or minus infinity."""

    group: Group
    slots: Tensor
    mask: Tensor
    pad: Tensor | None
    unpad: Tensor | None


class Decoder:
    """KV cache of `slots` rows of `context` positions, and the forward pass over it.

    The cache is `[layers, slots, K, context, 2 * D]`, keys and values side by side so that one index fetches both.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        slots: int,
        context: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        a = self.architecture = architecture
        self.slots, self.context, self.device = slots, context, torch.device(device)
        self.weights: Weights | None = None
        self._dtype = dtype
        self._cache = torch.zeros(a.layers, slots, a.kv_heads, context, 2 * a.head_dim, dtype=dtype, device=device)
        frequencies = a.rope_theta ** (-torch.arange(0, a.head_dim, 2, dtype=torch.float32) / a.head_dim)
        angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
        angles = torch.cat([angles, angles], -1)[:, None]
        self._cos, self._sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)  # [context, 1, D]
        self._positions = torch.arange(context, device=device)

    def __repr__(self) -> str:
        a = self.architecture
        return f"Decoder({a.layers} layers of {a.hidden}, {self.slots} slots of {self.context}, {self.device})"

    def build(self, tensors: Mapping[str, Tensor]) -> Weights:
        """Weights of this decoder's type and device; raises WeightError (see `Weights.build`)."""
        return Weights.build(self.architecture, tensors, self._dtype, str(self.device))

    def clear(self, slot: int) -> None:
        """Zero the cache of `slot`."""
        self._cache[:, slot].zero_()

    @torch.inference_mode()
    def forward(self, step: Plan, tokens: npt.NDArray[np.int32], rows: npt.NDArray[np.int64]) -> Tensor:
        """Forward the flat `tokens` `[n]` of `step`, extend the cache, return float32 logits `[len(rows), vocab]`
        after the flat tokens `rows`.
        """
        weights = self.weights
        assert weights is not None, "forward needs weights"
        a = self.architecture
        views = [self._view(group) for group in step.groups]
        where = self._index((step.slots[:, None] * a.kv_heads + np.arange(a.kv_heads)) * self.context)
        positions = self._index(step.positions)
        where = (where + positions[:, None]).view(-1)
        cos, sin = self._cos[positions], self._sin[positions]
        x = F.embedding(self._index(tokens), weights.embedding)
        for cache, layer in zip(self._cache, weights.layers, strict=True):
            x = x + F.linear(self._attend(x, layer, cache, where, cos, sin, views), layer.out)
            hidden = F.rms_norm(x, (a.hidden,), layer.mlp_norm, a.epsilon)
            gate, up = F.linear(hidden, layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        x = F.rms_norm(x[self._index(rows)], (a.hidden,), weights.norm, a.epsilon)
        return F.linear(x, weights.head).float()

    def _attend(
        self, x: Tensor, layer: Layer, cache: Tensor, where: Tensor, cos: Tensor, sin: Tensor, views: list[_View]
    ) -> Tensor:
        a = self.architecture
        n, split = len(x), a.heads + a.kv_heads
        normed = F.rms_norm(x, (a.hidden,), layer.norm, a.epsilon)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(n, split + a.kv_heads, a.head_dim)
        first, second = qkv[:, :split].chunk(2, -1)
        rotated = qkv[:, :split] * cos + torch.cat([-second, first], -1) * sin
        kv = torch.cat([rotated[:, a.heads :], qkv[:, split:]], -1)  # [n, K, 2 D]
        cache.view(-1, 2 * a.head_dim).index_copy_(0, where, kv.view(-1, 2 * a.head_dim))
        query = rotated[:, : a.heads] * a.head_dim**-0.5
        parts = [self._attend_group(query[v.group.start : v.group.end], cache, v) for v in views]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_group(self, query: Tensor, cache: Tensor, view: _View) -> Tensor:
        """Attention of the group's queries `[end - start, heads, D]` -> `[end - start, heads * D]`.

        The query heads that share a KV head become rows of one small matrix product.
        """
        a = self.architecture
        m, w, t = len(view.slots), view.group.width, view.mask.shape[-1]
        shape = (m, w, a.kv_heads, a.heads // a.kv_heads, a.head_dim)
        if view.pad is not None:
            query = query.index_select(0, view.pad)
        query = query.reshape(shape).transpose(1, 2).reshape(m * a.kv_heads, -1, a.head_dim)
        kv = cache[:, :, :t].index_select(0, view.slots).view(m * a.kv_heads, t, 2 * a.head_dim)
        scores = torch.bmm(query, kv[..., : a.head_dim].transpose(1, 2)).view(m, a.kv_heads, w, -1, t)
        scores = (scores + view.mask).softmax(-1, dtype=torch.float32).to(kv.dtype)
        mixed = torch.bmm(scores.view(m * a.kv_heads, -1, t), kv[..., a.head_dim :])
        mixed = mixed.view(m, a.kv_heads, w, -1).transpose(1, 2).reshape(m * w, -1)
        return mixed if view.unpad is None else mixed.index_select(0, view.unpad)

    def _view(self, group: Group) -> _View:
        m, t = len(group.slots), group.longest
        hidden = self._positions[:t] > self._index(group.positions)[..., None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        pad = None if group.pad is None else self._index(group.pad)
        unpad = None if group.unpad is None else self._index(group.unpad)
        return _View(group, self._index(group.slots), mask.view(m, 1, group.width, 1, t), pad, unpad)

    def _index(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def logprobs(self, tokens: npt.NDArray[np.int32], weights: Weights) -> npt.NDArray[np.float32]:
        """Log-probs `[n - 1]` in nats of `tokens[1:]` under `weights` at temperature 1, without any cached state.

        Uses a scratch decoder of one slot: neither the cache nor running requests are touched.
        """
        n = len(tokens)
        scratch = Decoder(self.architecture, slots=1, context=n, dtype=self._dtype, device=str(self.device))
        scratch.weights = weights
        whole = plan(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, n))
        logits = scratch.forward(whole, tokens, np.arange(n - 1))
        chosen = logits.log_softmax(-1).gather(1, self._index(tokens[1:].astype(np.int64))[:, None])
        found: npt.NDArray[np.float32] = chosen[:, 0].cpu().numpy()
        return found
