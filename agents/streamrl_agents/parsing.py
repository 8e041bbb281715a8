"""The model's text -> tool calls. A call that cannot be understood stays a call, with the error as its answer.

Each format (formats.py) scans a turn from left to right and says only what no further text could change. So a turn
that comes piece by piece gives the same calls wherever it is cut, each as soon as it is certain.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import Any, Final, NoReturn

import msgspec

_SPACE: Final = re.compile(r"\s*")
_THOUGHT: Final = "<think>"
_THOUGHT_ENDS: Final = "</think>"
# No literal of JSON and no mark of a format is longer: what stands so far before the end of a text is no part of one.
LOOKAHEAD: Final = 32


class ToolCall(msgspec.Struct, frozen=True):
    """One call that the model made. `error` is set when it could not be understood; then it is never executed."""

    name: str
    arguments: dict[str, Any] = {}
    error: str | None = None


Scanned = tuple[list[ToolCall], int]


class ToolFormat(ABC):
    """How a family of models writes its tool calls."""

    def parse(self, text: str, *, thinking: bool = False) -> tuple[ToolCall, ...]:
        """The calls in one complete turn, in order; none when the turn is an answer. `thinking` as in `CallStream`."""
        stream = CallStream(self, thinking=thinking)
        return (*stream.feed(text), *stream.close())

    @abstractmethod
    def render(self, *calls: ToolCall) -> str:
        """The text that a model of this family would write for `calls`, all in one turn."""

    @abstractmethod
    def scan(self, text: str, position: int, complete: bool) -> Scanned | None:
        """The next calls in `text` from `position` on, and where to read on.

        None when there are none yet. Unless the text is `complete`, more may follow: then only that is told which
        holds whatever follows.
        """


class CallStream:
    """Reads the calls of one turn that comes in pieces.

    What a turn thinks (`<think>…</think>` at its beginning) is no call. `thinking` says that the prompt has opened
    the thought already, as the templates of some reasoning models do.
    """

    def __init__(self, form: ToolFormat, *, thinking: bool = False) -> None:
        self._form = form
        self._text = ""
        self._thinking = thinking
        self._position: int | None = None  # None while the thought lasts

    def __repr__(self) -> str:
        return f"<CallStream {type(self._form).__name__}, {len(self._text)} characters>"

    def feed(self, piece: str) -> tuple[ToolCall, ...]:
        """The calls that are certain now and were not before."""
        self._text += piece
        return self._read(complete=False)

    def close(self) -> tuple[ToolCall, ...]:
        """The turn has ended: the calls that remain."""
        return self._read(complete=True)

    def _read(self, complete: bool) -> tuple[ToolCall, ...]:
        if self._position is None:
            self._position = self._end_of_thought(complete)
        calls: list[ToolCall] = []
        while self._position is not None:
            scanned = self._form.scan(self._text, self._position, complete)
            if scanned is None:
                break
            calls += scanned[0]
            self._position = scanned[1]
        return tuple(calls)

    def _end_of_thought(self, complete: bool) -> int | None:
        beginning = self._text.lstrip()[: len(_THOUGHT)]
        if self._thinking or beginning == _THOUGHT:
            end = self._text.find(_THOUGHT_ENDS)
            return None if end < 0 else end + len(_THOUGHT_ENDS)
        return None if _THOUGHT.startswith(beginning) and not complete else 0


class Malformed(Exception):
    """Text that is meant as a call and is none. Its message is for the model."""


def malformed(reason: object) -> ToolCall:
    """The call that stands for text which could not be understood."""
    return ToolCall("", error=f"error: tool call not understood: {reason}")


def plain(error: msgspec.ValidationError) -> str:
    """The message as a model reads it best: ``Expected `object`, got `array` `` -> `expected object, got array`."""
    text = str(error).replace("`", "")
    return text[:1].lower() + text[1:]


def end_of_space(text: str, position: int) -> int:
    """The next position that is no white space, or the end."""
    space = _SPACE.match(text, position)
    return space.end() if space else position


class _Body(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


def call_of(value: object) -> ToolCall:
    """The call that a decoded `{"name": …, "arguments": {…}}` describes, or a malformed one."""
    try:
        body = msgspec.convert(value, _Body)
    except msgspec.ValidationError as error:
        return malformed(plain(error))
    if not body.name:
        return malformed("the name is empty")
    try:
        json.dumps([body.name, body.arguments], ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # no tokenizer, file or socket takes it
        return malformed("a text has half a character (a lone surrogate)")
    except ValueError:
        return malformed("a number is not finite or has too many digits")
    return ToolCall(body.name, body.arguments)


def decode(text: str, position: int, complete: bool) -> tuple[Any, int] | None:
    """The JSON value at `position` and where it ends; None while more text could change either.

    Raises:
        Malformed: when it is not valid JSON, whatever follows.
    """
    try:
        value, end = _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        open_ended = error.msg.startswith("Unterminated") or error.pos + LOOKAHEAD > len(text)
        if open_ended and not complete:
            return None
        raise Malformed(f"not valid JSON: {error}") from None
    except RecursionError:
        raise Malformed("not valid JSON: nested too deep") from None
    except ValueError:
        raise Malformed("not valid JSON: a number that is not finite or has too many digits") from None
    certain = complete or isinstance(value, dict | list | str) or end + LOOKAHEAD <= len(text)
    return (value, end) if certain else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse)
