"""Continuous batching: requests enter and leave between any two steps, and each step advances all of them.

The state is a few numpy arrays by slot, so that a step costs the same Python for 1 and for 128 requests; only a
request's beginning and end are handled one by one. A request is forwarded from its `_cached` to its `_count` tokens:
one token while it decodes, all of its prompt when it is new, all of its tokens after the weights changed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from streamrl_queue.errors import EngineError, LimitReached, SchemaError
from streamrl_queue.schema import Span

from ..protocol import FinishReason, Generated, Sampling
from .decoder import Decoder, Weights
from .plan import plan, share
from .sampler import Settings, sample, uniform
from .slots import SlotPool

MAX_STOP_IDS: Final = 16  # a row of the stop table; chat templates have one to three


@dataclass(eq=False, slots=True)
class Request:
    """One request. Once it is among the ended ones, it has a `result` or an `error`."""

    tokens: npt.NDArray[np.int32]
    sampling: Sampling
    session: str
    result: Generated | None = None
    error: Exception | None = None
    slot: int = -1
    spans: list[Span] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """What a batch has done since it was made: tokens `sampled`, tokens `forced` (read, not sampled), `steps`."""

    sampled: int = 0
    forced: int = 0
    steps: int = 0
    reused: int = 0


class Batch:
    """All requests of one engine. `step` runs in a worker thread; `submit` may be called from another one.

    Every other method is called between two steps only.
    """

    def __init__(self, decoder: Decoder, *, step_tokens: int, entropy: int | None = None) -> None:
        slots, context = decoder.slots, decoder.context
        self.decoder, self.version = decoder, -1
        self.counters = Counters()
        self._step_tokens = step_tokens
        self._entropy = np.random.default_rng(entropy)
        self._waiting: deque[Request] = deque()
        self._ended: deque[Request] = deque()
        self._running: list[Request | None] = [None] * slots
        self._active = np.zeros(slots, bool)
        self._ids = np.zeros((slots, context + 1), np.int32)
        self._logprobs = np.zeros((slots, context + 1), np.float32)
        self._cached = np.zeros(slots, np.int64)  # tokens whose KV is there
        self._count = np.zeros(slots, np.int64)  # tokens that are known
        self._prompt = np.zeros(slots, np.int64)
        self._limit = np.zeros(slots, np.int64)  # tokens at which the request ends
        self._context_version = np.full(slots, -1, np.int64)  # oldest version in the slot's KV
        self._admitted = np.zeros(slots, np.int64)
        self._admissions = 0
        self._stops = np.full((slots, MAX_STOP_IDS), -1, np.int32)
        self._seed = np.zeros(slots, np.uint64)
        self._drawn = np.zeros(slots, np.int64)  # random numbers used before the first token of this request
        self._temperature = np.ones(slots, np.float32)
        self._top_p = np.ones(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._pool = SlotPool(slots)

    def __repr__(self) -> str:
        return f"Batch(version={self.version}, running={self.running}, waiting={self.waiting}, {self._pool})"

    @property
    def running(self) -> int:
        return int(self._active.sum())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or bool(self._active.any())

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)

    def submit(self, request: Request) -> None:
        """Queue `request` for the next step.

        Raises:
            LimitReached: the prompt leaves no room in the context.
            SchemaError: an empty prompt, an id outside the vocabulary, too many stop ids.
        """
        tokens, vocab = request.tokens, self.decoder.architecture.vocab
        if len(tokens) == 0:
            raise SchemaError("tokens: expected at least 1, got an empty prompt")
        if len(tokens) >= self.decoder.context:
            raise LimitReached(
                f"a prompt of {len(tokens)} tokens does not fit an engine context of {self.decoder.context}; "
                "raise engine.max_tokens or lower rollout.max_tokens"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
            raise SchemaError(f"tokens: expected ids in [0, {vocab}), got {tokens.min()}..{tokens.max()}")
        if len(request.sampling.stop_ids) > MAX_STOP_IDS:
            raise SchemaError(f"stop_ids: expected at most {MAX_STOP_IDS}, got {len(request.sampling.stop_ids)}")
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End `request` with the tokens it has; nothing happens when it has ended."""
        if request.slot >= 0:
            self._end(request.slot, "aborted")
        elif request in self._waiting:
            self._waiting.remove(request)
            request.result = Generated.nothing()
            self._ended.append(request)

    def ended(self) -> list[Request]:
        """Requests that ended since the last call. May be called from any thread."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what waits, forward one step, sample."""
        self._admit()
        slots = np.flatnonzero(self._active)
        if not len(slots):
            return
        pending = self._count[slots] - self._cached[slots]
        counts = share(pending, self._admitted[slots], self._step_tokens)
        if not counts.all():
            slots, counts = slots[counts > 0], counts[counts > 0]
        step = plan(slots, self._cached[slots], counts)
        slots = step.row_slots
        self._cached[slots] += step.counts
        complete = self._cached[slots] == self._count[slots]
        logits = self.decoder.forward(step, self._ids[step.slots, step.positions], step.last[complete])
        self.counters.steps += 1
        self.counters.forced += len(step.slots) - int(complete.sum())
        slots = slots[complete]
        if not len(slots):
            return
        settings = Settings(self._temperature[slots], self._top_p[slots], self._top_k[slots])
        position = self._drawn[slots] + self._count[slots] - self._prompt[slots]
        tokens, logprobs = sample(logits, settings, uniform(self._seed[slots], position))
        self._record(slots, tokens.cpu().numpy(), logprobs.cpu().numpy())

    def _admit(self) -> None:
        while self._waiting and self._pool.available:
            self._place(self._waiting.popleft())

    def _place(self, request: Request) -> None:
        slot, kept = self._pool.take(request.session)
        n, sampling = len(request.tokens), request.sampling
        cached = self._common(slot, request.tokens) if kept else 0
        self._ids[slot, cached:n] = request.tokens[cached:]
        self._cached[slot], self._count[slot], self._prompt[slot] = cached, n, n
        self._limit[slot] = min(n + sampling.max_tokens, self.decoder.context)
        if not cached:
            self._context_version[slot] = self.version
        self._stops[slot] = -1
        self._stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids
        self._temperature[slot], self._top_p[slot] = sampling.temperature, sampling.top_p
        self._top_k[slot], self._drawn[slot] = sampling.top_k, sampling.seed_position
        seed = sampling.seed
        self._seed[slot] = self._entropy.integers(2**63) if seed is None else seed % 2**64
        self._admissions += 1
        self._admitted[slot] = self._admissions
        self._running[slot], self._active[slot] = request, True
        self.counters.reused += cached
        request.slot = slot
        request.spans.append(Span(0, self.version, int(self._context_version[slot])))

    def _common(self, slot: int, tokens: npt.NDArray[np.int32]) -> int:
        """Tokens of the slot's KV that `tokens` begin with. The last token is always forwarded: logits need it."""
        n = min(int(self._cached[slot]), len(tokens) - 1)
        differ = self._ids[slot, :n] != tokens[:n]
        return int(differ.argmax()) if differ.any() else n

    def _record(
        self, slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> None:
        where = self._count[slots]
        self._ids[slots, where] = tokens
        self._logprobs[slots, where] = logprobs
        self._count[slots] = where + 1
        self.counters.sampled += len(slots)
        stopped = (tokens[:, None] == self._stops[slots]).any(1)
        broken = ~np.isfinite(logprobs)
        ended = stopped | broken | (where + 1 >= self._limit[slots])
        for row in np.flatnonzero(ended).tolist():
            if broken[row]:
                self._fail(int(slots[row]), float(logprobs[row]))
            else:
                self._end(int(slots[row]), "stop" if stopped[row] else "length")

    def _end(self, slot: int, reason: FinishReason) -> None:
        request = self._release(slot)
        answer = slice(int(self._prompt[slot]), int(self._count[slot]))
        tokens, logprobs = self._ids[slot, answer].copy(), self._logprobs[slot, answer].copy()
        spans = tuple(span for span in request.spans if span.start < len(tokens))
        request.result = Generated(tokens, logprobs, spans, reason)
        self._pool.keep(request.session, slot)
        self._ended.append(request)

    def _fail(self, slot: int, logprob: float) -> None:
        """A sampled token without a finite log-prob: an error of this request, never a 0 in its arrays."""
        request = self._release(slot)
        token = int(self._count[slot] - self._prompt[slot] - 1)
        request.error = EngineError(
            f"sampled token {token} of session {request.session} has log-prob {logprob} under version {self.version}; "
            "the weights give logits that are not finite"
        )
        # Its KV is not finite either, and 0 * nan would leak it through masked attention.
        self.decoder.clear(slot)
        self._cached[slot] = 0
        self._pool.keep(request.session, slot)
        self._ended.append(request)

    def _release(self, slot: int) -> Request:
        request = self._running[slot]
        assert request is not None
        self._running[slot], self._active[slot] = None, False
        request.slot = -1
        return request

    def reweigh(self, weights: Weights, version: int, *, recompute: bool) -> None:
        """Sample from `weights` as `version` from the next step on. Running requests keep their tokens.

        With `recompute` the next step forwards all their tokens again, in one batched pass (in several, when they
        are more than `step_tokens`); otherwise they keep their KV, and their spans say how old it is.
        """
        self.decoder.weights, self.version = weights, version
        self._pool.forget()
        slots = np.flatnonzero(self._active)
        if recompute:
            self._cached[slots] = 0
        fresh = slots[self._cached[slots] == 0]
        self._context_version[fresh] = version
        for slot in slots.tolist():
            request = self._running[slot]
            assert request is not None
            start = int(self._count[slot] - self._prompt[slot])
            if request.spans[-1].start == start:
                request.spans.pop()
            request.spans.append(Span(start, version, int(self._context_version[slot])))
