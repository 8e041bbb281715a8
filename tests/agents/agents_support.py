"""Templates, tokenizers and scripted models for the tests of streamrl_agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import trio
import trio.testing
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from streamrl_agents.agent import Agent, ClassAgent, FunctionAgent, load_agent
from streamrl_agents.config import Limits
from streamrl_agents.episode import run_episode
from streamrl_agents.formats import FORMATS
from streamrl_agents.parsing import ToolCall
from streamrl_agents.template import ChatTemplate
from streamrl_agents.vocabulary import CHAT_TEMPLATE, END, build_tokenizer
from streamrl_queue.schema import Span, Trajectory

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# Like the templates of reasoning models: what was thought before the last user message is taken out.
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

MERGES = ["h e", "l l", "ll o", "he llo", "Ċ Ċ", "t h", "th i", "n k", "1 2", "12 3"]


@cache
def bpe(*special: str, merges: tuple[str, ...] = tuple(MERGES)) -> Tokenizer:
    """A byte-level tokenizer with a few merges, so that one text has several splits into tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [tuple(merge.split()) for merge in merges]
    words = [*alphabet, *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in special])
    return tokenizer


def template_of(source: str, *special: str, tool_format: str = "auto") -> ChatTemplate:
    """A chat template over `bpe`; the first special token ends a turn."""
    tokenizer = bpe(*special)
    return ChatTemplate(tokenizer, source, stop_ids=[tokenizer.token_to_id(special[0])], tool_format=tool_format)


def tiny(tool_format: str = "auto") -> ChatTemplate:
    return template_of(
        CHAT_TEMPLATE, END, "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", tool_format=tool_format
    )


def chatml() -> ChatTemplate:
    return template_of(CHATML, "<|im_end|>", "<|im_start|>")


def thinking() -> ChatTemplate:
    return template_of(THINKING, "<|im_end|>", "<|im_start|>", "<think>", "</think>", tool_format="hermes")


@cache
def lookup() -> Agent:
    return load_agent("streamrl_agents.environments.lookup:Lookup")


@cache
def lookup_template() -> ChatTemplate:
    tokenizer = build_tokenizer(lookup(), [])
    return ChatTemplate(tokenizer, CHAT_TEMPLATE, stop_ids=[tokenizer.token_to_id(END)])


class Turn(msgspec.Struct):
    """What a scripted engine returns."""

    tokens: Any
    logprobs: Any
    spans: tuple[Span, ...] = (Span(0, 1, 1),)
    finish_reason: str = "stop"


class Script:
    """A model that says given texts. A text of `Cut` is cut off; what it was asked is kept in `prompts`."""

    def __init__(self, template: ChatTemplate, *texts: str) -> None:
        self.template = template
        self.texts = list(texts)
        self.prompts: list[list[int]] = []
        self.turns: list[Turn] = []

    async def __call__(self, tokens: Any, max_tokens: int) -> Turn:
        await trio.lowlevel.checkpoint()
        self.prompts.append(tokens.tolist())
        text = self.texts.pop(0)
        cut = isinstance(text, Cut)
        ids = self.template.encode(text) + ([] if cut else [self.template.end_id])
        cut = cut or len(ids) > max_tokens
        ids = ids[:max_tokens]
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 100
        turn = Turn(np.asarray(ids, np.int32), logprobs, finish_reason="length" if cut else "stop")
        self.turns.append(turn)
        return turn


class Cut(str):
    """A turn that ran out of tokens."""


def call(name: str, **arguments: Any) -> str:
    return FORMATS["hermes"].render(ToolCall(name, arguments))


def agent_of(target: Any) -> Agent:
    return ClassAgent(target, target.__name__) if isinstance(target, type) else FunctionAgent(target, target.__name__)


def play(
    agent: Agent | Any,
    *texts: str,
    task: dict[str, Any] | None = None,
    template: ChatTemplate | None = None,
    generate: Callable[..., Any] | None = None,
    clock: Any = None,
    **limits: Any,
) -> Trajectory:
    """One episode of a scripted model."""
    agent = agent if isinstance(agent, Agent) else agent_of(agent)
    template = template or tiny()

    async def main() -> Trajectory:
        return await run_episode(
            agent,
            task or {},
            generate=generate or Script(template, *texts),
            template=template,
            limits=Limits(**limits),
            sampling={"temperature": 1.0},
        )

    return trio.run(main, clock=clock)


def jumping() -> trio.testing.MockClock:
    """A clock that jumps to the next deadline as soon as nothing else can happen."""
    return trio.testing.MockClock(autojump_threshold=0)


def sampled(trajectory: Trajectory) -> list[int]:
    return trajectory.tokens[trajectory.mask == 1].tolist()


def ids_of(turns: Sequence[Turn]) -> list[int]:
    return [i for turn in turns for i in turn.tokens.tolist()]
