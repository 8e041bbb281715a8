"""The episodes of a simulated run: an agent, a chat template without a tokenizer, engines that only take time."""

from __future__ import annotations

import random
from typing import Any, Final

import msgspec
import numpy as np
import trio

from streamrl_agents.agent import FunctionAgent
from streamrl_agents.chat import Chat
from streamrl_agents.template import ChatTemplate
from streamrl_producers.engines.protocol import Generate, Generated, GenerateReply, Health, Healthy
from streamrl_queue import TransferQueue
from streamrl_queue.errors import EngineError, EnvironmentFailed, WeightError
from streamrl_queue.schema import Span, Task

# Token ids: the end of a turn, what marks where the model's turn begins, what the user says, and, from `SAMPLED` on,
# sampled tokens. They spell the id of the row that they were sampled for.
STOP: Final = 1
TURN: Final = 2
TEXT: Final = 3
USER: Final = 4
SAMPLED: Final = 1000
# Tokens sampled between two looks at pauses and deadlines.
CHUNK: Final = 32
# A long tail: some turns are twenty times as long as most.
MEDIAN_TOKENS: Final = 40
TOKEN_SPREAD: Final = 1.2
MOST_TOKENS: Final = 1200


CHAT: Final = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<turn>{% else %}<user>{% endif %}"
    "{{ message.content }}<stop>{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
)


def make_template() -> ChatTemplate:
    """A chat template of four words. Sampled tokens are no words: they decode to nothing."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<stop>": STOP, "<turn>": TURN, "go": TEXT, "<user>": USER}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<stop>", "<turn>", "<user>"])
    return ChatTemplate(tokenizer, CHAT, stop_ids=[STOP])


async def play(task: dict[str, Any], chat: Chat) -> float:
    """One episode: a few turns, with tools that take time between them."""
    for pause in task["pauses"]:
        reply = await chat.say("go")
        if reply.finish_reason != "stop":
            return 0.0
        await trio.sleep(pause)
    if task["fails"]:
        raise EnvironmentFailed("simulated")
    return float(task["reward"])


AGENT: Final = FunctionAgent(play, "simulated")


def sample_task(seed: int, split: str, index: int, failing_share: float) -> Task:
    """Task `index` of a split; the same in every process."""
    rng = random.Random(f"task/{seed}/{split}/{index}")
    turns = rng.choice((1, 1, 2, 3))
    task = {
        "pauses": [rng.expovariate(5.0) for _ in range(turns)],
        "fails": rng.random() < failing_share,
        "reward": rng.choice((0, 1)),
    }
    return Task(env=rng.choice(("a", "b")), task=task, source=f"simulated-{split}", index=index)


class Apply(msgspec.Struct, frozen=True, tag=True):
    """Take these weights and stand still until they are in force."""

    version: int
    step: int


class Resume(msgspec.Struct, frozen=True, tag=True):
    """The version is committed: go on with it."""

    version: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The version will not exist: go on with the one before."""

    version: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is as you asked."""


EngineRequest = Generate | Health | Apply | Resume | Abort
EngineReply = GenerateReply | Healthy | Done


class TimedEngine:
    """An engine that takes time and knows which version it samples with."""

    def __init__(self, rng: random.Random, seed: int, token_seconds: float, poison_share: float) -> None:
        self.queue: TransferQueue
        self.version: int | None = None
        self._staged: int | None = None
        self._newest = 0
        self._runs = trio.Event()
        self._rng = rng
        self._seed = seed
        self._token_seconds = token_seconds
        self._poison_share = poison_share
        self._changed = trio.Event()

    async def handle(self, peer: str, request: Any) -> msgspec.Struct:
        """What an engine answers."""
        match request:
            case Generate():
                return GenerateReply.of(await self._generate(request))
            case Health():
                sampling = self.version is not None and self._runs.is_set()
                return Healthy(self.version, "sampling" if sampling else "paused", sampling, 0, 0)
            case Apply(version=version):
                await self._apply(version)
            case Resume(version=version):
                self._resume(version)
            case Abort(version=version):
                self._abort(version)
        return Done()

    async def announce(self) -> None:
        """Consumes changes of the version; produces announcements; waits for, and is unblocked by, the next one."""
        told: int | None = None
        while True:
            if self.version is not None and (self.version != told or self._changed.is_set()):
                self._changed = trio.Event()
                told = self.version
                await self.queue.announce(ready=True, version=told)
            else:
                await self._changed.wait()

    async def _apply(self, version: int) -> None:
        if version < self._newest:
            raise WeightError(f"version {version} is older than {self._newest}")
        self._newest = version
        await trio.sleep(self._rng.uniform(0.02, 0.2))
        if self._newest == version:
            self._staged = version
            if self._runs.is_set():
                self._runs = trio.Event()

    def _resume(self, version: int) -> None:
        if self._staged == version:
            self.version, self._staged = version, None
            self._runs.set()
            self._changed.set()
        elif self.version != version:
            raise WeightError(f"version {version} is not staged")

    def _abort(self, version: int) -> None:
        if self._staged == version:
            self._staged = None
            self._runs.set()

    async def _generate(self, request: Generate) -> Generated:
        row = int(request.session.rsplit("/", 1)[1])
        if random.Random(f"poison/{self._seed}/{row}").random() < self._poison_share:
            raise EngineError(f"row {row} is poison")
        if self.version is None:
            raise EngineError("no weights yet")
        ids = np.frombuffer(request.tokens, "<i4")
        turn = int((ids == TURN).sum())
        had = len(ids) - 1 - int(np.flatnonzero(ids == TURN)[-1])
        left = turn_length(self._seed, request.session, turn) - had
        n = min(left, request.sampling.max_tokens)
        spans: list[Span] = []
        got = 0
        until = trio.current_time() + request.seconds
        while got < n and trio.current_time() < until:
            with trio.move_on_at(until):
                await self._runs.wait()
                chunk = min(CHUNK, n - got)
                version = self.version
                await trio.sleep(chunk * self._token_seconds * self._rng.uniform(0.5, 1.5))
                if not spans or spans[-1].version != version:
                    spans.append(Span(got, version, version))
                got += chunk
        whole = got == left
        tokens = np.full(got, SAMPLED + row, np.int32)
        if whole:
            tokens[-1] = STOP
        finish = "stop" if whole else "length" if got == n else "aborted"
        return Generated(tokens, np.full(got, -1.0, np.float32), tuple(spans), finish)  # type: ignore[arg-type]


def turn_length(seed: int, session: str, turn: int) -> int:
    """Tokens of one turn of a session."""
    rng = random.Random(f"length/{seed}/{session}/{turn}")
    return max(1, min(MOST_TOKENS, int(MEDIAN_TOKENS * rng.lognormvariate(0.0, TOKEN_SPREAD))))
