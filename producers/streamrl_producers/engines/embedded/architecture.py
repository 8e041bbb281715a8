"""The shape of a decoder-only model, read from a Hugging Face `config.json`, and the tensors that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from streamrl_queue.errors import ConfigError, WeightError

# architecture name -> whether q, k and v have a bias when the config does not say so
SUPPORTED: Final = {"Qwen2ForCausalLM": True, "LlamaForCausalLM": False}
HEAD: Final = "lm_head.weight"
EMBEDDING: Final = "model.embed_tokens.weight"


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Qwen2- or Llama-style model."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float
    epsilon: float
    tied: bool
    qkv_bias: bool

    @classmethod
    def read(cls, model_dir: Path) -> Architecture:
        """The architecture of `model_dir/config.json`.

        Raises:
            ConfigError: no such file, or a model that the embedded engine cannot run.
        """
        path = model_dir / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; the engine reads the model's architecture from it")
        return cls.parse(msgspec.json.decode(path.read_bytes()), str(path))

    @classmethod
    def parse(cls, config: Mapping[str, Any], where: str) -> Architecture:
        """The architecture that the decoded `config.json` describes; `where` names it in errors."""
        name = (config.get("architectures") or ["nothing"])[0]
        if name not in SUPPORTED:
            raise ConfigError(
                f"{where}: architectures: expected one of {', '.join(SUPPORTED)}, got {name}; "
                "use a vllm or sglang engine for other models"
            )
        _refuse_variants(config, where)
        rope = config.get("rope_parameters") or {}
        heads = config["num_attention_heads"]
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            epsilon=config.get("rms_norm_eps", 1e-6),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", SUPPORTED[name])),
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the model needs, by its Hugging Face name."""
        d, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = {EMBEDDING: (self.vocab, d), "model.norm.weight": (d,)}
        for index in range(self.layers):
            layer = f"model.layers.{index}."
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                found[f"{layer}self_attn.{name}_proj.weight"] = (rows, d)
                if self.qkv_bias:
                    found[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
            found[f"{layer}self_attn.o_proj.weight"] = (d, q)
            found[f"{layer}mlp.gate_proj.weight"] = (self.intermediate, d)
            found[f"{layer}mlp.up_proj.weight"] = (self.intermediate, d)
            found[f"{layer}mlp.down_proj.weight"] = (d, self.intermediate)
            found[f"{layer}input_layernorm.weight"] = (d,)
            found[f"{layer}post_attention_layernorm.weight"] = (d,)
        if not self.tied:
            found[HEAD] = (self.vocab, d)
        return found

    def check(self, offered: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Check that exactly the needed tensors are offered. A tied model may be offered its head as well.

        Raises:
            WeightError: naming every missing, unexpected, repeated and wrongly shaped tensor.
        """
        needed, got = self.tensors(), list(offered)
        if self.tied:
            got = [(name, shape) for name, shape in got if name != HEAD or shape != needed[EMBEDDING]]
        names = [name for name, _ in got]
        faults = [f"missing {name}" for name in needed.keys() - set(names)]
        faults += [f"unexpected {name}" for name in set(names) - needed.keys()]
        faults += [f"repeated {name}" for name in set(names) if names.count(name) > 1]
        faults += [
            f"{name}: expected shape {needed[name]}, got {tuple(shape)}"
            for name, shape in got
            if name in needed and tuple(shape) != needed[name]
        ]
        if faults:
            raise WeightError("weights do not fit the model: " + "; ".join(sorted(faults)))


def _refuse_variants(config: Mapping[str, Any], where: str) -> None:
    """Refuse what would change the numbers without being computed here."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    for field, got, expected in (
        ("rope_type", kind, "default"),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("use_sliding_window", config.get("use_sliding_window", False), False),
        ("mlp_bias", config.get("mlp_bias", False), False),
    ):
        if got != expected:
            raise ConfigError(f"{where}: {field}: the embedded engine expects {expected!r}, got {got!r}")
