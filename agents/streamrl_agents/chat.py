"""One turn after another: the conversation's messages go out, the model's turn comes back, limits hold.

A chat records how its episode stands in `status`. The status of the last turn wins: a later limit cannot be
hidden by code that catches the error and goes on, because a chat that has ended refuses every further turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import trio

from streamrl_queue.errors import LimitReached
from streamrl_queue.schema import Span

from .calling import Caller
from .config import Limits
from .conversation import Conversation
from .parsing import ToolCall, ToolFormat
from .template import LONG_CHARACTERS
from .tools import Toolbox


class Generated(Protocol):
    """What an engine returns: `tokens` and `logprobs` are `[tokens]`, the spans start at this turn's first token."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...
    @property
    def logprobs(self) -> npt.NDArray[np.float32]: ...
    @property
    def spans(self) -> tuple[Span, ...]: ...
    @property
    def finish_reason(self) -> str: ...  # "stop", "length" or "aborted"


# (ids of the context [tokens], most ids to sample) -> one turn
GenerateFn = Callable[[npt.NDArray[np.int32], int], Awaitable[Generated]]


# Told what the episode does from now on, in a few words.
Doing = Callable[[str], None]


def untold(what: str) -> None:
    """For episodes that nobody watches."""


class Message(msgspec.Struct, frozen=True):
    """One turn of the model. A turn that was cut (finish_reason is not "stop") has no calls: half a call never runs."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str


class Chat:
    """The conversation of one episode, as an agent sees it. Without a `tool_format` every turn is an answer."""

    def __init__(
        self,
        conversation: Conversation,
        generate: GenerateFn,
        *,
        limits: Limits,
        tool_format: ToolFormat | None,
        doing: Doing = untold,
    ) -> None:
        self.status = "completed"
        self.error: str | None = None
        self.fault: Exception | None = None  # of the engine, not of the episode
        self.tool_calls = 0
        self.tool_errors = 0
        self.tool_error: str | None = None  # of the last tool that failed
        self.tool_texts_cut = 0
        self.parse_errors = 0
        self.limits = limits
        self.doing = doing
        self._conversation = conversation
        self._generate = generate
        self._format = tool_format

    def __repr__(self) -> str:
        return f"<Chat {self.status}, {self._conversation!r}>"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Every message so far, as `{"role": …, "content": …}`."""
        return [dict(message) for message in self._conversation.messages]

    @property
    def answer(self) -> str:
        """The text of the model's last turn; empty before the first."""
        turns = (m for m in reversed(self._conversation.messages) if m["role"] == "assistant")
        return str(next(turns, {"content": ""})["content"])

    async def say(self, text: str | Sequence[Mapping[str, Any]]) -> Message:
        """Send a user message, or several messages with their roles, and get the model's turn.

        Raises:
            LimitReached: when the episode has no turn, token or time left.
        """
        self._check_turns()
        self._conversation.add(*([{"role": "user", "content": text}] if isinstance(text, str) else text))
        return await self._turn()

    async def tool_results(self, results: Sequence[str]) -> Message:
        """Send the results of the last turn's tool calls, one for each and in their order; get the model's turn.

        Of a text longer than `max_tool_characters` the end is sent, behind a marker.

        Raises:
            ValueError: when their number differs.
            LimitReached: as `say`.
        """
        self._check_turns()
        self._conversation.answer([self._end_of(text) for text in results])
        return await self._turn()

    async def run_tools(
        self, calls: Sequence[ToolCall], tools: Toolbox, caller: Caller, environment: object = None
    ) -> list[str]:
        """Execute calls one after another; errors become the text that the model reads, and are counted.

        Raises:
            LimitReached: when no turn is left to read the results; nothing is executed then.
        """
        self._check_turns()
        return [await self._run(call, tools, caller, environment) for call in calls]

    def end(self, status: str, message: str) -> LimitReached:
        """The episode ends here; the caller raises what this returns."""
        self.status, self.error = status, message
        return LimitReached(message)

    async def _run(self, call: ToolCall, tools: Toolbox, caller: Caller, environment: object) -> str:
        seconds = self.limits.tool_seconds
        self.doing(f"tool `{call.name}`")
        result = await tools.call(call, caller, environment=environment, seconds=seconds)
        self.parse_errors += result.kind == "bad_call"
        if result.kind == "failed":
            self.tool_errors += 1
            self.tool_error = f"tool {call.name}: {result.text.removeprefix('error: ')}"
        self.tool_calls += result.kind != "bad_call"
        return result.text

    def _end_of(self, text: str) -> str:
        """A tool's text, or the end of it where it is too long: what stands last there is the result or the reason.

        Half a character (a lone surrogate, as names of files may have them) becomes `?`: no tokenizer takes one.
        """
        text = text.encode("utf-8", "replace").decode()
        excess = len(text) - self.limits.max_tool_characters
        if excess <= 0:
            return text
        self.tool_texts_cut += 1
        return f"[{excess} characters cut]{text[excess:]}"

    async def _turn(self) -> Message:
        text, reason = await self._sample(await self._prompt())
        if reason != "stop":
            self.status = "truncated_length" if reason == "length" else "aborted"
            return Message(text, (), reason)
        calls = self._format.parse(text, thinking=self._conversation.thinking) if self._format else ()
        self._conversation.call(calls)
        return Message(text, calls, reason)

    def _check_turns(self) -> None:
        if self.status != "completed":
            raise LimitReached(self.error or f"the episode has ended: {self.status}")
        if self._conversation.turns >= self.limits.max_turns:
            raise self.end("truncated_turns", f"the model has had its {self.limits.max_turns} turns (max_turns)")

    async def _prompt(self) -> npt.NDArray[np.int32]:
        """The context of the next turn, with room for one id at least."""
        prompt = partial(self._conversation.prompt, at_most=self.limits.max_tokens - 1)
        try:
            if self._conversation.added_characters < LONG_CHARACTERS:
                return prompt()
            return await trio.to_thread.run_sync(prompt)
        except LimitReached as error:
            status = "truncated_length" if self._conversation.turns else "truncated_prompt"
            raise self.end(status, f"{error} (max_tokens)") from error

    async def _sample(self, prompt: npt.NDArray[np.int32]) -> tuple[str, str]:
        """Sample and record one turn: its text, and why it ended."""
        room = self.limits.max_tokens - len(self._conversation)
        with trio.move_on_after(self.limits.turn_seconds):
            try:
                turn = await self._generate(prompt, min(self.limits.max_turn_tokens, room))
                return self._conversation.sample(turn.tokens, turn.logprobs, turn.spans), turn.finish_reason
            except Exception as error:  # kept so that an engine's failure never passes for the environment's
                self.fault = error
                raise
        number, seconds = self._conversation.turns + 1, self.limits.turn_seconds
        raise self.end(
            "error_timeout", f"turn {number}: waited {seconds:g} s for generate; nothing came (turn_seconds)"
        )
