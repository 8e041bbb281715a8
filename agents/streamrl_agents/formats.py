"""The formats of tool calls by name: they belong to the model and not to the environment.

hermes       Qwen, Hermes, the tiny models   <tool_call>{"name": "get", "arguments": {"key": "ab"}}</tool_call>
llama3_json  Llama 3.1 to 3.3                {"name": "get", "parameters": {"key": "ab"}}
pythonic     Llama 3.2 and 4                 [get(key="ab"), get(key="cd")]
mistral      Mistral                         [TOOL_CALLS] [{"name": "get", "arguments": {"key": "ab"}}]
deepseek     DeepSeek V3, V3.1, R1           marks of its own around the name and the arguments
json         any model that is told so       {"name": "get", "arguments": {"key": "ab"}}
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, Final

from streamrl_queue.errors import ConfigError

from .parsing import LOOKAHEAD, Malformed, Scanned, ToolCall, ToolFormat, call_of, decode, end_of_space, malformed

AUTO: Final = "auto"
# Of a turn of Python literals, and how deep its lists and dicts may be nested.
MOST_CHARACTERS: Final = 1 << 16
MOST_DEPTH: Final = 64

_PYTHON_TAG: Final = "<|python_tag|>"


class HermesFormat(ToolFormat):
    """`<tool_call>{"name": "get", "arguments": {"key": "ab"}}</tool_call>`, any number of them in a turn.

    Also understood: several objects in one block, and white space around them. The JSON is read from the
    opening tag on, so that a closing tag inside a string does not end the call.
    """

    _open: Final = "<tool_call>"
    _close: Final = "</tool_call>"

    def render(self, *calls: ToolCall) -> str:
        return "\n".join(f"{self._open}{_json(call, 'arguments')}{self._close}" for call in calls)

    def scan(self, text: str, position: int, complete: bool) -> Scanned | None:
        start = text.find(self._open, position)
        return None if start < 0 else self._block(text, start + len(self._open), complete)

    def _block(self, text: str, position: int, complete: bool) -> Scanned | None:
        """The calls between an opening tag, which ends at `position`, and its closing tag."""
        calls: list[ToolCall] = []
        while True:
            position = end_of_space(text, position)
            if text.startswith(self._close, position):
                calls = calls or [malformed(f"nothing between {self._open} and {self._close}")]
                return calls, position + len(self._close)
            if position == len(text) and not complete:
                return None
            if position == len(text) or text.startswith(self._open, position):
                return [malformed(f"{self._close} is missing")], position  # nobody knows whether it was all said
            try:
                decoded = decode(text, position, complete)
            except Malformed as error:
                return [*calls, malformed(error)], position
            if decoded is None:
                return None
            value, position = decoded
            calls.append(call_of(value))


class MistralFormat(ToolFormat):
    """`[TOOL_CALLS] [{"name": "get", "arguments": {"key": "ab"}}, …]`, or `[TOOL_CALLS]get[ARGS]{"key": "ab"}`."""

    _open: Final = "[TOOL_CALLS]"
    _named: Final = re.compile(r"([^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]]*)?\[ARGS\]\s*")

    def render(self, *calls: ToolCall) -> str:
        return f"{self._open} [{', '.join(_json(call, 'arguments') for call in calls)}]"

    def scan(self, text: str, position: int, complete: bool) -> Scanned | None:
        start = text.find(self._open, position)
        if start < 0:
            return None
        position = end_of_space(text, start + len(self._open))
        try:
            return self._calls(text, position, complete)
        except Malformed as error:
            return [malformed(error)], position

    def _calls(self, text: str, position: int, complete: bool) -> Scanned | None:
        if text.startswith(("[", "{"), position):
            decoded = decode(text, position, complete)
            if decoded is None:
                return None
            value, position = decoded
            values = value if isinstance(value, list) else [value]
            return [call_of(each) for each in values] or [malformed("no call in the list")], position
        head = self._named.match(text, position)
        if head is None:
            if complete:
                raise Malformed(f"expected a JSON array behind {self._open}")
            return None
        decoded = decode(text, head.end(), complete)
        return None if decoded is None else ([call_of({"name": head[1], "arguments": decoded[0]})], decoded[1])


class DeepSeekFormat(ToolFormat):
    """The form of V3 and R1, with a code fence around the arguments, and the one of V3.1 without.

    `<｜tool▁call▁begin｜>function<｜tool▁sep｜>get` and a fence ```` ```json ````, or
    `<｜tool▁call▁begin｜>get<｜tool▁sep｜>{"key": "ab"}`; then `<｜tool▁call▁end｜>`.
    """

    _begin: Final = "<｜tool▁call▁begin｜>"
    _separator: Final = "<｜tool▁sep｜>"
    _end: Final = "<｜tool▁call▁end｜>"
    _fenced: Final = re.compile(r"\s*([^\s`{<]+)\s*```(?:json)?\s*")
    _fence_ends: Final = re.compile(r"\s*(?:```)?\s*")

    def render(self, *calls: ToolCall) -> str:
        bodies = (f"function{self._separator}{c.name}\n```json\n{_arguments(c)}\n```" for c in calls)
        blocks = "\n".join(f"{self._begin}{body}{self._end}" for body in bodies)
        return f"<｜tool▁calls▁begin｜>{blocks}<｜tool▁calls▁end｜>"

    def scan(self, text: str, position: int, complete: bool) -> Scanned | None:
        start = text.find(self._begin, position)
        if start < 0:
            return None
        position = start + len(self._begin)
        if not complete and text.find(self._end, position) < 0:
            return None
        try:
            return self._call(text, position, complete)
        except Malformed as error:
            return [malformed(error)], position

    def _call(self, text: str, position: int, complete: bool) -> Scanned | None:
        separator = text.find(self._separator, position)
        nearest = min((at for mark in (self._begin, self._end) if (at := text.find(mark, position)) >= 0), default=-1)
        if separator < 0 or 0 <= nearest < separator:
            raise Malformed(f"{self._separator} is missing")
        name, body = text[position:separator].strip(), separator + len(self._separator)
        if fenced := self._fenced.match(text, body):
            name, body = fenced[1], fenced.end()
        decoded = decode(text, end_of_space(text, body), complete)
        if decoded is None:
            return None
        value, position = decoded
        behind = self._fence_ends.match(text, position)
        position = behind.end() if behind else position
        if text.startswith(self._end, position):
            return [call_of({"name": name, "arguments": value})], position + len(self._end)
        if not complete and position + LOOKAHEAD > len(text):
            return None
        raise Malformed(f"{self._end} is missing")


