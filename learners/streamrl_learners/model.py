"""The policy: a causal language model that tells the log-probabilities of sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn

from streamrl_queue.errors import ConfigError, WeightError

from . import tiny
from .algorithms.penalties import entropy
from .batches import MicroBatch
from .config import HFModel, LearnerConfig, ModelConfig
from .files import replace_file
from .kernels import apply_liger, require_flash_attention

WEIGHTS: Final = "model.safetensors"
# Two ways through the same bfloat16 head differ by rounding, nats.
HEAD_TOLERANCE: Final = 0.05


class Policy(nn.Module):
    """Wraps a Hugging Face causal LM so that one forward gives log-probs, and the head sees sampled places only.

    The vocabulary is the widest dimension there is: logits of prompt, tool and padding places are never made.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self, tokens: Tensor, places: Tensor, targets: Tensor, temperatures: Tensor, with_entropy: bool = False
    ) -> Tensor:
        """Log-probs `[n]` (nats, float32 or wider) of `targets` `[n]` at `temperatures` `[n]`.

        With entropy, `[2, n]`: below them the entropy of the distribution at each place, nats. It keeps two more
        tensors of the logits' size for the backward pass.

        `tokens` `[sequences, positions]` are padded on the right: causal attention never looks at what follows,
        so no attention mask is needed. `places` `[n]` index the flattened tokens. Temperature divides the
        logits, not the log-probs.
        """
        hidden = self.lm.model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = self.lm.lm_head(hidden.flatten(0, 1)[places])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperatures[:, None]
        chosen = logits.gather(1, targets[:, None])[:, 0]
        result: Tensor = chosen - logits.logsumexp(1)
        return torch.stack([result, entropy(logits)]) if with_entropy else result

    @property
    def vocab_size(self) -> int:
        return int(self.lm.config.vocab_size)


def token_logprobs(policy: nn.Module, micro: MicroBatch) -> Tensor:
    """Current log-probs `[n]` of the sampled tokens of a micro-batch, under the distribution they were sampled from."""
    result: Tensor = policy(micro.tokens, micro.places, micro.targets, micro.temperatures)
    return result


def token_logprobs_and_entropy(policy: nn.Module, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """What `token_logprobs` gives, and the entropy `[n]` (nats) of each distribution."""
    both: Tensor = policy(micro.tokens, micro.places, micro.targets, micro.temperatures, with_entropy=True)
    return both[0], both[1]


def sequence_logprobs(policy: nn.Module, tokens: Tensor) -> Tensor:
    """Log-probs `[positions - 1]` of `tokens[1:]` of one sequence `[positions]`, nats, temperature 1."""
    n = len(tokens) - 1
    places = torch.arange(n, device=tokens.device)
    result: Tensor = policy(tokens[None], places, tokens[1:], torch.ones(n, device=tokens.device))
    return result


def state_names(lm: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by their name in the model; a tied tensor appears once, under its first name."""
    tensors: dict[str, Tensor] = dict(lm.named_parameters())
    saved = lm.state_dict(keep_vars=True)
    tensors.update({name: buffer for name, buffer in lm.named_buffers() if name in saved})
    return tensors


def build(config: ModelConfig, model_dir: Path, seed: int, learner: LearnerConfig | None = None) -> Policy:
    """The policy of a run, with the weights in `model_dir` where there are any, else fresh ones from `seed`.

    A Hugging Face model has the kernels that `learner` (default: `LearnerConfig()`) names, and is on its device,
    where it can be checked with them; a tiny one is on the CPU.

    Raises:
        ConfigError: a model that is not supported, or kernels that are not installed.
    """
    if isinstance(config, HFModel):
        learner = learner or LearnerConfig()
        policy = Policy(_load_hf(config, learner).train()).to(learner.device)
        check_head(policy, config.path)
        return policy
    return Policy(_build_tiny(model_dir, seed).train())


def check_head(policy: Policy, name: str) -> None:
    """Compare the policy's log-probs with the model's own forward on a few tokens.

    Raises:
        ConfigError: for a model that does more to its logits than `lm_head(hidden)`, such as capping or scaling.
    """
    tokens = torch.arange(min(8, policy.vocab_size), device=next(policy.parameters()).device)
    with torch.no_grad():
        own = policy.lm(input_ids=tokens[None]).logits[0, :-1].float().log_softmax(-1)
        wanted = own.gather(1, tokens[1:, None])[:, 0]
        error = float((sequence_logprobs(policy, tokens) - wanted).abs().max())
    if not error <= HEAD_TOLERANCE:
        raise ConfigError(
            f"model.path: {name}: lm_head(model(tokens)) misses the model's own log-probs by {error:.3g} nats; "
            "a model that caps or scales its logits is not supported"
        )


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write named tensors to `path` as safetensors, whole or not at all."""
    from safetensors.torch import save

    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    replace_file(path, save(flat, metadata={"format": "pt"}))


def save_weights(lm: nn.Module, path: Path) -> None:
    """Write the model's tensors to `path`, as `load_weights` and `from_pretrained` read them."""
    save_tensors(state_names(lm), path)


def load_weights(lm: nn.Module, path: Path) -> None:
    """Read what `save_weights` wrote.

    Raises:
        WeightError: naming tensors that are missing or unexpected.
    """
    from safetensors.torch import load_file

    copy_weights(lm, load_file(path), str(path))


def copy_weights(lm: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy `tensors` into the model by name; every tensor must be there, none may be left over."""
    own = state_names(lm)
    missing, unexpected = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or unexpected:
        raise WeightError(f"{source}: missing tensors: {missing or 'none'}; unexpected tensors: {unexpected or 'none'}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _build_tiny(model_dir: Path, seed: int) -> Any:
    lm = tiny.make(msgspec.json.decode((model_dir / "config.json").read_bytes()), seed)
    if (model_dir / WEIGHTS).exists():
        load_weights(lm, model_dir / WEIGHTS)
    return lm


def _load_hf(config: HFModel, learner: LearnerConfig) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if learner.attention == "flash_attention_2":
        require_flash_attention()
    if learner.liger:
        apply_liger(AutoConfig.from_pretrained(config.path).model_type)
    return AutoModelForCausalLM.from_pretrained(
        config.path, dtype=getattr(torch, config.dtype), attn_implementation=learner.attention
    )
