"""GPU kernels that stand in for a model's own layers: Flash Attention and Liger. They come with `streamrl[gpu]`.

Both compute what the layers they replace compute, up to rounding, so log-probs are taken as without them: tokens
are padded on the right and no mask is passed, which Flash Attention runs as plain causal attention. Liger's fused
loss stays off: it never makes logits, and a policy needs the log-probs that come from them.
"""

from __future__ import annotations

import importlib
from typing import Any

from streamrl_queue.errors import ConfigError


def require_flash_attention() -> None:
    """Make sure that transformers will find the package.

    Raises:
        ConfigError: naming the extra, when it cannot be imported.
    """
    _import("flash_attn", "flash-attn", "learner.attention: flash_attention_2")


def apply_liger(model_type: str) -> None:
    """Put Liger's layers (norms, rotary embedding, MLP) into the classes that models of `model_type` are made of.

    For this process, and for models made from now on: call it before the model is made.

    Raises:
        ConfigError: when Liger is missing, or has no kernels for this type of model.
    """
    option = "learner.liger: true"
    patching = _import("liger_kernel.transformers.monkey_patch", "liger-kernel", option)
    known = patching.MODEL_TYPE_TO_APPLY_LIGER_FN
    if model_type not in known:  # Liger itself would log that and do nothing
        raise ConfigError(
            f"{option}: Liger has no kernels for models of type {model_type}; it knows {', '.join(sorted(known))}; "
            "set learner.liger: false"
        )
    patching._apply_liger_kernel(model_type, cross_entropy=False, fused_linear_cross_entropy=False)


def _import(module: str, package: str, option: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{option} needs the package {package}, which cannot be imported ({error}); "
            "pip install 'streamrl[gpu]', or leave the option out"
        ) from error
