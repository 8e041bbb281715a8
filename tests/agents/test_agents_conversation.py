"""Sampled ids are the truth: tokens are never decoded and encoded again; mask is 1 exactly on what was sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agents_support import bpe, chatml, template_of, thinking, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_agents.conversation import Conversation
from streamrl_agents.template import ChatTemplate
from streamrl_agents.vocabulary import CHAT_TEMPLATE, END
from streamrl_queue.errors import LimitReached, SchemaError, TemplateError
from streamrl_queue.schema import Segment, Span, Trajectory

TEMPLATES = {"tiny": tiny, "chatml": chatml, "thinking": thinking}
SPAN = (Span(0, 1, 1),)

words = st.text(st.sampled_from("helothink123 \n{}é語"), max_size=20)
clean = words.map(str.strip)
new_messages = st.lists(
    st.tuples(st.sampled_from(["user", "tool"]), clean).map(lambda m: {"role": m[0], "content": m[1]}),
    min_size=1,
    max_size=3,
)


def say(conversation: Conversation, ids: list[int]) -> str:
    tokens = np.asarray(ids, np.int32)
    return conversation.sample(tokens, np.full(len(ids), -0.5, np.float32), SPAN)


def finish(conversation: Conversation, status: str = "completed") -> Trajectory:
    return conversation.trajectory(status=status, sampling={})


def random_ids(draw: Any, template: ChatTemplate) -> list[int]:
    """Any ids in any split, marks of other roles included; a turn usually ends as it should."""
    any_id = st.integers(0, template.tokenizer.get_vocab_size() - 1).filter(lambda i: i not in template.stop_ids)
    ids = draw(st.lists(any_id, max_size=12))
    return [*ids, template.stop_ids[0]] if draw(st.integers(0, 4)) else ids


@given(data=st.data(), name=st.sampled_from(sorted(TEMPLATES)))
@settings(max_examples=50, deadline=None)
def test_stored_ids_are_exactly_the_sampled_ids(data: Any, name: str) -> None:
    template = TEMPLATES[name]()
    conversation = Conversation(template)
    said: list[int] = []
    for _ in range(data.draw(st.integers(1, 4))):
        conversation.add(*data.draw(new_messages))
        before = finish(conversation)
        prompt = conversation.prompt().tolist()
        if conversation.forks == max(0, len(before.segments) - 1) and before.segments:
            start = before.segments[-1].start
            assert prompt[: len(before.tokens) - start] == before.tokens[start:].tolist()
        ids = random_ids(data.draw, template)
        say(conversation, ids)
        said += ids
    trajectory = finish(conversation)
    assert trajectory.tokens[trajectory.mask == 1].tolist() == said
    assert np.isnan(trajectory.logprobs[trajectory.mask == 0]).all()
    assert len(trajectory.tokens) == len(trajectory.mask) == len(trajectory.logprobs)


@given(
    rounds=st.lists(st.tuples(new_messages, clean), min_size=1, max_size=5), name=st.sampled_from(["tiny", "chatml"])
)
@settings(max_examples=50, deadline=None)
def test_incremental_ids_equal_the_full_rendering_when_the_template_only_appends(
    rounds: list[tuple[list[dict[str, str]], str]], name: str
) -> None:
    template = TEMPLATES[name]()
    conversation = Conversation(template)
    for messages, text in rounds:
        conversation.add(*messages)
        full = template.encode(template.render(conversation.messages, generate=True))
        assert conversation.prompt().tolist() == full
        say(conversation, [*template.encode(text), template.stop_ids[0]])
    assert conversation.forks == 0


@given(rounds=st.lists(st.tuples(new_messages, words), min_size=1, max_size=5), tools=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_local_template_gives_the_same_ids_as_when_it_is_rendered_in_full(
    rounds: list[tuple[list[dict[str, str]], str]], tools: bool
) -> None:
    source = "{% for t in tools or [] %}{{ t.x }}|{% endfor %}" + CHAT_TEMPLATE
    quick, full = (template_of(source, END, "<|user|>", "<|assistant|>", "<|tool|>") for _ in range(2))
    assert quick.local
    full.local = False
    schemas = [{"x": "one"}, {"x": "two"}] if tools else []
    pair = [Conversation(quick, schemas), Conversation(full, schemas)]
    for messages, text in rounds:
        for conversation in pair:
            conversation.add(*messages)
            conversation.prompt()
            say(conversation, [*quick.encode(text), quick.stop_ids[0]])
    one, other = map(finish, pair)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.mask.tolist() == other.mask.tolist()


def test_a_split_that_the_tokenizer_would_not_choose_survives_a_tool_turn() -> None:
    template = tiny()
    he, llo = template.tokenizer.token_to_id("he"), template.tokenizer.token_to_id("llo")
    assert template.encode("hello") == [template.tokenizer.token_to_id("hello")]
    conversation = Conversation(template)
    conversation.add({"role": "user", "content": "say it"})
    prompt = conversation.prompt().tolist()
    completion = [he, llo, template.stop_ids[0]]
    assert say(conversation, completion) == "hello"
    conversation.add({"role": "tool", "content": "fine"})
    suffix = template.encode("<|tool|>fine<|end|><|assistant|>")
    assert conversation.prompt().tolist() == prompt + completion + suffix


def test_the_separator_behind_a_sampled_end_of_turn_is_there_and_was_not_sampled() -> None:
    template = chatml()
    end = template.stop_ids[0]
    newline = template.encode("\n")
    conversation = Conversation(template)
    conversation.add({"role": "user", "content": "hi"})
    for text in ("one", "two", "three"):
        conversation.prompt()
        say(conversation, [*template.encode(text), end])
        conversation.add({"role": "tool", "content": "go on"})
    tokens = conversation.prompt()
    trajectory = finish(conversation)
    assert tokens.tolist() == template.encode(template.render(conversation.messages, generate=True))
    behind = np.flatnonzero((trajectory.tokens == end) & (trajectory.mask == 1)) + 1
    assert len(behind) == 3
    assert trajectory.tokens[behind].tolist() == newline * 3
    assert trajectory.mask[behind].tolist() == [0, 0, 0]


def test_a_sampled_end_of_turn_has_mask_1_even_when_it_is_also_the_pad_token() -> None:
    template = tiny()
    end = template.stop_ids[0]
    conversation = Conversation(template)
    conversation.add({"role": "user", "content": "hi"})
    conversation.prompt()
    say(conversation, [*template.encode("ok"), end])
    trajectory = finish(conversation)
    assert trajectory.tokens[-1] == end
    assert trajectory.mask[-1] == 1
    assert trajectory.mask[trajectory.tokens == end].tolist() == [0, 1]  # the user's own end was not sampled


def test_an_end_of_turn_that_was_not_sampled_is_added_with_mask_0() -> None:
    template = chatml()
    conversation = Conversation(template)
    conversation.add({"role": "user", "content": "hi"})
    prompt = conversation.prompt().tolist()
    completion = template.encode("stopped by a string")
    say(conversation, completion)
    conversation.add({"role": "user", "content": "and?"})
    suffix = template.encode("<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")
    assert conversation.prompt().tolist() == prompt + completion + suffix


def test_a_template_that_strips_thinking_opens_a_new_segment_and_old_tokens_keep_their_mask() -> None:
    template = thinking()
    end = template.stop_ids[0]
    conversation = Conversation(template)
    conversation.add({"role": "user", "content": "12"})
    conversation.prompt()
    first = [*template.encode("<think>hm\n</think>\n\nhello"), end]
    say(conversation, first)
    before = finish(conversation)
    conversation.add({"role": "user", "content": "more"})
    prompt = conversation.prompt().tolist()
    second = [*template.encode("<think>so</think>123"), end]
    say(conversation, second)
    after = finish(conversation)
    n = len(before.tokens)
    assert after.tokens[:n].tolist() == before.tokens.tolist()
    assert after.mask[:n].tolist() == before.mask.tolist()
    assert after.segments == (Segment(0, n), Segment(n, len(after.tokens)))
    assert prompt == template.encode(template.render(conversation.messages[:-1], generate=True))
    assert "hm" not in template.decode(prompt)
    assert after.tokens[after.mask == 1].tolist() == first + second


def test_thinking_that_stays_in_a_tool_loop_opens_no_segment() -> None:
    template = thinking()
    conversation = Conversation(template)
    conversation.add({"role": "user", "content": "12"})
    conversation.prompt()
    say(conversation, [*template.encode("<think>hm</think>call"), template.stop_ids[0]])
    conversation.add({"role": "tool", "content": "123"})
    conversation.prompt()
    assert conversation.forks == 0


def test_white_space_that_the_template_trims_keeps_the_sampled_ids() -> None:
    source = CHAT_TEMPLATE.replace("{{- message.content }}", "{{- message.content | trim }}")
    template = template_of(source, END, "<|user|>", "<|assistant|>", "<|tool|>")
    conversation = Conversation(template)
    conversation.add({"role": "user", "content": "hi"})
    prompt = conversation.prompt().tolist()
    completion = [*template.encode(" he \n"), template.stop_ids[0]]
    say(conversation, completion)
    conversation.add({"role": "tool", "content": "x"})
    expected = prompt + completion + template.encode("<|tool|>x<|end|><|assistant|>")
    assert conversation.prompt().tolist() == expected
    assert conversation.forks == 0


def test_a_rewritten_history_is_refused_by_message_when_no_segments_are_possible() -> None:
    template = thinking()
    conversation = Conversation(template, rewrites="refuse")
    conversation.add({"role": "system", "content": "be"}, {"role": "user", "content": "12"})
    conversation.add({"role": "tool", "content": "x"})
    conversation.prompt()
    say(conversation, [*template.encode("<think>hm</think>ok"), template.stop_ids[0]])
    conversation.add({"role": "user", "content": "more"})
    with pytest.raises(TemplateError, match="not prefix-stable at message 3"):
        conversation.prompt()


def test_mask_is_1_exactly_on_sampled_ids_over_three_turns() -> None:
    template = tiny()
    conversation = Conversation(template)
    expected: list[int] = []
    for text in ("he", "1 23", "hello"):
        length = len(conversation)
        conversation.add({"role": "user", "content": "q"})
        expected += [0] * (len(conversation.prompt()) - length)
        ids = [*template.encode(text), template.stop_ids[0]]
        say(conversation, ids)
        expected += [1] * len(ids)
    assert finish(conversation).mask.tolist() == expected


def test_version_spans_count_from_the_row_and_equal_neighbours_are_one() -> None:
    template = tiny()
    conversation = Conversation(template)
    conversation.add({"role": "user", "content": "q"})
    n = len(conversation.prompt())
    three, logprobs = np.asarray([1, 2, 3], np.int32), np.zeros(3, np.float32)
    conversation.sample(three, logprobs, (Span(0, 4, 4), Span(2, 5, 4)))
    conversation.add({"role": "user", "content": "q"})
    m = len(conversation.prompt())
    conversation.sample(three, logprobs, (Span(0, 5, 4), Span(1, 5, 5)))
    assert finish(conversation).versions == (Span(n, 4, 4), Span(n + 2, 5, 4), Span(m + 1, 5, 5))


def test_a_prompt_beyond_the_budget_records_nothing() -> None:
    conversation = Conversation(tiny())
    conversation.add({"role": "user", "content": "a long question"})
    with pytest.raises(LimitReached, match="at most 5 fit"):
        conversation.prompt(at_most=5)
    assert len(conversation) == 0


def test_logprobs_of_another_length_are_refused() -> None:
    conversation = Conversation(tiny())
    with pytest.raises(SchemaError, match="got 1 for 2"):
        conversation.sample(np.asarray([1, 2], np.int32), np.zeros(1, np.float32))


def test_cutting_a_trajectory_cuts_every_array_alike() -> None:
    template = thinking()
    conversation = Conversation(template)
    for text in ("<think>a</think>b", "<think>c</think>d"):
        conversation.add({"role": "user", "content": "q"})
        conversation.prompt()
        say(conversation, [*template.encode(text), template.stop_ids[0]])
    whole = finish(conversation)
    for length in range(len(whole.tokens) + 1):
        part = whole.cut(length)
        assert len(part.tokens) == len(part.mask) == len(part.logprobs) == length
        assert part.tokens.tolist() == whole.tokens[:length].tolist()
        assert not part.segments or part.segments[-1].end == length


def test_the_prompt_handed_out_cannot_be_written_to() -> None:
    conversation = Conversation(tiny())
    conversation.add({"role": "user", "content": "q"})
    prompt = conversation.prompt()
    with pytest.raises(ValueError, match="read-only"):
        prompt[0] = 1


def test_bytes_that_are_no_text_stay_as_they_were_sampled() -> None:
    template = tiny()
    half = bpe(END).encode("é").ids[:1]
    conversation = Conversation(template)
    conversation.add({"role": "user", "content": "q"})
    conversation.prompt()
    assert say(conversation, [*half, template.stop_ids[0]]) == "�"
    conversation.add({"role": "user", "content": "q"})
    conversation.prompt()
    assert conversation.forks == 0
    assert finish(conversation).tokens[finish(conversation).mask == 1].tolist() == [*half, template.stop_ids[0]]
