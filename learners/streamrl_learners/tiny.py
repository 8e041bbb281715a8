"""A Qwen2 of 0.1 M parameters that learns multi-turn tool calls in a minute on one core."""

from __future__ import annotations

from typing import Any

from .config import TinyModel


def config_json(model: TinyModel, *, vocab_size: int, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """The `config.json` of the model in Hugging Face's layout. Needs neither torch nor transformers."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.max_positions,
        "initializer_range": model.initializer_range,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": "float32",
    }


def make(config: dict[str, Any], seed: int) -> Any:
    """A fresh `Qwen2ForCausalLM` for a `config_json`, its weights drawn from `seed`."""
    import torch
    from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        settings = Qwen2Config(**config)
        settings._attn_implementation = "sdpa"
        return Qwen2ForCausalLM(settings)
