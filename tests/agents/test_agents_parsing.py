"""A call that cannot be understood stays a call, with the error as its answer; nothing is raised or guessed."""

from __future__ import annotations

import pytest
from agents_support import call
from hypothesis import given
from hypothesis import strategies as st

from streamrl_agents.formats import FORMATS, tool_format
from streamrl_agents.parsing import ToolCall
from streamrl_queue.errors import ConfigError

hermes = FORMATS["hermes"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def error(text: str) -> str:
    (parsed,) = hermes.parse(text)
    assert parsed.error is not None
    return parsed.error


def test_text_without_a_call_is_an_answer() -> None:
    assert hermes.parse('Answer: 42 {"name": "get"}') == ()


def test_a_call_is_parsed_with_text_around_it() -> None:
    assert hermes.parse(f"I look. {call('get', key='ab')} so") == (ToolCall("get", {"key": "ab"}),)


@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=3)), max_size=3))
def test_what_is_rendered_is_parsed_back(calls: list[tuple[str, dict[str, object]]]) -> None:
    expected = tuple(ToolCall(name, arguments) for name, arguments in calls)
    assert hermes.parse("\n".join(map(hermes.render, expected))) == expected


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "a"}', "{", "x", " ", '"']), max_size=12))
def test_any_text_gives_calls_or_errors(pieces: list[str]) -> None:
    for parsed in hermes.parse("".join(pieces)):
        assert (parsed.error is None) == bool(parsed.name)


def test_several_calls_in_a_turn_keep_their_order() -> None:
    parsed = hermes.parse(call("a") + "\n" + call("b", x=1) + call("c"))
    assert [p.name for p in parsed] == ["a", "b", "c"]


def test_two_objects_in_one_block_are_two_calls() -> None:
    text = '<tool_call>{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {}}</tool_call>'
    assert [p.name for p in hermes.parse(text)] == ["a", "b"]


def test_malformed_json_is_an_error_that_says_where() -> None:
    assert "not valid JSON" in error('<tool_call>{"name": "get", "arguments": {"a": 1,,}}</tool_call>')
    assert "line 1" in error('<tool_call>{"name": "get", "arguments": {"a": 1,,}}</tool_call>')


def test_a_string_that_was_cut_off_is_an_error() -> None:
    long = call("write", text="x" * 2000)[:1281]
    assert "not valid JSON: Unterminated string" in error(long)


@pytest.mark.parametrize(("arguments", "kind"), [("[1]", "array"), ("null", "null"), ("3", "int"), ('"x"', "str")])
def test_arguments_that_are_no_object_are_named(arguments: str, kind: str) -> None:
    text = f'<tool_call>{{"name": "get", "arguments": {arguments}}}</tool_call>'
    assert f"expected object, got {kind}" in error(text)


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    parsed = hermes.parse("<tool_call>{oops}</tool_call>" + call("get", key="ab"))
    assert [p.error is None for p in parsed] == [False, True]


def test_a_closing_tag_inside_a_string_does_not_end_the_call() -> None:
    text = call("write", text="</tool_call>")
    assert hermes.parse(text) == (ToolCall("write", {"text": "</tool_call>"}),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call></tool_call>", "nothing between"),
        ("<tool_call>", "</tool_call> is missing"),
        ('<tool_call>{"name": "get", "arguments": {}}', "</tool_call> is missing"),
        ('<tool_call>{"arguments": {}}</tool_call>', "object missing required field name"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ],
)
def test_other_broken_calls_say_what_is_wrong(text: str, reason: str) -> None:
    assert reason in error(text)


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"expected auto or one of hermes, .*, got 'herms'"):
        tool_format("herms")
