"""What every engine speaks: sampling settings, generated tokens, and the wire messages of the embedded engine."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl_queue.errors import SchemaError
from streamrl_queue.schema import Span
from streamrl_queue.weights import WeightReply, WeightRequest

FinishReason = Literal["stop", "length", "aborted"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How one answer is sampled. `temperature` 0 is greedy; its log-probs are those at temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    seed_position: int = 0
    """Random numbers of this request that were used before: a request that goes on elsewhere continues its own."""

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0 and self.max_tokens >= 1):
            raise SchemaError(
                "sampling: expected temperature >= 0, 0 < top_p <= 1, top_k >= 0 and max_tokens >= 1; "
                f"got {self.temperature}, {self.top_p}, {self.top_k} and {self.max_tokens}"
            )


class Generated(msgspec.Struct, frozen=True):
    """Sampled tokens and their log-probs in nats, `[tokens]` each; spans cover every token, from 0.

    `finish_reason`: `stop` (a stop id was sampled and is the last token), `length` (a limit was reached) or `aborted`
    (the engine or the deadline ended it; what was sampled until then is here).
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[Span, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if len(self.logprobs) != n:
            raise SchemaError(f"generated: got {n} tokens but {len(self.logprobs)} log-probs")
        if n and (not self.spans or self.spans[0].start != 0):
            raise SchemaError(f"generated: {n} tokens but spans {self.spans} do not start at 0")

    @classmethod
    def nothing(cls) -> Generated:
        """The beginning of every request: no tokens yet."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), (), "aborted")

    def then(self, more: Generated) -> Generated:
        """These tokens, followed by those that were sampled after them."""
        if not len(self.tokens):
            return more
        spans = list(self.spans)
        for span in more.spans if len(more.tokens) else ():
            if (spans[-1].version, spans[-1].context_version) != (span.version, span.context_version):
                spans.append(Span(span.start + len(self.tokens), span.version, span.context_version))
        return Generated(
            np.concatenate([self.tokens, more.tokens]),
            np.concatenate([self.logprobs, more.logprobs]),
            tuple(spans),
            more.finish_reason,
        )


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Sample an answer to `tokens` (int32, little endian).

    `session` names whose KV prefix this continues; after `seconds` the engine answers with what it has
    (`aborted`). An engine whose version is below `version_at_least` refuses.
    """

    tokens: bytes
    sampling: Sampling
    session: str
    seconds: float
    version_at_least: int = 0


class GenerateReply(msgspec.Struct, frozen=True, tag=True):
    """`Generated` on the wire: int32 and float32, little endian."""

    tokens: bytes
    logprobs: bytes
    spans: tuple[Span, ...]
    finish_reason: FinishReason

    @classmethod
    def of(cls, generated: Generated) -> GenerateReply:
        return cls(
            generated.tokens.astype("<i4", copy=False).tobytes(),
            generated.logprobs.astype("<f4", copy=False).tobytes(),
            generated.spans,
            generated.finish_reason,
        )

    def generated(self) -> Generated:
        """Raises SchemaError when the arrays disagree."""
        return Generated(
            np.frombuffer(self.tokens, "<i4").astype(np.int32, copy=False),
            np.frombuffer(self.logprobs, "<f4").astype(np.float32, copy=False),
            self.spans,
            self.finish_reason,
        )


class Health(msgspec.Struct, frozen=True, tag=True):
    """Prove that this engine lives: it samples one token, unless it has no weights or is paused."""


class Healthy(msgspec.Struct, frozen=True, tag=True):
    """`version` is what it samples with; `generated` says whether one token was really sampled for this answer."""

    version: int | None
    state: Literal["empty", "paused", "sampling"]
    generated: bool
    running: int
    waiting: int


EngineRequest = Generate | Health | WeightRequest
EngineReply = GenerateReply | Healthy | WeightReply
