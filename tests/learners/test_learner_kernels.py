"""Flash Attention and Liger: refused where they would do nothing, and log-probs are the same with them."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_fakes import make_policy, make_row, write_model_dir
from transformers import AutoModelForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from streamrl_learners.algorithms.pieces import Algorithm
from streamrl_learners.batches import micro_batch
from streamrl_learners.config import HFModel, LearnerConfig, ModelConfig, TinyModel, problems
from streamrl_learners.model import build, save_weights, token_logprobs
from streamrl_queue.errors import ConfigError

BOTH = {"attention": "flash_attention_2", "liger": True}
HALF = HFModel(path="models/qwen", dtype="bfloat16")


def found(model: ModelConfig, **learner: Any) -> str:
    return "\n".join(problems(Algorithm(), LearnerConfig(**learner), model, max_staleness=2, group_size=8))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A Hugging Face model directory with weights."""
    write_model_dir(tmp_path)
    save_weights(make_policy(seed=5).lm, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def pristine_qwen2() -> Iterator[None]:
    """Liger replaces classes in transformers' module, for the whole process: put them back."""
    before = dict(vars(modeling_qwen2))
    yield
    vars(modeling_qwen2).update(before)


class FakeLiger(types.ModuleType):
    """`liger_kernel.transformers.monkey_patch`, as far as it is used; it replaces the norms by a marked subclass."""

    MODEL_TYPE_TO_APPLY_LIGER_FN = types.MappingProxyType({"qwen2": None, "llama": None})

    class Norm(modeling_qwen2.Qwen2RMSNorm):
        pass

    def __init__(self) -> None:
        super().__init__("liger_kernel.transformers.monkey_patch")
        self.calls: list[tuple[str, dict[str, bool]]] = []

    def _apply_liger_kernel(self, model_type: str, **options: bool) -> None:
        self.calls.append((model_type, options))
        modeling_qwen2.Qwen2RMSNorm = self.Norm


@pytest.fixture
def fake_liger(monkeypatch: pytest.MonkeyPatch, pristine_qwen2: None) -> FakeLiger:
    fake = FakeLiger()
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return fake


def test_kernels_of_cuda_are_refused_on_the_cpu() -> None:
    assert found(HALF, device="cuda", **BOTH) == ""
    text = found(HALF, **BOTH)
    assert "learner.attention: flash_attention_2 has no effect with learner.device: cpu" in text
    assert "learner.liger: true has no effect with learner.device: cpu" in text


def test_kernels_are_refused_for_a_model_that_warms_up_on_the_cpu() -> None:
    text = found(TinyModel(), device="cuda", **BOTH)
    assert text.count("needs model.kind: hf") == 2


def test_flash_attention_is_refused_for_a_model_in_32_bits() -> None:
    text = found(HFModel(path="models/qwen"), device="cuda", **BOTH)
    assert text == (
        "learner.attention: flash_attention_2 needs model.dtype: bfloat16, got float32: "
        "its kernels compute in 16 bits only"
    )


@pytest.mark.parametrize(
    ("learner", "package"),
    [
        (
            LearnerConfig(attention="flash_attention_2"),
            "learner.attention: flash_attention_2 needs the package flash-attn",
        ),
        (LearnerConfig(liger=True), "learner.liger: true needs the package liger-kernel"),
    ],
)
def test_a_missing_package_is_refused_with_the_extra_to_install(
    learner: LearnerConfig, package: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("flash_attn", "liger_kernel"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"^{package}, .*pip install 'streamrl\[gpu\]'"):
        build(HFModel(path=str(model_dir)), model_dir, 0, learner)


def test_liger_replaces_layers_and_no_loss_before_the_model_is_made(fake_liger: FakeLiger, model_dir: Path) -> None:
    policy = build(HFModel(path=str(model_dir)), model_dir, 0, LearnerConfig(liger=True))
    assert fake_liger.calls == [("qwen2", {"cross_entropy": False, "fused_linear_cross_entropy": False})]
    assert isinstance(policy.lm.model.norm, FakeLiger.Norm)


def test_a_type_of_model_that_liger_does_not_know_is_refused(fake_liger: FakeLiger, model_dir: Path) -> None:
    fake_liger.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="no kernels for models of type qwen2; it knows llama"):
        build(HFModel(path=str(model_dir)), model_dir, 0, LearnerConfig(liger=True))
    assert fake_liger.calls == []


def test_the_attention_that_was_chosen_goes_to_transformers(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    asked: list[str] = []
    make = AutoModelForCausalLM.from_pretrained

    def from_pretrained(path: str, *, attn_implementation: str, **options: Any) -> Any:
        asked.append(attn_implementation)
        return make(path, attn_implementation="sdpa", **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    for learner in (LearnerConfig(), LearnerConfig(attention="flash_attention_2")):
        build(HFModel(path=str(model_dir)), model_dir, 0, learner)
    assert asked == ["sdpa", "flash_attention_2"]


def test_without_kernels_a_model_directory_has_the_log_probs_of_its_weights(model_dir: Path) -> None:
    micro = micro_batch([make_row(i) for i in range(4)], Algorithm())
    policy = build(HFModel(path=str(model_dir)), model_dir, 0)
    assert policy.lm.config._attn_implementation == "sdpa"
    torch.testing.assert_close(token_logprobs(policy, micro), token_logprobs(make_policy(seed=5), micro))


LACKING = [name for name in ("flash_attn", "liger_kernel") if importlib.util.find_spec(name) is None]


@pytest.mark.gpu
@pytest.mark.skipif(bool(LACKING), reason=f"{' and '.join(LACKING)} not installed: pip install 'streamrl[gpu]'")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_flash_attention_and_liger_give_the_log_probs_of_sdpa(model_dir: Path, pristine_qwen2: None) -> None:
    """Each is compared with the same weights in 32 bits: kernels may round about as much as bfloat16 does anyway."""
    micro = micro_batch([make_row(i, temperature=t) for i, t in enumerate((1.0, 0.6, 1.7, 1.0))], Algorithm())
    exact = token_logprobs(make_policy(seed=5), micro)
    half = HFModel(path=str(model_dir), dtype="bfloat16")
    errors = {}
    for name, options in (("sdpa", {}), ("kernels", BOTH)):
        policy = build(half, model_dir, 0, LearnerConfig(device="cuda", **options))
        got = token_logprobs(policy, micro.to(torch.device("cuda")))
        errors[name] = float((got.cpu() - exact).abs().max())
        got.sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in policy.parameters() if p.grad is not None)
    assert type(policy.lm.model.norm).__name__ == "LigerRMSNorm"
    assert errors["kernels"] <= 2 * errors["sdpa"] + 0.01, errors
