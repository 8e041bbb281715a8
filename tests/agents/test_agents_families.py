"""Token exactness with the chat templates of real families: the ids are the template's own, or a new segment opens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from agents_families import FAMILIES, family_template
from agents_support import Script, ids_of, lookup, play, sampled
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_agents.conversation import Conversation
from streamrl_agents.demonstrations import play_many
from streamrl_agents.formats import FORMATS
from streamrl_agents.parsing import ToolCall
from streamrl_agents.template import ChatTemplate
from streamrl_queue.errors import ConfigError, TemplateError
from streamrl_queue.schema import Segment, Span, Trajectory

USER = {"role": "user", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": "get", "description": "Get.", "parameters": {}}}]

texts = st.text(st.sampled_from("helo12 \n{}é語"), max_size=12)
clean = texts.map(str.strip)
# These only append, whatever is said in them.
STABLE = ["chatml", "smollm2", "zephyr", "qwen2.5", "llama3", "gemma", "deepseek", "mistral"]
stable = pytest.mark.parametrize("name", STABLE)
families = pytest.mark.parametrize("name", sorted(FAMILIES))


def say(conversation: Conversation, ids: Sequence[int]) -> str:
    return conversation.sample(np.asarray(ids, np.int32), np.full(len(ids), -0.5, np.float32), (Span(0, 1, 1),))


def finish(conversation: Conversation) -> Trajectory:
    return conversation.trajectory(status="completed", sampling={})


def rendered(template: ChatTemplate, conversation: Conversation, tools: Sequence[Any] = ()) -> str:
    return template.render(conversation.messages, tools, generate=True)


def squeezed(text: str) -> str:
    """A text without white space: templates may trim what was sampled."""
    return "".join(text.split())


def turn(template: ChatTemplate, text: str) -> list[int]:
    """A turn as its model writes it best: in the tokens of the rendering, with the end that the template writes."""
    space = " " if "mistral" in template.source.lower() else ""
    return [*template.encode_behind(space + text), template.end_id]


@st.composite
def new_messages(draw: Any, name: str, first: bool) -> list[dict[str, str]]:
    family = FAMILIES[name]
    system = [{"role": "system", "content": draw(clean)}] if first and family.system and draw(st.booleans()) else []
    if first or "tool" not in family.roles or draw(st.booleans()):
        return [*system, {"role": "user", "content": draw(clean)}]
    return [{"role": "tool", "content": text} for text in draw(st.lists(clean, min_size=1, max_size=3))]


@stable
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_incremental_ids_equal_the_full_rendering_of_a_template_that_only_appends(name: str, data: Any) -> None:
    template = family_template(name)
    tools = TOOLS if name != "mistral" and data.draw(st.booleans()) else []
    conversation = Conversation(template, tools)
    for number in range(data.draw(st.integers(1, 4))):
        messages = data.draw(new_messages(name, first=number == 0))
        conversation.add(*(m for m in messages if name != "mistral" or m["role"] != "system"))
        full = template.encode(rendered(template, conversation, tools))
        assert conversation.prompt().tolist() == full
        say(conversation, turn(template, data.draw(clean)))
    assert conversation.forks == 0


def split(draw: Any, template: ChatTemplate, text: str) -> list[int]:
    """The ids of a text that was cut anywhere first: other tokens than the tokenizer would choose."""
    cuts = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=4))})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    return [i for piece in pieces for i in template.encode_behind(piece)]


@stable
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_turn_keeps_its_own_split_into_tokens_and_what_follows_is_the_templates(name: str, data: Any) -> None:
    template = family_template(name)
    conversation = Conversation(template)
    ids: list[int] = []
    for number in range(3):
        messages = data.draw(new_messages(name, first=number == 0))
        conversation.add(*(m for m in messages if name != "mistral" or m["role"] != "system"))
        text = rendered(template, conversation)
        prompt = conversation.prompt().tolist()
        assert prompt[: len(ids)] == ids
        assert squeezed(template.decode(prompt)) == squeezed(text)
        turn_ids = [*split(data.draw, template, data.draw(clean)), template.end_id]
        say(conversation, turn_ids)
        ids = prompt + turn_ids
    assert conversation.forks == 0


@st.composite
def any_turn(draw: Any, template: ChatTemplate) -> list[int]:
    """Thoughts, calls, words, marks of roles and bytes that are no text, in any split; ended in any way or not."""
    some = st.sampled_from(
        ["<think>\nhe\n</think>\n\n", "<think></think>", "</think>", " he", "llo\n", '{"a": 1}', "語"]
    )
    any_id = st.integers(0, template.tokenizer.get_vocab_size() - 1).filter(lambda i: i not in template.stop_ids)
    pieces = draw(st.lists(some.map(template.encode_behind) | any_id.map(lambda i: [i]), max_size=5))
    end = draw(st.sampled_from([[template.end_id]] * 4 + [[], [template.stop_ids[0]]]))
    return [*(i for piece in pieces for i in piece), *end]


@families
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_every_prompt_is_what_the_template_says_or_opens_a_new_segment_that_is(name: str, data: Any) -> None:
    template = family_template(name)
    tools = TOOLS if data.draw(st.booleans()) else []
    conversation = Conversation(template, tools)
    said: list[int] = []
    for number in range(4):
        conversation.add(*data.draw(new_messages(name, first=number == 0)))
        before, segments = finish(conversation), conversation.forks
        prompt = conversation.prompt().tolist()
        after = finish(conversation)
        n = len(before.tokens)
        assert after.tokens[:n].tolist() == before.tokens.tolist()
        assert after.mask.tolist() == [*before.mask.tolist(), *[0] * (len(after.tokens) - n)]
        full = rendered(template, conversation, tools)
        if number == 0 or conversation.forks > segments:
            assert prompt == template.encode(full) == after.tokens[n:].tolist()
        else:
            assert prompt == after.tokens[after.segments[-1].start :].tolist()
            assert squeezed(template.decode(prompt)) == squeezed(full)
        ids = data.draw(any_turn(template))
        say(conversation, ids)
        said += ids
    assert sampled(finish(conversation)) == said


def two_turns(template: ChatTemplate, first: str, *messages: dict[str, str], tools: Sequence[Any] = ()) -> Conversation:
    """A conversation of one turn, with the prompt of the second."""
    conversation = Conversation(template, tools)
    conversation.add(USER)
    conversation.prompt()
    say(conversation, turn(template, first))
    conversation.add(*messages)
    conversation.prompt()
    return conversation


TOOL = {"role": "tool", "content": "12"}
THOUGHT = "<think>\nhm\n</think>\n\nhello"


@pytest.mark.parametrize(
    ("name", "first", "messages", "tools"),
    [
        ("qwen3", THOUGHT, [USER], []),
        ("qwen3", "<think>\n\n</think>\n\nhello", [TOOL], []),  # a thought that is empty is not kept
        ("deepseek-r1", "hm</think>hello", [USER], []),
        ("deepseek-r1", "hello", [TOOL], []),
        ("deepseek", "hello", [{"role": "system", "content": "be brief"}, USER], []),
        ("qwen3", "<think>hm</think>hello", [TOOL], []),  # it gets line feeds
        ("mistral", "hello", [{"role": "user", "content": "more"}], TOOLS),  # they move to the last question
    ],
)
def test_a_template_that_rewrites_history_opens_a_segment_with_its_own_mask(
    name: str, first: str, messages: list[dict[str, str]], tools: list[Any]
) -> None:
    template = family_template(name)
    conversation = two_turns(template, first, *messages, tools=tools)
    assert conversation.forks == 1
    trajectory = finish(conversation)
    n = trajectory.segments[0].end
    assert trajectory.segments == (Segment(0, n), Segment(n, len(trajectory.tokens)))
    assert trajectory.tokens[n:].tolist() == template.encode(rendered(template, conversation, tools))
    assert trajectory.mask[n:].tolist() == [0] * (len(trajectory.tokens) - n)
    assert sampled(trajectory) == turn(template, first)


@pytest.mark.parametrize(
    ("name", "first", "messages"),
    [
        ("qwen3", THOUGHT, [TOOL, TOOL]),
        ("qwen3", "hello", [USER]),
        ("qwen2.5", THOUGHT, [USER]),
        ("deepseek", "hello", [TOOL, TOOL]),
        ("llama3", " hello\n", [TOOL]),
        ("gemma", "hello \n", [USER]),
        ("mistral", "hello", [USER]),
    ],
)
def test_where_the_template_keeps_what_was_said_the_row_stays_one_segment(
    name: str, first: str, messages: list[dict[str, str]]
) -> None:
    conversation = two_turns(family_template(name), first, *messages)
    assert len(finish(conversation).segments) == 1


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "deepseek"])
def test_tool_answers_that_the_template_merges_behind_a_prompt_open_a_new_segment(name: str) -> None:
    template = family_template(name)
    conversation = two_turns(template, "hello", TOOL)
    conversation.add(TOOL)
    prompt = conversation.prompt().tolist()
    assert conversation.forks == 1
    assert prompt == template.encode(rendered(template, conversation))


@pytest.mark.parametrize(("name", "text"), [("smollm2", "You are a small assistant."), ("qwen2.5", "You are Qwen.")])
def test_a_default_system_prompt_is_there_once_however_long_the_conversation(name: str, text: str) -> None:
    template = family_template(name)
    conversation = two_turns(template, "hello", USER)
    for _ in range(3):
        say(conversation, turn(template, "hello"))
        conversation.add(USER)
        conversation.prompt()
    assert conversation.forks == 0
    assert template.decode(finish(conversation).tokens.tolist()).count(text) == 1


@families
def test_the_end_of_a_turn_is_the_one_that_the_template_writes(name: str) -> None:
    template = family_template(name)
    assert template.decode([template.end_id]) == FAMILIES[name].end


@stable
def test_a_sampled_end_of_turn_has_mask_1_and_the_separator_behind_it_0(name: str) -> None:
    template = family_template(name)
    conversation = two_turns(template, "hello", USER)
    trajectory = finish(conversation)
    last = int(np.flatnonzero(trajectory.mask)[-1])
    assert trajectory.tokens[last] == template.end_id
    assert not trajectory.mask[last + 1 :].any()
    assert trajectory.tokens.tolist() == template.encode(rendered(template, conversation))


@stable
def test_an_end_of_turn_that_was_not_sampled_is_added_with_mask_0(name: str) -> None:
    template = family_template(name)
    conversation = Conversation(template)
    conversation.add(USER)
    conversation.prompt()
    said = turn(template, "hello")[:-1]
    say(conversation, said)
    conversation.add(USER)
    prompt = conversation.prompt().tolist()
    assert prompt == template.encode(rendered(template, conversation))
    assert sampled(finish(conversation)) == said


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_another_end_than_the_templates_stays_as_it_was_sampled_and_the_next_prompt_is_a_new_segment(name: str) -> None:
    template = family_template(name)
    conversation = Conversation(template)
    conversation.add(USER)
    conversation.prompt()
    said = [*turn(template, "hello")[:-1], template.stop_ids[0]]
    assert say(conversation, said) == "hello"
    conversation.add(USER)
    assert conversation.prompt().tolist() == template.encode(rendered(template, conversation))
    assert (conversation.forks, sampled(finish(conversation))) == (1, said)


@stable
def test_pieces_of_characters_stay_as_they_were_sampled(name: str) -> None:
    template = family_template(name)
    whole = template.encode_behind("語")
    for length in range(1, len(whole) + 1):
        conversation = Conversation(template)
        conversation.add(USER)
        conversation.prompt()
        said = [*whole[:length], template.end_id]
        assert set(say(conversation, said)) == {"語" if length == len(whole) else "�"}
        conversation.add(USER)
        conversation.prompt()
        assert (conversation.forks, sampled(finish(conversation))) == (0, said)


def test_placeholders_of_an_image_are_passed_through_and_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = family_template("gemma")
    encoded: list[str] = []
    encode = template.encode
    monkeypatch.setattr(template, "encode", lambda text: encoded.append(text) or encode(text))
    image = template.tokenizer.token_to_id("<image_soft_token>")
    conversation = Conversation(template)
    parts = [{"type": "image"}, {"type": "text", "text": "<image_soft_token>" * 7 + "what is it?"}]
    conversation.add({"role": "user", "content": parts})
    assert conversation.prompt().tolist().count(image) == 7
    say(conversation, [image, *turn(template, "hello")])
    for text in ("and?", "so?"):
        conversation.add({"role": "user", "content": text})
        prompt = conversation.prompt().tolist()
        assert prompt.count(image) == 8
        say(conversation, turn(template, "hello"))
    assert sum(text.count("<image_soft_token>") for text in encoded) == 7
    assert finish(conversation).mask[finish(conversation).tokens == image].tolist() == [0] * 7 + [1]


@families
def test_the_format_of_tool_calls_is_read_off_the_template(name: str) -> None:
    form = FAMILIES[name].tool_format
    assert family_template(name).tool_format is (FORMATS[form] if form else None)
    assert family_template(name).structured_calls == (name == "mistral")


TASK = {"keys": ["ab", "cd"], "value": 42}


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3", "mistral", "deepseek"])
def test_an_episode_with_tools_is_what_the_family_would_have_seen(name: str) -> None:
    template = family_template(name)
    form = template.needed_tool_format("Lookup")
    calls = [form.render(ToolCall("get", {"key": key})) for key in ("ab", "cd")]
    script = Script(template, calls[0], "<tool_call>{" if name.startswith("qwen") else calls[0], calls[1], "Answer: 42")
    trajectory = play(lookup(), task=TASK, template=template, generate=script)
    assert (trajectory.status, trajectory.outcome, trajectory.turns) == ("completed", 1.0, 4)
    assert sampled(trajectory) == ids_of(script.turns)
    text = template.decode(trajectory.tokens.tolist())
    assert "see cd" in text
    assert "value 42" in text
    assert trajectory.metrics["tool_calls"] == (2.0 if name.startswith("qwen") else 3.0)
    # A call gets an id from Mistral's template that the model did not write: each answer opens a new segment.
    assert trajectory.metrics["forks"] == (3.0 if name == "mistral" else 0.0)


def test_a_call_that_was_not_understood_is_answered_where_the_template_wants_calls_by_themselves() -> None:
    template = family_template("mistral")
    good = FORMATS["mistral"].render(ToolCall("get", {"key": "ab"}), ToolCall("get", {"key": "cd"}))
    trajectory = play(lookup(), "[TOOL_CALLS] [{", good, "Answer: 42", task=TASK, template=template)
    assert (trajectory.status, trajectory.outcome, trajectory.metrics["parse_errors"]) == ("completed", 1.0, 1.0)
    last = template.decode(trajectory.tokens[trajectory.segments[-1].start :].tolist())
    assert last.count("[TOOL_RESULTS]") == 3
    assert "tool call not understood" in last


def test_a_template_without_a_role_for_tools_is_refused_before_anything_is_played() -> None:
    with pytest.raises(ConfigError, match="Lookup has tools, but the chat template refuses their answers"):
        play(lookup(), task=TASK, template=family_template("gemma", "json"))


def test_a_template_without_a_role_for_tools_refuses_their_answers_by_name() -> None:
    conversation = Conversation(family_template("gemma"))
    conversation.add(USER)
    conversation.prompt()
    say(conversation, turn(family_template("gemma"), "hello"))
    conversation.add(TOOL)
    with pytest.raises(
        TemplateError, match=r"refuses messages of roles \[user, assistant, tool\]: roles must alternate"
    ):
        conversation.prompt()


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3", "deepseek"])
def test_scripted_turns_end_as_the_template_ends_them(name: str) -> None:
    import random

    template = family_template(name)
    for ids, mask in play_many(lookup(), template, random.Random(0), False, 3):
        ends = [i for i in np.flatnonzero(mask) if i + 1 == len(ids) or not mask[i + 1]]
        assert {int(ids[i]) for i in ends} == {template.end_id}
