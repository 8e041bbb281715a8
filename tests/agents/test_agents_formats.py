"""Every format of tool calls: what is rendered is parsed back, cuts change nothing, what is broken says so."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from agents_support import Cut, Script, play, template_of, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_agents.config import ToolFormatName
from streamrl_agents.formats import FORMATS, MOST_CHARACTERS, MOST_DEPTH, tool_format
from streamrl_agents.parsing import CallStream, ToolCall
from streamrl_queue.errors import ConfigError

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).map("x_".__add__)
# Marks inside of texts must neither begin nor end a call.
marks = st.sampled_from(["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "<｜tool▁call▁end｜>", '"', "]", "'}", "\\"])
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text() | marks,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
calls = st.lists(
    st.builds(ToolCall, names, st.dictionaries(names, json_values, max_size=3)),
    min_size=1,
    max_size=3,
)
by_name = pytest.mark.parametrize("name", sorted(FORMATS))

# What a model of the family writes, as its own documentation and template show it.
SHOWN = {
    "hermes": ['<tool_call>\n{"name": "get", "arguments": {"key": "ab"}}\n</tool_call>'],
    "llama3_json": [
        '{"name": "get", "parameters": {"key": "ab"}}',
        '<|python_tag|>{"name": "get", "parameters": {"key": "ab"}}',
        '{"type": "function", "name": "get", "parameters": {"key": "ab"}}',
    ],
    "pythonic": [
        '[get(key="ab")]',
        "[get(key='ab')]",
        '<|python_start|>[get(key="ab")]<|python_end|>',
        '<|python_tag|>get(key="ab")',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "get", "arguments": {"key": "ab"}, "id": "abcdefghi"}]',
        '[TOOL_CALLS][{"name": "get", "arguments": {"key": "ab"}}]',
        '[TOOL_CALLS]get[ARGS]{"key": "ab"}',
        '[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{"key": "ab"}',
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
        '{"key": "ab"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{"key": "ab"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "json": [
        '{"name": "get", "arguments": {"key": "ab"}}',
        '```json\n{"name": "get", "arguments": {"key": "ab"}}\n```',
        '[{"arguments": {"key": "ab"}, "name": "get"}]',
    ],
}
# Half a call, or one that says something that is no call.
BROKEN = {
    "hermes": ['<tool_call>{"name": "x_a", "arguments": {"a": 1,,}}</tool_call>', '<tool_call>{"name": "x_a"'],
    "llama3_json": ['{"name": "x_a", "parameters": {"a": 1,,}}', '{"name": "x_a", "parameters": {"te'],
    "pythonic": ["[x_a(a=1,,)]", "[x_a(a='te", "[x_a(1)]", "[x_a(a=b)]", "[x_a(**{})]", "[x_a(a=1, a=2)]"],
    "mistral": ['[TOOL_CALLS] [{"name": "x_a", "arguments": {"a": 1,,}}]', "[TOOL_CALLS] [{", "[TOOL_CALLS] []"],
    "deepseek": [
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>x_a\n```json\n{,}\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>x_a\n```json\n{}\n```",
        "<｜tool▁call▁begin｜>x_a<｜tool▁call▁end｜>",
    ],
    "json": ['{"name": "x_a", "arguments": {"a": 1,,}}', '{"name": "x_a", "arguments": {"te'],
}


def error(name: str, text: str) -> str:
    parsed = FORMATS[name].parse(text)
    assert len(parsed) == 1, parsed
    assert parsed[0].error is not None
    return parsed[0].error


@by_name
@given(expected=calls)
@settings(max_examples=30, deadline=None)
def test_what_is_rendered_is_parsed_back(name: str, expected: list[ToolCall]) -> None:
    assert list(FORMATS[name].parse(FORMATS[name].render(*expected))) == expected


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in SHOWN.items() for text in texts])
def test_what_the_family_writes_is_understood(name: str, text: str) -> None:
    assert FORMATS[name].parse(text) == (ToolCall("get", {"key": "ab"}),)
    assert FORMATS[name].parse(f"<think>maybe {text}</think>\n\n{text}\n") == (ToolCall("get", {"key": "ab"}),)


@by_name
def test_a_call_that_is_only_thought_of_is_no_call(name: str) -> None:
    text = SHOWN[name][0]
    assert FORMATS[name].parse(f"<think>{text}</think>No.") == ()
    assert FORMATS[name].parse(f"<think>{text}") == ()
    assert FORMATS[name].parse(f"{text}</think>No.", thinking=True) == ()
    assert FORMATS[name].parse(f"hm</think>{text}", thinking=True) == (ToolCall("get", {"key": "ab"}),)


@by_name
@pytest.mark.parametrize("text", ["", " \n", "Answer: 42", "I would call get.", "[1, 2]", "[x] done", '{"x": 1}', "{"])
def test_an_answer_is_no_call(name: str, text: str) -> None:
    assert FORMATS[name].parse(text) == ()


@pytest.mark.parametrize("name", ["json", "llama3_json"])
def test_an_answer_in_json_is_no_call(name: str) -> None:
    assert FORMATS[name].parse('{"name": "Bob", "age": 3}') == ()
    assert FORMATS[name].parse('[{"name": "Bob", "age": 3}]') == ()
    assert FORMATS[name].parse('So: {"name": "get", "arguments": {}}') == ()


@st.composite
def noisy(draw: Any) -> tuple[str, str]:
    """A format and a turn of whole calls, broken ones, marks, and pieces of any of these."""
    name = draw(st.sampled_from(sorted(FORMATS)))
    whole = calls.map(lambda some: FORMATS[name].render(*some))
    known = st.sampled_from(
        [*SHOWN[name], *BROKEN[name], "<think>", "</think>", " ", "\n", "; ", "{", "[", '"', "x" * 40]
    )
    cut = st.tuples(known | whole, st.integers(0, 60), st.integers(0, 60)).map(lambda p: p[0][p[1] : p[1] + p[2]])
    return name, "".join(draw(st.lists(known | whole | cut, max_size=5)))


@given(data=st.data(), turn=noisy(), thinking=st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_turn_in_pieces_gives_the_same_calls_at_every_cut(data: Any, turn: tuple[str, str], thinking: bool) -> None:
    name, text = turn
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    expected = FORMATS[name].parse(text, thinking=thinking)
    stream = CallStream(FORMATS[name], thinking=thinking)
    got: list[ToolCall] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        got += stream.feed(text[start:end])
        assert tuple(got) == expected[: len(got)]
    assert (*got, *stream.close()) == expected
    assert all((call.error is None) == bool(call.name) for call in expected)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in (SHOWN | BROKEN).items() for text in texts])
def test_a_turn_in_single_characters_gives_the_same_calls(name: str, text: str) -> None:
    stream = CallStream(FORMATS[name])
    got = [call for character in text for call in stream.feed(character)]
    assert (*got, *stream.close()) == FORMATS[name].parse(text)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"pythonic"}))
def test_a_call_is_known_as_soon_as_it_is_whole(name: str) -> None:
    stream = CallStream(FORMATS[name])
    assert stream.feed(FORMATS[name].render(ToolCall("get", {"key": "ab"}))) == (ToolCall("get", {"key": "ab"}),)
    assert stream.feed(" and more") == stream.close() == ()


@by_name
def test_parallel_calls_keep_their_order(name: str) -> None:
    expected = (ToolCall("a", {"x": 1}), ToolCall("b"), ToolCall("a", {"x": 2}))
    assert FORMATS[name].parse(FORMATS[name].render(*expected)) == expected


@by_name
@pytest.mark.parametrize("value", [[1], None, 3, "x"])
def test_arguments_that_are_no_object_are_named(name: str, value: object) -> None:
    kind = {list: "array", int: "int", str: "str", type(None): "null"}[type(value)]
    if name == "pythonic":
        return  # has no way to say so: what stands between the brackets is named, or refused
    text = FORMATS[name].render(ToolCall("get", {"k": 1})).replace('{"k": 1}', json.dumps(value))
    assert f"expected object, got {kind}" in error(name, text)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_a_broken_call_is_one_call_with_an_error(name: str, text: str) -> None:
    assert error(name, text).startswith("error: tool call not understood: ")


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek"])
def test_a_broken_call_does_not_hide_the_next_one(name: str) -> None:
    for text in BROKEN[name]:
        parsed = FORMATS[name].parse(f"{text}\n{SHOWN[name][0]}")
        assert parsed[0].error is not None
        assert parsed[-1] == ToolCall("get", {"key": "ab"})


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"pythonic"}))
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("[" * 100_000, "nested too deep"),
        ("1" * 5_000, "too many digits"),
        ("NaN", "not finite"),
        ("-Infinity", "not finite"),
        ("1e999", "not finite"),
        (r'"\ud800"', "half a character"),
    ],
)
def test_json_that_nothing_could_be_done_with_is_refused(name: str, value: str, reason: str) -> None:
    text = FORMATS[name].render(ToolCall("get", {"k": 1})).replace('{"k": 1}', f'{{"k": {value}}}')
    assert reason in error(name, text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("-1.5", -1.5),
        ("True", True),
        ("true", True),
        ("null", None),
        ("(1, [2], {'a': None})", [1, [2], {"a": None}]),
        ("'a' 'b'", "ab"),
        (r"'\d'", r"\d"),
        ("'[(\\']'", "[(']"),
        ("[" * MOST_DEPTH + "1" + "]" * MOST_DEPTH, None),
    ],
)
def test_pythonic_arguments_are_literals(value: str, expected: object) -> None:
    (parsed,) = FORMATS["pythonic"].parse(f"[get(k={value})]")
    assert parsed.error is None
    assert expected is None or parsed.arguments == {"k": expected}


@pytest.mark.parametrize(
    "value",
    [
        "__import__('os').system('true')",
        "open('/etc/passwd')",
        "x",
        "[i for i in range(9)]",
        "lambda: 1",
        "f'{1}'",
        "1 + 1",
        "9**9**9",
        "b'x'",
        "1j",
        "...",
        "{1: 2}",
        "{**{}}",
        "{1, 2}",
        "'a' * 9",
        "not True",
        "(x := 1)",
        "1e999",
        r"'\ud800'",
        "0x" + "f" * 9000,
        "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1),
        "[" * 30_000,
        "-" * 30_000 + "1",
        "1+" * 30_000 + "1",
        "a" + ".a" * 30_000,
        "'" + "x" * MOST_CHARACTERS + "'",
        "'\0'",
    ],
)
def test_pythonic_arguments_that_are_no_literals_are_refused_and_never_evaluated(value: str) -> None:
    assert "tool call not understood" in error("pythonic", f"[get(k={value})]")


@pytest.mark.parametrize("text", ["[get(k=1), 3]", "[get(k=1), x[0](k=1)]", "[get(k=1), f()(k=1)]"])
def test_a_pythonic_list_with_something_else_in_it_has_an_error_in_its_place(text: str) -> None:
    parsed = FORMATS["pythonic"].parse(text)
    assert [call.error is None for call in parsed] == [True, False]


class Bench:
    inline = True

    def reset(self, task: dict[str, Any]) -> str:
        return "go"

    def add(self, amount: int) -> int:
        """Add."""
        return amount + 1

    def reward(self, answer: str) -> float:
        return float(answer == "done")


@by_name
def test_calls_of_every_format_are_executed_and_broken_ones_answered(name: str) -> None:
    template = tiny(name)
    both = FORMATS[name].render(ToolCall("add", {"amount": 1}), ToolCall("add", {"amount": 5}))
    script = Script(template, *BROKEN[name], both, "done")
    trajectory = play(Bench, generate=script, template=template, max_turns=10)
    text = template.decode(trajectory.tokens.tolist())
    assert (trajectory.status, trajectory.outcome) == ("completed", 1.0)
    assert text.count("<|tool|>error: tool call not understood: ") == len(BROKEN[name])
    assert "<|tool|>2<|end|><|tool|>6<|end|><|assistant|>" in text
    assert (trajectory.metrics["parse_errors"], trajectory.metrics["tool_calls"]) == (len(BROKEN[name]), 2.0)


@by_name
def test_half_a_call_of_any_format_is_not_executed_wherever_it_was_cut(name: str) -> None:
    text = FORMATS[name].render(ToolCall("add", {"amount": 1}))
    for length in range(1, len(text) + 1):
        trajectory = play(Bench, Cut(text[:length]), template=tiny(name))
        assert (trajectory.status, trajectory.outcome) == ("truncated_length", None)
        assert trajectory.metrics["tool_calls"] == trajectory.metrics["parse_errors"] == 0.0


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS] [", "mistral"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' }}", "deepseek"),
        ("Environment: ipython", "llama3_json"),
        ("<|python_start|>", "pythonic"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
    ],
)
def test_auto_reads_the_format_off_the_template(source: str, name: str) -> None:
    assert tool_format("auto", source) is FORMATS[name]


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "<tool_call>\n<function=", "<tool_call>x<arg_key>"])
def test_a_template_that_shows_no_known_format_is_refused_for_tools_alone(source: str) -> None:
    template = template_of(source, "<|end|>")
    assert template.tool_format is None
    with pytest.raises(ConfigError, match="tool_format: Bench has tools, but the chat template does not show"):
        play(Bench, template=template)

    async def without_tools(task: dict[str, Any], chat: Any) -> float:
        return float((await chat.say("go")).tool_calls == ())

    assert play(without_tools, '<tool_call>{"name": "x"}</tool_call>', template=template).outcome == 1.0


def test_every_format_can_be_configured() -> None:
    assert set(get_args(ToolFormatName)) == {"auto", *FORMATS}


def test_the_configured_format_wins_over_the_template() -> None:
    assert tiny("json").tool_format is FORMATS["json"]
    assert tiny().tool_format is FORMATS["hermes"]
    with pytest.raises(ConfigError, match="tool_format: expected auto or one of hermes"):
        tiny("herms")


def test_a_call_inside_a_thought_that_the_template_opened_is_not_executed() -> None:
    source = (
        "{% for m in messages %}<|x|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|x|><think>\n{% endif %}"
    )
    template = template_of(source, "<|end|>", "<|x|>", tool_format="json")
    call = FORMATS["json"].render(ToolCall("add", {"amount": 1}))
    trajectory = play(Bench, f"{call}</think>done", template=template)
    assert trajectory.metrics["tool_calls"] == 0.0
    trajectory = play(Bench, f"hm</think>{call}", "</think>done", template=template)
    assert trajectory.metrics["tool_calls"] == 1.0