class JsonFormat(ToolFormat):
    """The turn itself is `{"name": …, "arguments": {…}}`, several of them, or an array of them.

    Arguments may also be called parameters. Objects may be separated by white space, `;` or `,`, and stand in a
    code fence or behind `<|python_tag|>`. Text before the first makes the turn an answer, and so does an object
    with other keys; text behind the last is not read.
    """

    _lead: Final = re.compile(rf"[\s;,]*(?:{re.escape(_PYTHON_TAG)}\s*|```(?:json)?\s*)?")
    _attempt: Final = re.compile(r'\[?\s*\{\s*"(?:name|arguments|parameters|type|id)"\s*:')
    _keys: Final = frozenset({"name", "arguments", "parameters", "type", "id"})

    def __init__(self, key: str, separator: str) -> None:
        self._key = key
        self._separator = separator

    def render(self, *calls: ToolCall) -> str:
        return self._separator.join(_json(call, self._key) for call in calls)

    def scan(self, text: str, position: int, complete: bool) -> Scanned | None:
        lead = self._lead.match(text, position)
        start = lead.end() if lead else position
        if not self._attempt.match(text, start):
            tagged = complete and lead is not None and _PYTHON_TAG in lead[0]
            return ([malformed(f"expected a JSON object behind {_PYTHON_TAG}")], _NOWHERE) if tagged else None
        try:
            decoded = decode(text, start, complete)
        except Malformed as error:
            return [malformed(error)], _NOWHERE
        if decoded is None:
            return None
        value, end = decoded
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, dict) and not each.keys() <= self._keys for each in values):
            return [], _NOWHERE
        return [call_of(self._named(each)) for each in values], end

    def _named(self, value: object) -> object:
        if isinstance(value, dict) and "parameters" in value:
            return {"arguments": value["parameters"]} | value
        return value


