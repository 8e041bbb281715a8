"""The decoder computes what transformers computes, however requests are batched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_support import architecture, batch, deviation, finish, llama, model, prompt, reference, request, tensors

from streamrl_producers.engines.embedded.architecture import Architecture
from streamrl_producers.engines.embedded.decoder import Decoder
from streamrl_producers.engines.embedded.plan import plan, share
from streamrl_queue.errors import ConfigError, WeightError

TOLERANCE = 2e-4  # nats; float32 sums in another order


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_ragged_requests_get_the_logprobs_of_transformers(kv_heads: int) -> None:
    made = model(num_key_value_heads=kv_heads)
    requests = [request(prompt(n, n), max_tokens=m) for n, m in ((1, 9), (17, 3), (5, 20), (30, 1), (2, 12), (6, 7))]
    finish(batch(made), *requests)
    assert max(deviation(made, one) for one in requests) < TOLERANCE
    assert [len(one.result.tokens) for one in requests if one.result] == [9, 3, 20, 1, 12, 7]


def test_llama_without_biases_and_with_an_untied_head_gets_the_logprobs_of_transformers() -> None:
    made = llama()
    one = request(prompt(9), max_tokens=10)
    finish(batch(made), one)
    assert deviation(made, one) < TOLERANCE


def test_a_prompt_longer_than_one_step_is_read_in_pieces_and_decoding_goes_on_meanwhile() -> None:
    made = model()
    ready = batch(made, context=160, step_tokens=16)
    short, long = request(prompt(3), max_tokens=30), request(prompt(100, 1), max_tokens=4)
    ready.submit(short)
    ready.step()
    ready.submit(long)
    for _ in range(4):
        ready.step()
    assert ready.counters.sampled == 5  # the short one has sampled in every step, the long one still reads
    finish(ready)
    assert max(deviation(made, one) for one in (short, long)) < TOLERANCE


def test_the_next_turn_of_a_session_forwards_only_its_own_tokens_and_gets_the_same_logprobs() -> None:
    made = model()
    ready = batch(made)
    first = request(prompt(10), "a", max_tokens=6)
    finish(ready, first)
    assert first.result is not None
    forwarded = ready.counters.forced + ready.counters.sampled
    second = request(np.concatenate([first.tokens, first.result.tokens, prompt(4, 2)]), "a", max_tokens=1)
    finish(ready, second)
    assert deviation(made, second) < TOLERANCE
    assert ready.counters.forced + ready.counters.sampled - forwarded == 1 + 4  # the last sampled token and four new


def test_a_rewritten_history_reuses_only_the_common_prefix() -> None:
    made = model()
    ready = batch(made)
    finish(ready, request(prompt(20), "a", max_tokens=6))
    changed = prompt(20)
    changed[12] = (changed[12] + 1) % 61
    second = request(changed, "a", max_tokens=8)
    finish(ready, second)
    assert ready.counters.reused == 12
    assert deviation(made, second) < TOLERANCE


def test_an_evicted_session_is_read_again_and_gets_the_same_logprobs() -> None:
    made = model()
    ready = batch(made, slots=2)
    first = request(prompt(10), "a", max_tokens=6)
    finish(ready, first)
    finish(ready, *(request(prompt(8, i), f"other {i}", max_tokens=5) for i in range(3)))
    assert first.result is not None
    second = request(np.concatenate([first.tokens, first.result.tokens, prompt(3, 9)]), "a", max_tokens=7)
    finish(ready, second)
    assert ready.counters.reused == 0
    assert deviation(made, second) < TOLERANCE


def test_the_same_prompt_twice_forwards_its_last_token_again() -> None:
    made = model()
    ready = batch(made)
    finish(ready, request(prompt(10), "a", max_tokens=1))
    again = request(prompt(10), "a", max_tokens=3)
    finish(ready, again)
    assert ready.counters.reused == 9
    assert deviation(made, again) < TOLERANCE


def test_uncached_logprobs_leave_the_cache_alone() -> None:
    made, other = model(), model(1)
    ready = batch(made)
    one = request(prompt(7), max_tokens=12)
    ready.submit(one)
    ready.step()
    tokens = prompt(25, 3)
    probed = ready.decoder.logprobs(tokens, ready.decoder.build(tensors(other)))
    finish(ready)
    assert np.abs(probed - reference(other, tokens)).max() < TOLERANCE
    assert deviation(made, one) < TOLERANCE


def test_missing_unexpected_and_misshapen_tensors_are_refused_by_name() -> None:
    made = model()
    sent = tensors(made)
    sent["model.layers.7.mlp.up_proj.weight"] = sent.pop("model.layers.1.mlp.up_proj.weight")
    sent["model.norm.weight"] = torch.ones(5)
    with pytest.raises(WeightError) as caught:
        Decoder(architecture(made), slots=1, context=8).build(sent)
    message = str(caught.value)
    assert "missing model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected model.layers.7.mlp.up_proj.weight" in message
    assert "model.norm.weight: expected shape (32,), got (5,)" in message


def test_a_tied_head_may_be_sent_but_must_equal_the_embedding() -> None:
    made = model()
    decoder = Decoder(architecture(made), slots=1, context=8)
    sent = tensors(made) | {"lm_head.weight": made.lm_head.weight.detach().clone()}
    assert torch.equal(decoder.build(sent).head, sent["model.embed_tokens.weight"])
    sent["lm_head.weight"][3, 3] += 1
    with pytest.raises(WeightError, match="tied"):
        decoder.build(sent)


def test_an_untied_model_needs_its_head() -> None:
    made = llama()
    sent = tensors(made)
    del sent["lm_head.weight"]
    with pytest.raises(WeightError, match=r"missing lm_head\.weight"):
        Decoder(architecture(made), slots=1, context=8).build(sent)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Architecture.parse(model().config.to_dict() | change, "config.json")


def test_groups_pad_at_most_to_twice_their_tokens_and_keep_every_token_once() -> None:
    counts = np.array([1, 7, 1, 3, 30, 5, 2, 1])
    step = plan(np.arange(8), np.array([4, 0, 9, 2, 0, 1, 0, 0]), counts)
    assert sum(len(g.slots) * g.width for g in step.groups) <= 2 * counts.sum()
    assert len(step.slots) == counts.sum()
    order = np.argsort(step.row_slots)
    assert step.counts[order].tolist() == counts.tolist()
    for row, last in zip(step.row_slots, step.last, strict=True):
        assert step.slots[last] == row


def test_decoding_rows_come_first_and_prompts_in_their_order() -> None:
    pending, order = np.array([50, 1, 9, 1]), np.array([4, 3, 1, 2])
    assert share(pending, order, 20).tolist() == [9, 1, 9, 1]
    assert share(pending, order, 5).tolist() == [0, 1, 3, 1]
    assert share(pending, order, 100) is pending


def test_bfloat16_stays_near_float32_and_reports_float32_logprobs() -> None:
    made = model()
    tokens = prompt(20)
    decoder = Decoder(architecture(made), slots=1, context=8, dtype=torch.bfloat16)
    found = decoder.logprobs(tokens, decoder.build(tensors(made)))
    assert found.dtype == np.float32
    assert 0 < np.abs(found - reference(made, tokens)).mean() < 0.1
