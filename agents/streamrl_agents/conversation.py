"""Token exactness: a conversation as the ids that the model really saw and sampled.

    messages ──► rendered text:   [ what the segment holds already | what is new ]
                                                │                        │ only this is encoded, mask 0
    generate ◄── ids of the segment ────────────┘◄───────────────────────┘
        └──────► sampled ids, mask 1: appended as they are, never decoded and encoded again

Before each turn the template renders the conversation, and the rendering must begin with the text that the
segment holds. If it does, what follows is new (the separator behind a sampled end-of-turn included, as ids that
nobody sampled). If it differs only in white space that the template trimmed from a sampled turn, the sampled ids
stay. If it differs otherwise, the template has rewritten history: a new segment opens with the whole
conversation as its prompt, and the tokens before keep their mask.

A turn that calls tools stays the text that was sampled, unless the template refuses that and wants the calls by
themselves (`ChatTemplate.structured_calls`); then the template writes them as it likes, and where that is not what was
sampled, history is rewritten.

A template that is `local` (see template.py) is asked only for what came after the last prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from streamrl_queue.errors import LimitReached, SchemaError, TemplateError
from streamrl_queue.schema import Segment, Span, Trajectory

from .parsing import ToolCall
from .template import ChatTemplate, MessageDict, ToolSchema, structured


class _Arrays:
    """Parallel per-token arrays in pieces; the one place where they grow."""

    def __init__(self) -> None:
        self.length = 0
        self._tokens = [np.empty(0, np.int32)]
        self._mask = [np.empty(0, np.uint8)]
        self._logprobs = [np.empty(0, np.float32)]

    def append(self, tokens: npt.NDArray[np.int32], mask: int, logprobs: npt.NDArray[np.float32]) -> None:
        self._tokens.append(tokens)
        self._mask.append(np.full(len(tokens), mask, np.uint8))
        self._logprobs.append(logprobs)
        self.length += len(tokens)

    def tokens(self) -> npt.NDArray[np.int32]:
        self._tokens = [np.concatenate(self._tokens)]
        return self._tokens[0]

    def mask(self) -> npt.NDArray[np.uint8]:
        return np.concatenate(self._mask)

    def logprobs(self) -> npt.NDArray[np.float32]:
        return np.concatenate(self._logprobs)


class Conversation:
    """One attempt's messages and ids.

    `rewrites` says what to do when the template rewrites history: `fork` opens a new segment, `refuse` raises
    `TemplateError` (for uses that have no segments, as supervised warm starts).
    """

    def __init__(
        self,
        template: ChatTemplate,
        tools: Sequence[ToolSchema] = (),
        *,
        rewrites: Literal["fork", "refuse"] = "fork",
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.turns = 0
        self.tokens_sampled = 0
        self.added_characters = 0  # of messages that are not tokens yet
        self.thinking = False  # whether the last prompt opened a thought, which the turn then continues
        self._template = template
        self._tools = tools
        self._rewrites = rewrites
        self._arrays = _Arrays()
        self._spans: list[Span] = []
        self._starts: list[int] = []  # of the segments
        self._called = 0  # tool calls so far
        self._calls: list[str] = []  # ids of those of the last turn
        self._first = 0  # the message from which on the template is asked
        self._skip = 0  # characters of a local template's head
        self._opening: str | None = None  # what a local template writes where the model's turn begins
        self._text = ""  # what the segment holds, from message `_first` on, as the template writes it
        self._prompt_length = 0  # characters of `_text` before the last sampled turn

    def __repr__(self) -> str:
        return (
            f"<Conversation {len(self.messages)} messages, {self._arrays.length} tokens "
            f"({self.tokens_sampled} sampled), {len(self._starts)} segments>"
        )

    def __len__(self) -> int:
        """Tokens recorded so far, over all segments."""
        return self._arrays.length

    @property
    def forks(self) -> int:
        """How often the template rewrote history."""
        return max(0, len(self._starts) - 1)

    def add(self, *messages: MessageDict) -> None:
        """Add messages that the policy did not sample. They become tokens at the next `prompt`."""
        self.messages.extend(dict(message) for message in messages)
        self.added_characters += sum(len(str(message.get("content") or "")) for message in messages)

    def call(self, calls: Sequence[ToolCall]) -> None:
        """The turn that was sampled last calls tools. A call that was not understood is recorded without arguments."""
        self._calls = [f"{self._called + i:09d}" for i in range(len(calls))]
        self._called += len(calls)
        if calls and self._template.structured_calls:
            pairs = zip(self._calls, calls, strict=True)
            self.messages[-1]["tool_calls"] = [structured(i, call.name, call.arguments) for i, call in pairs]

    def answer(self, results: Sequence[str]) -> None:
        """Add the tools' answers to the calls of the last turn, one for each and in their order.

        Raises:
            ValueError: when their number differs.
        """
        if len(results) != len(self._calls):
            raise ValueError(f"results: expected {len(self._calls)}, one for each tool call, got {len(results)}")
        ids = [{"tool_call_id": i} if self._template.structured_calls else {} for i in self._calls]
        self.add(*({"role": "tool", "content": text} | known for text, known in zip(results, ids, strict=True)))

    def prompt(self, at_most: int | None = None) -> npt.NDArray[np.int32]:
        """Record what is new and return the ids of the current segment, `[tokens]`, read-only.

        Raises:
            LimitReached: when the row would hold more than `at_most` tokens; nothing is recorded then. Text that
                cannot fit, however it is split, is not even encoded.
            TemplateError: when the template refuses the messages, or rewrote history and that is refused.
        """
        rendered = self._render(self._first, self._skip)
        known = self._known(rendered)
        fork = known is None
        if fork:
            self._refuse_if_asked(rendered)
            rendered = self._render(0, 0)
        self._check_characters(len(rendered) - (known or 0), at_most)
        encode = self._template.encode_behind if known else self._template.encode
        new = np.asarray(encode(rendered[known or 0 :]), np.int32)
        self._check_length(len(new), at_most)
        if fork or not self._starts:
            self._starts.append(len(self))
        self._arrays.append(new, 0, np.full(len(new), np.nan, np.float32))
        self._anchor(rendered)
        self.added_characters = 0
        self.thinking = rendered[-32:].rstrip().endswith("<think>")
        tokens = self._arrays.tokens()[self._starts[-1] :]
        tokens.flags.writeable = False
        return tokens

    def sample(
        self, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], spans: Sequence[Span] = ()
    ) -> str:
        """Append one sampled turn as it is and return its text without the end-of-turn.

        `tokens` and `logprobs` are `[tokens]`; the spans' starts count from this turn's first token.

        Raises:
            SchemaError: when `tokens` and `logprobs` differ in length.
        """
        if len(tokens) != len(logprobs):
            raise SchemaError(
                f"generate: expected one log-probability per token, got {len(logprobs)} for {len(tokens)}"
            )
        start = len(self)
        self._arrays.append(np.asarray(tokens, np.int32), 1, np.asarray(logprobs, np.float32))
        self._add_spans(Span(start + s.start, s.version, s.context_version) for s in spans)
        text, end = self._split(tokens)
        self._text += text + end
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1
        self.tokens_sampled += len(tokens)
        return text

    def trajectory(
        self,
        *,
        status: str,
        sampling: dict[str, float],
        outcome: float | None = None,
        error: str | None = None,
        metrics: dict[str, float] | None = None,
    ) -> Trajectory:
        """Everything recorded, as the columns of a row."""
        return Trajectory(
            tokens=self._arrays.tokens(),
            mask=self._arrays.mask(),
            logprobs=self._arrays.logprobs(),
            versions=tuple(self._spans),
            segments=tuple(Segment(a, b) for a, b in pairwise([*self._starts, len(self)])),
            turns=self.turns,
            status=status,
            sampling=sampling,
            outcome=outcome,
            error=error,
            metrics=metrics or {},
        )

    def _render(self, first: int, skip: int) -> str:
        return self._template.render(self._view(self.messages[first:]), self._tools, generate=True)[skip:]

    def _view(self, messages: Sequence[MessageDict]) -> Sequence[MessageDict]:
        """What the template is shown: a turn with `tool_calls` says nothing else."""
        if not self._template.structured_calls:
            return messages
        return [m | {"content": ""} if "tool_calls" in m else m for m in map(dict, messages)]

    def _known(self, rendered: str) -> int | None:
        """How many characters of `rendered` the segment holds already; None when history was rewritten."""
        if rendered.startswith(self._text):
            return len(self._text)
        before = self._prompt_length
        if not rendered.startswith(self._text[:before]):
            return None
        return _end_of_match(self._text[before:], rendered, before)

    def _refuse_if_asked(self, rendered: str) -> None:
        if self._rewrites == "refuse":
            at = self._first + self._rewritten(rendered)
            raise TemplateError(
                f"not prefix-stable at message {at}: the template rewrote it when later messages came; "
                "use a template that only appends, or a recording with segments"
            )

    def _rewritten(self, rendered: str) -> int:
        """The message, counted from `_first`, in which `rendered` first differs from what the segment holds."""
        differs = next((i for i, (a, b) in enumerate(zip(self._text, rendered, strict=False)) if a != b), len(rendered))
        window = self._view(self.messages[self._first :])
        for i in range(len(window)):
            prefix = self._template.render(window[: i + 1], self._tools)[self._skip :]
            if len(prefix) > differs:
                return i
        return len(window) - 1

    def _check_characters(self, new: int, at_most: int | None) -> None:
        if at_most is not None and new > (at_most - len(self)) * self._template.longest_token:
            raise LimitReached(
                f"the prompt adds {new} characters to {len(self)} tokens of the row, at most {at_most} tokens fit"
            )

    def _check_length(self, new: int, at_most: int | None) -> None:
        if at_most is not None and len(self) + new > at_most:
            raise LimitReached(f"the prompt needs {len(self) + new} tokens of the row, at most {at_most} fit")

    def _anchor(self, rendered: str) -> None:
        """Remember what the segment holds now. A local template need not render it again."""
        self._text = rendered
        if self._template.local:
            if self._opening is None:
                self._skip = len(self._template.render([], self._tools))
                self._opening = self._render(len(self.messages), self._skip)
            self._first = len(self.messages)
            self._text = self._opening
        self._prompt_length = len(self._text)

    def _split(self, tokens: npt.NDArray[np.int32]) -> tuple[str, str]:
        """The text of a turn, and the text of its end-of-turn if that was sampled."""
        ids = tokens.tolist()
        if ids and ids[-1] in self._template.stop_ids:
            return self._template.decode(ids[:-1]), self._template.decode(ids[-1:])
        return self._template.decode(ids), ""

    def _add_spans(self, spans: Sequence[Span] | Any) -> None:
        for span in spans:
            last = self._spans[-1] if self._spans else None
            if last is None or (last.version, last.context_version) != (span.version, span.context_version):
                self._spans.append(span)


def _end_of_match(text: str, rendered: str, start: int) -> int | None:
    """Where in `rendered`, from `start` on, the words of `text` end; None unless they differ only in white space."""
    position = start
    for word in text.split():
        while rendered[position : position + 1].isspace():
            position += 1
        if not rendered.startswith(word, position):
            return None
        position += len(word)
    return position