class PythonicFormat(ToolFormat):
    """`[get(key="ab"), get(key="cd")]`: the whole turn is a list of calls whose arguments are named literals.

    Nothing is evaluated: Python's own parser makes the tree, and every node but literals, lists and dicts is refused.
    The literals of JSON (`true`, `false`, `null`) are understood too. Nothing is certain before the turn ends.
    """

    _tag: Final = rf"\s*(?:<\|python_start\|>|{re.escape(_PYTHON_TAG)})"
    _lead: Final = re.compile(rf"(?:{_tag}\s*|\s*(?=\[))(?=\[?\s*[A-Za-z_][\w.]*\s*\()")

    def render(self, *calls: ToolCall) -> str:
        return f"[{', '.join(self._render(call) for call in calls)}]"

    def scan(self, text: str, position: int, complete: bool) -> Scanned | None:
        lead = self._lead.match(text, position) if complete else None
        if lead is None:
            return None
        try:
            calls = _calls_of(text[lead.end() :].strip().removesuffix("<|python_end|>"))
        except Malformed as error:
            calls = [malformed(error)]
        return calls, _NOWHERE

    def _render(self, call: ToolCall) -> str:
        return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": HermesFormat(),
    "llama3_json": JsonFormat("parameters", "; "),
    "pythonic": PythonicFormat(),
    "mistral": MistralFormat(),
    "deepseek": DeepSeekFormat(),
    "json": JsonFormat("arguments", "\n"),
}

# What only the templates of one format write, the more particular ones first. None: a format that is not known here.
_SIGNS: Final[tuple[tuple[str, str | None], ...]] = (
    ("<｜tool▁sep｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", None),
    ("<arg_key>", None),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("func_name1(", "pythonic"),
    (_PYTHON_TAG, "llama3_json"),
    ("ipython", "llama3_json"),
)


def tool_format(name: str, template: str = "") -> ToolFormat | None:
    """The format of that name; for `auto` the one that a chat template's source shows, None when it shows none.

    Raises:
        ConfigError: when there is no format of that name.
    """
    if name == AUTO:
        found = next((form for sign, form in _SIGNS if sign in template), None)
        return FORMATS[found] if found else None
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(f"tool_format: expected {AUTO} or one of {', '.join(FORMATS)}, got {name!r}") from None


# A position behind any text: nothing more is read of this turn.
_NOWHERE: Final = 1 << 62


def _json(call: ToolCall, key: str) -> str:
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {_arguments(call)}}}'


def _arguments(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def _calls_of(source: str) -> list[ToolCall]:
    if len(source) > MOST_CHARACTERS:
        raise Malformed(f"{len(source)} characters, at most {MOST_CHARACTERS} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise Malformed(f"not valid Python: {error.msg} (line {error.lineno}, column {error.offset})") from None
    except (ValueError, MemoryError, RecursionError):  # a null byte; nested beyond what the parser takes
        raise Malformed("not valid Python: nested too deep, or not text") from None
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    return [_call_of(node) for node in nodes]


def _call_of(node: ast.expr) -> ToolCall:
    try:
        if not isinstance(node, ast.Call):
            raise Malformed("expected a list of calls, as [name(argument=1)]")
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise Malformed("expected arguments with names, as name(argument=1)")
        names = [str(keyword.arg) for keyword in node.keywords]
        if len(set(names)) < len(names):
            raise Malformed("an argument is given twice")
        values = [_literal(keyword.value, MOST_DEPTH) for keyword in node.keywords]
        return call_of({"name": _name(node.func), "arguments": dict(zip(names, values, strict=True))})
    except Malformed as error:
        return malformed(error)


def _name(node: ast.expr) -> str:
    """`name` or `module.name`."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise Malformed("expected the name of a tool before the arguments")
    return ".".join([node.id, *reversed(parts)])


_JSON_NAMES: Final = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr, depth: int) -> Any:
    if depth == 0 and isinstance(node, ast.List | ast.Tuple | ast.Dict):
        raise Malformed(f"nested too deep: at most {MOST_DEPTH} lists and dicts in each other are read")
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, depth - 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value, depth - 1) for key, value in zip(keys, values, strict=True)}
    raise Malformed("expected literals as arguments: text, numbers, True, False, None, lists and dicts")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise Malformed("expected text as the keys of a dict")
