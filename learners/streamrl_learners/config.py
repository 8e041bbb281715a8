"""The learner's part of a run's configuration. Imports without torch.

Every field is followed by a string that says what it means and in which unit: `streamrl config --explain`
prints it. Contradictions between fields are found by `problems`, before anything is started.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from streamrl_queue.bounds import COUNT, PROCESSES, SECONDS
from streamrl_queue.errors import ConfigError

from .algorithms import checks
from .algorithms.pieces import Algorithm

MOST: Final = int(COUNT[1])
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Count = Annotated[int, Meta(ge=0, le=MOST)]
Processes = Annotated[int, Meta(ge=int(PROCESSES[0]), le=int(PROCESSES[1]))]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Seconds = Annotated[float, Meta(gt=0, le=SECONDS[1])]
Share = Annotated[float, Meta(ge=0, le=1)]


class WarmStart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised steps on the environment's own demonstrations, before reinforcement learning starts."""

    clean_steps: Count = 100
    """Steps on demonstrations that do everything right: they teach the format and copying."""
    sloppy_steps: Count = 50
    """Steps on demonstrations with bad habits, after the clean ones: they leave something to improve."""
    batch: Positive = 32
    """Episodes in one supervised step."""
    learning_rate: Annotated[float, Meta(gt=0)] = 4e-3
    """Peak learning rate of AdamW; 20 steps of warm-up, then a cosine to a tenth."""


class TinyModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="tiny"):
    """A Qwen2 small enough to learn on a laptop in a minute, made from scratch."""

    hidden: Positive = 64
    """Width of the residual stream."""
    layers: Positive = 2
    """Decoder layers."""
    heads: Positive = 4
    """Attention heads of the queries."""
    kv_heads: Positive = 1
    """Attention heads of keys and values; must divide `heads`."""
    intermediate: Positive = 192
    """Width of the MLP."""
    rope_theta: Annotated[float, Meta(gt=0)] = 500.0
    """Base of the rotary embedding."""
    initializer_range: Annotated[float, Meta(gt=0)] = 0.1
    """Standard deviation of fresh weights; about 1/sqrt(hidden), or copying cannot be learned."""
    max_positions: Positive = 512
    """Longest context in tokens."""
    warm_start: WarmStart = WarmStart()
    """Supervised steps before step 1."""


class HFModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="hf"):
    """A causal language model in the layout of Hugging Face: config.json, safetensors, tokenizer.json."""

    path: str
    """Directory of the model on this machine; nothing is downloaded."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights while they are trained."""


ModelConfig = TinyModel | HFModel


class LearnerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimiser, the size of a step, and how long the learner waits for whom."""

    ranks: Processes = 1
    """Learner processes; with more than one the model is sharded over them by FSDP2."""
    steps: Positive = 40
    """Optimiser steps of the run."""
    rows_per_step: Positive = 64
    """Rows that one step trains; a multiple of the group size."""
    micro_batch_tokens: Positive = 4096
    """Most tokens, padding included, in one forward pass; a longer row gets a pass of its own."""
    learning_rate: Annotated[float, Meta(ge=0)] = 2e-3
    """Peak learning rate of AdamW."""
    warmup_steps: Count = 5
    """Steps over which the learning rate rises linearly to its peak; at most all steps of the run."""
    final_learning_rate_share: Share = 0.2
    """Share of the peak that the learning rate falls to, linearly, over the whole run."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Decoupled weight decay of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's two moments, from 0 to below 1."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """Largest 2-norm of the whole gradient; a larger one is scaled down to it."""
    threads: Processes = 1
    """Threads of torch in each learner process."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model is trained; `cuda` uses NCCL, `cpu` uses Gloo."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """What computes attention: torch's own, or Flash Attention 2 for a bfloat16 model on `cuda` (`streamrl[gpu]`)."""
    liger: bool = False
    """Use Liger's kernels for norms, rotary embedding and MLP of a `kind: hf` model on `cuda` (`streamrl[gpu]`)."""
    checkpoint_every: Count = 10
    """Steps between two checkpoints; 0 writes one at the end only. The learner takes one early when it gets no rows
    because trained ones take up queue.budget_mebibytes until a checkpoint covers them."""
    keep_checkpoints: Positive = 2
    """Newest complete checkpoints that stay on disk. Rows since the oldest are kept with it; when
    queue.budget_mebibytes has no room for that, fewer checkpoints stay."""
    wait_seconds: Seconds = 300.0
    """Longest time without a ready row, or without `min_engines` engines, before the run fails (seconds)."""
    linger_seconds: Seconds = 0.2
    """How long a micro-batch waits to be filled before it is trained part-full (seconds)."""
    no_signal_steps: Positive = 10
    """Steps in a row without any non-zero advantage on a sampled token, before the run ends with an error."""
    publish_seconds: Seconds = 30.0
    """Deadline of each phase of publishing weights: prepare, transfer, apply, resume (seconds)."""
    transfer: Literal["auto", "gloo", "nccl"] = "auto"
    """What carries weights to engines; `auto`: `nccl` for `device: cuda`, else `gloo`. NCCL needs one GPU each."""
    min_engines: Positive = 1
    """Engines that must have verified a version before it is committed."""
    probe_tolerance: Annotated[float, Meta(gt=0)] = 0.01
    """Largest difference between an engine's and the learner's log-probs on the probe (nats)."""


def problems(
    algorithm: Algorithm, learner: LearnerConfig, model: ModelConfig, *, max_staleness: int, group_size: int
) -> tuple[str, ...]:
    """What cannot work together, one sentence each, naming both fields and what to do. Pure."""
    found = list(checks.problems(algorithm, max_staleness=max_staleness, group_size=group_size))
    if learner.rows_per_step % group_size:
        below = learner.rows_per_step // group_size * group_size
        found.append(
            f"learner.rows_per_step: {learner.rows_per_step} is not a multiple of tasks.group_size: {group_size}; "
            f"use {below or group_size} or {below + group_size}"
        )
    return (*found, *_kernel_problems(learner, model), *_model_problems(model))


def check(
    algorithm: Algorithm, learner: LearnerConfig, model: ModelConfig, *, max_staleness: int, group_size: int
) -> None:
    """Refuse a configuration that cannot work.

    Raises:
        ConfigError: with every contradiction that `problems` finds, one a line.
    """
    found = problems(algorithm, learner, model, max_staleness=max_staleness, group_size=group_size)
    if found:
        raise ConfigError("\n".join(found))


def _kernel_problems(learner: LearnerConfig, model: ModelConfig) -> list[str]:
    flash = f"learner.attention: {learner.attention}" if learner.attention != "sdpa" else None
    found = []
    for option in filter(None, (flash, "learner.liger: true" if learner.liger else None)):
        if learner.device != "cuda":
            found.append(f"{option} has no effect with learner.device: {learner.device}; remove it or use device cuda")
        if not isinstance(model, HFModel):
            found.append(
                f"{option} needs model.kind: hf: the warm start of a tiny model is computed on the CPU, "
                "where these kernels do not run; remove it"
            )
    if flash and isinstance(model, HFModel) and model.dtype != "bfloat16":
        found.append(f"{flash} needs model.dtype: bfloat16, got {model.dtype}: its kernels compute in 16 bits only")
    return found


def _model_problems(model: ModelConfig) -> list[str]:
    if not isinstance(model, TinyModel):
        return []
    found = []
    if model.hidden % (2 * model.heads):
        found.append(f"model.hidden: {model.hidden} must be a multiple of 2 * model.heads: {model.heads}")
    if model.heads % model.kv_heads:
        found.append(f"model.kv_heads: {model.kv_heads} must divide model.heads: {model.heads}")
    return found
