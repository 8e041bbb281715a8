"""The weights after a step, packed in host memory, and a probe that tells whether somebody else has them."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

import torch
from torch import Tensor

from streamrl_queue.weights import Bucket, Manifest, Probe, TensorSpec, buffer_digest, pack, plan, spec_bytes

from .fsdp import device_of, gather
from .model import Policy, sequence_logprobs, state_names
from .ranks import Ranks

# Long enough that a wrong layer, norm, head or rotary base moves some log-prob; short enough to cost nothing.
PROBE_TOKENS: Final = 24


class Snapshot(NamedTuple):
    """All tensors after `step`, in `buckets`; `buffers[i]` holds the bytes of `buckets[i]`."""

    step: int
    buckets: tuple[Bucket, ...]
    buffers: tuple[Tensor, ...]
    probe: Probe

    def manifest(self, version: int, parent: int | None) -> Manifest:
        return Manifest(version=version, step=self.step, parent=parent, buckets=self.buckets)

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(bucket.digest for bucket in self.buckets)

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self.buckets)


def take(policy: Policy, step: int, ranks: Ranks) -> Snapshot | None:
    """The weights as they are now, on the leader; None on other ranks.

    Collective, bucket by bucket: host memory holds the packed buckets and the tensors of one. Nothing may train
    meanwhile.
    """
    probe = make_probe(policy)
    buckets, buffers = list[Bucket](), list[Tensor]()
    for group in plan(specs_of(policy)):
        tensors = gather(policy.lm, [spec.name for spec in group], keep=ranks.leads)
        if ranks.leads:
            buffers.append(pack(group, tensors))
            size = sum(map(spec_bytes, group))
            buckets.append(Bucket(tensors=group, bytes=size, digest=buffer_digest(buffers[-1])))
    return Snapshot(step, tuple(buckets), tuple(buffers), probe) if ranks.leads else None


def specs_of(policy: Policy) -> list[TensorSpec]:
    """Name, type and whole shape of every tensor that is published, in the model's order."""
    return [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in state_names(policy.lm).items()
    ]


def make_probe(policy: Policy) -> Probe:
    """A fixed pseudo-random sequence over the whole vocabulary and the policy's log-probs of it. Collective."""
    tokens = probe_tokens(policy.vocab_size)
    with torch.no_grad():
        logprobs = sequence_logprobs(policy, torch.tensor(tokens, device=device_of(policy)))
    return Probe(tokens=tokens, logprobs=tuple(logprobs.double().tolist()))


def probe_tokens(vocab_size: int) -> tuple[int, ...]:
    rng = random.Random("streamrl probe")
    return tuple(rng.randrange(vocab_size) for _ in range(PROBE_TOKENS))
