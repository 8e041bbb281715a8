"""Log-probs mean what the row says they mean; weights go by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_fakes import VOCAB, make_policy, make_row, write_model_dir

from streamrl_learners.algorithms.pieces import Algorithm
from streamrl_learners.batches import micro_batch
from streamrl_learners.config import TinyModel
from streamrl_learners.model import (
    build,
    check_head,
    copy_weights,
    load_weights,
    save_weights,
    sequence_logprobs,
    state_names,
    token_logprobs,
)
from streamrl_queue.errors import ConfigError, WeightError
from streamrl_queue.schema import Segment


def plain_logprobs(policy, tokens: np.ndarray, temperature: float) -> torch.Tensor:
    """The full softmax over every place of one sequence, the way a paper writes it."""
    logits = policy.lm(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0] / temperature
    table = torch.log_softmax(logits.double(), -1)
    return torch.stack([table[t - 1, int(tokens[t])] for t in range(1, len(tokens))])


def test_padded_and_sorted_rows_get_the_log_probs_of_rows_alone():
    policy = make_policy(dtype=torch.float64)
    rows = [make_row(i, temperature=t) for i, t in enumerate((1.0, 0.6, 1.7, 1.0))]
    got = token_logprobs(policy, micro_batch(rows, Algorithm()))
    wanted = torch.cat([plain_logprobs(policy, r.tokens, r.temperature)[np.flatnonzero(r.mask) - 1] for r in rows])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_at_temperature_0_6_a_row_sampled_by_this_policy_has_ratio_one():
    policy = make_policy()
    row = make_row(4, temperature=0.6)
    sampled = plain_logprobs(policy, row.tokens, 0.6)[np.flatnonzero(row.mask) - 1]
    ratio = (token_logprobs(policy, micro_batch([row], Algorithm())) - sampled.float()).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-3)


def test_positions_and_attention_start_anew_in_each_segment():
    policy = make_policy(dtype=torch.float64)
    first, second = make_row(1), make_row(2)
    n = len(first.tokens)
    both = make_row(
        3,
        tokens=np.concatenate([first.tokens, second.tokens]),
        mask=np.concatenate([first.mask, second.mask]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        segments=(Segment(0, n), Segment(n, n + len(second.tokens))),
    )
    joined = token_logprobs(policy, micro_batch([both], Algorithm()))
    alone = [token_logprobs(policy, micro_batch([row], Algorithm())) for row in (first, second)]
    torch.testing.assert_close(joined, torch.cat(alone), rtol=0, atol=1e-12)


def test_one_token_rows_have_nothing_to_predict():
    row = make_row(1, tokens=np.array([3], np.int32), mask=np.zeros(1, np.uint8), segments=(Segment(0, 1),))
    assert len(token_logprobs(make_policy(), micro_batch([row], Algorithm()))) == 0


def test_a_pass_without_sampled_tokens_still_reaches_every_parameter():
    """Ranks under FSDP must take the same collectives; an empty micro-batch takes them all."""
    policy = make_policy()
    token_logprobs(policy, micro_batch([], Algorithm())).sum().backward()
    gradients = [p.grad for p in policy.parameters()]
    assert all(g is not None and bool((g == 0).all()) for g in gradients)


def test_a_tied_head_is_one_tensor():
    names = state_names(make_policy().lm)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_weights_come_back_from_disk(tmp_path):
    model_dir = write_model_dir(tmp_path)
    first = build(TinyModel(), model_dir, seed=1)
    save_weights(first.lm, model_dir / "model.safetensors")
    second = build(TinyModel(), model_dir, seed=2)
    tokens = torch.arange(10)
    assert torch.equal(sequence_logprobs(first, tokens), sequence_logprobs(second, tokens))


def test_weights_that_do_not_fit_are_named():
    policy = make_policy()
    tensors = dict(state_names(policy.lm))
    tensors["model.extra"] = tensors.pop("model.norm.weight")
    with pytest.raises(
        WeightError, match=r"here: missing tensors: \['model.norm.weight'\]; unexpected .*'model.extra'"
    ):
        copy_weights(policy.lm, tensors, "here")


def test_transformers_reads_what_was_saved(tmp_path):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

    write_model_dir(tmp_path)
    policy = make_policy(seed=3)
    save_weights(policy.lm, tmp_path / "model.safetensors")
    other = Qwen2ForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(VOCAB)[None]
    torch.testing.assert_close(other(input_ids=tokens).logits, policy.lm(input_ids=tokens).logits)


def test_a_model_that_scales_its_logits_is_refused():
    policy = make_policy()
    check_head(policy, "plain")
    head = policy.lm.lm_head.forward
    policy.lm.forward = lambda input_ids: type("Output", (), {"logits": 3 * head(policy.lm.model(input_ids)[0])})
    with pytest.raises(ConfigError, match=r"model.path: scaled: .* caps or scales"):
        check_head(policy, "scaled")


def test_seeds_make_the_weights():
    same, again, other = (make_policy(seed=s) for s in (1, 1, 2))
    assert torch.equal(same.lm.model.norm.weight, again.lm.model.norm.weight)
    assert torch.equal(same.lm.model.embed_tokens.weight, again.lm.model.embed_tokens.weight)
    assert not torch.equal(same.lm.model.embed_tokens.weight, other.lm.model.embed_tokens.weight)


def test_load_weights_refuses_a_file_of_another_model(tmp_path):
    from streamrl_learners.model import save_tensors

    save_tensors({"nothing": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(WeightError, match=r"x\.safetensors"):
        load_weights(make_policy().lm, tmp_path / "x.safetensors")
