"""The model's text -> tool calls. A call that cannot be understood stays a call, with the error as its answer.

Formats are kept in a registry by name, because the format belongs to the model and not to the environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from streamrl_queue.errors import ConfigError


class ToolCall(msgspec.Struct, frozen=True):
    """One call that the model made. `error` is set when it could not be understood; then it is never executed."""

    name: str
    arguments: dict[str, Any] = {}
    error: str | None = None


class ToolFormat(Protocol):
    """How a family of models writes its tool calls."""

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in one complete turn, in order; none when the turn is an answer."""
        ...

    def render(self, call: ToolCall) -> str:
        """The text that a model of this family would write for `call`."""
        ...


class _Body(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_SPACE: Final = re.compile(r"\s*")
_DECODER: Final = json.JSONDecoder()


class HermesFormat:
    """`<tool_call>{"name": "get", "arguments": {"key": "ab"}}</tool_call>`, any number of them in a turn.

    Also understood: several objects in one block, and white space around them. The JSON is read from the
    opening tag on, so that a closing tag inside a string does not end the call.
    """

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        position = text.find(_OPEN)
        while position >= 0:
            found, position = _block(text, position + len(_OPEN))
            calls += found
            position = text.find(_OPEN, position)
        return tuple(calls)

    def render(self, call: ToolCall) -> str:
        body = {"name": call.name, "arguments": call.arguments}
        return f"{_OPEN}{json.dumps(body, ensure_ascii=False)}{_CLOSE}"


FORMATS: Final[Mapping[str, ToolFormat]] = {"hermes": HermesFormat()}


def tool_format(name: str) -> ToolFormat:
    """The format of that name.

    Raises:
        ConfigError: when there is none.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(f"tool_format: expected one of {', '.join(FORMATS)}, got {name!r}") from None


def plain(error: msgspec.ValidationError) -> str:
    """The message as a model reads it best: ``Expected `object`, got `array` `` -> `expected object, got array`."""
    text = str(error).replace("`", "")
    return text[:1].lower() + text[1:]


def _block(text: str, position: int) -> tuple[list[ToolCall], int]:
    """The calls between an opening tag, which ends at `position`, and its closing tag; and where to read on."""
    calls: list[ToolCall] = []
    while True:
        position = _end_of_space(text, position)
        if text.startswith(_CLOSE, position):
            calls = calls or [_malformed(f"nothing between {_OPEN} and {_CLOSE}")]
            return calls, position + len(_CLOSE)
        if position == len(text) or text.startswith(_OPEN, position):  # nobody knows whether it was all said
            return [_malformed(f"{_CLOSE} is missing")], position
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            return [*calls, _malformed(f"not valid JSON: {error}")], _next_tag(text, position)
        calls.append(_call(value))


def _call(value: object) -> ToolCall:
    try:
        body = msgspec.convert(value, _Body)
    except msgspec.ValidationError as error:
        return _malformed(plain(error))
    return ToolCall(body.name, body.arguments)


def _malformed(reason: str) -> ToolCall:
    return ToolCall("", error=f"error: tool call not understood: {reason}")


def _end_of_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _next_tag(text: str, position: int) -> int:
    """Behind a broken block: past its closing tag, or at the next opening one, whichever comes first."""
    close, opening = text.find(_CLOSE, position), text.find(_OPEN, position)
    if close >= 0 and not 0 <= opening < close:
        return close + len(_CLOSE)
    return opening if opening >= 0 else len(text)
