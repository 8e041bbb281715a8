"""An inference server behind HTTP, as an engine: the adapters' common part.

An adapter says what its server can do in the terms of `protocol`: sampled ids with their log-probs, finish reason and
version spans. The log-prob of a sampled token is that under the distribution it was sampled from; a request whose
log-probs would mean something else is refused.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt
import trio

from streamrl_queue.errors import DeadlineExceeded, EngineError, LimitReached, SchemaError

from .protocol import Generated, Sampling

if TYPE_CHECKING:
    import torch

CALL_SECONDS: Final = 30.0  # deadline of a call that samples nothing; a crowded machine answers in a few seconds
HOT: Final = 2.0  # the highest temperature that every server takes
HOT_TOKENS: Final = 16  # one token's log-prob may be the same at both temperatures by chance, but not so many
SAME_NATS: Final = 0.1  # more than bfloat16 loses, less than one of so many tokens changes
UNPUBLISHED: Final = 0  # the version of weights that no publish brought; committed versions start at 1


class ServerInfo(msgspec.Struct, frozen=True):
    """What a running server says about itself. `max_tokens` is its context length, in tokens."""

    engine: str
    version: str
    max_tokens: int


class Adapter(ABC):
    """One server at `url`. Use it as an async context manager; share it between tasks."""

    kind: ClassVar[str]
    oldest: ClassVar[tuple[int, ...]]
    """The oldest release that has everything the adapter needs."""
    paths: ClassVar[Mapping[str, str]]
    """Paths that the server must have, and what for."""
    helps: ClassVar[str]
    """What makes paths appear that a server of a good version lacks."""

    def __init__(self, url: str, *, vocab_size: int) -> None:
        # Of the extra `engines`, which a launch asks for before it starts anything.
        import httpx2

        self.url = url.rstrip("/")
        self.vocab_size = vocab_size
        self.info: ServerInfo | None = None
        self._scales: bool | None = None
        # No limit of its own: the caller's concurrency is the limit. Every call has its own deadline.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx2.AsyncClient(base_url=self.url, timeout=None, limits=limits, trust_env=False)
        self._failures: tuple[type[Exception], ...] = (httpx2.HTTPError,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url}, {self.info})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            await self._http.aclose()

    async def check(self) -> ServerInfo:
        """Read the server's version, probe its paths, and keep what it says about itself.

        Raises:
            EngineError: it is too old or lacks a path: names what is missing and what helps.
        """
        version = await self._version()
        if parse_version(version) < self.oldest:
            raise EngineError(
                f"{self.kind} at {self.url}: expected version {'.'.join(map(str, self.oldest))} or later, got {version}"
            )
        has = (await self._get("/openapi.json")).get("paths", {})
        if missing := [f"{path} ({what})" for path, what in self.paths.items() if path not in has]:
            raise EngineError(f"{self.kind} {version} at {self.url} lacks {', '.join(missing)}; {self.helps}")
        self.info = ServerInfo(self.kind, version, await self._max_tokens())
        return self.info

    async def generate(
        self, tokens: npt.NDArray[np.int32], sampling: Sampling, *, session: str, seconds: float
    ) -> Generated:
        """Sample an answer to `tokens` `[n]`; after `seconds` what there is of it, as `aborted`, or an error.

        Raises:
            SchemaError: an id that is not in the vocabulary; the server never sees it.
            LimitReached: the prompt fills the server's context.
            EngineError: the server refuses, fails, or answers with something else than was asked for.
        """
        if self.info is None:
            await self.check()
        assert self.info is not None
        room = self.info.max_tokens - len(tokens)
        self._check_ids(tokens)
        if room < 1:
            raise LimitReached(
                f"prompt of {len(tokens)} tokens, but {self.url} has a context of {self.info.max_tokens}"
            )
        await self._check_meaning(sampling)
        asked = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        got = await self._generate(tokens, asked, session, seconds)
        self._check_answer(got, asked)
        return got

    def _check_ids(self, tokens: npt.NDArray[np.int32]) -> None:
        if not len(tokens):
            raise SchemaError("tokens: expected at least one, got none")
        if len(wrong := tokens[(tokens < 0) | (tokens >= self.vocab_size)]):
            raise SchemaError(f"tokens: expected ids from 0 to {self.vocab_size - 1}, got {int(wrong[0])}")

    def _check_answer(self, got: Generated, asked: Sampling) -> None:
        if len(got.tokens) > asked.max_tokens:
            raise EngineError(f"{self.url}: asked for {asked.max_tokens} tokens, got {len(got.tokens)}")
        if not np.isfinite(got.logprobs).all():
            raise EngineError(f"{self.url}: a sampled token has a log-prob that is not finite")

    async def scales(self) -> bool:
        """Whether log-probs are those of the temperature-scaled distribution: measured, once for each weights.

        A model that gives every token the same probability looks as if they were not.
        """
        if self._scales is None:
            start = np.zeros(1, np.int32)
            hot = await self._generate(start, Sampling(temperature=HOT, max_tokens=HOT_TOKENS), "", CALL_SECONDS)
            if not len(hot.tokens):
                raise EngineError(f"{self.url}: sampled nothing, although nobody asked it to stop")
            raw = await self.logprobs([*start.tolist(), *hot.tokens.tolist()])
            self._scales = bool(np.abs(hot.logprobs - raw).max() > SAME_NATS)
        return self._scales

    @abstractmethod
    async def _check_meaning(self, sampling: Sampling) -> None:
        """Raises EngineError when the log-probs of such a request would not be those of what is sampled from."""

    @abstractmethod
    async def _version(self) -> str: ...

    @abstractmethod
    async def _max_tokens(self) -> int: ...

    @abstractmethod
    async def _generate(
        self, tokens: npt.NDArray[np.int32], sampling: Sampling, session: str, seconds: float
    ) -> Generated: ...

    @abstractmethod
    async def ready(self) -> bool:
        """Whether the server would sample now."""

    @abstractmethod
    async def abort_all(self) -> None:
        """End every request at the server; each answers with what it has."""

    @abstractmethod
    async def logprobs(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Log-probs `[n - 1]` (nats, temperature 1) of `tokens[1:]`, computed anew and from no cache."""

    @abstractmethod
    async def update(self, tensors: Mapping[str, torch.Tensor], version: int, seconds: float) -> None:
        """Replace the weights by `tensors` and call them `version`. No request may be running.

        Raises:
            WeightError: the server does not have them; what it has instead is unknown.
        """

    async def _get(self, path: str) -> Any:
        return await self._ask("GET", path, None, CALL_SECONDS)

    async def _post(self, path: str, body: Any, seconds: float = CALL_SECONDS) -> Any:
        return await self._ask("POST", path, body, seconds)

    async def _ask(self, method: str, path: str, body: Any, seconds: float) -> Any:
        """The JSON that the server answers, None for an empty or plain answer.

        Raises:
            DeadlineExceeded. EngineError: no connection, or any other status than 200, with the server's words.
        """
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            with trio.fail_after(seconds):
                answer = await self._http.request(method, path, content=content, headers=headers)
        except trio.TooSlowError:
            raise DeadlineExceeded.waiting(f"the answer to {method} {path}", self.url, seconds) from None
        except self._failures as error:
            raise EngineError(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            raise EngineError(f"{method} {self.url}{path}: status {answer.status_code}: {words(answer.content)}")
        if "json" not in answer.headers.get("content-type", ""):
            return None
        return self._decoded(answer.content, path)

    def _decoded(self, content: bytes, path: str) -> Any:
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.url}{path}: expected JSON: {error}") from error


def parse_version(text: str) -> tuple[int, ...]:
    """The release numbers at the start of a version: `(0, 5, 23)` for `0.5.23.post1+cpu`; empty when there are none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(map(int, found[1].split("."))) if found else ()


def parse_label(label: str) -> int:
    """The version that a server's label of its weights stands for; `UNPUBLISHED` for one that streamrl did not give."""
    return int(label) if label.isascii() and label.isdigit() else UNPUBLISHED


def words(content: bytes) -> str:
    """What an error answer says: servers put it under `error`, `error.message`, `message` or nowhere."""
    try:
        told = msgspec.json.decode(content)
    except msgspec.DecodeError:
        told = content.decode("utf-8", "replace")
    while isinstance(told, dict) and (inner := told.get("error") or told.get("message") or told.get("detail")):
        told = inner
    return " ".join(str(told).split())[:500]
