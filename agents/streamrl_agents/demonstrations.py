"""Scripted episodes for warm starts: the agent's own `demonstrate`, played against its own environment.

A demonstration is an episode whose `generate` reads from the script: what a warm start trains on is rendered and
masked by the same Conversation and Chat as what reinforcement learning trains on. Unlike in an episode, errors
are raised as they are: a demonstration that fails is a mistake to mend before the run, and not data.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import trio

from streamrl_queue.errors import ConfigError, EnvironmentFailed
from streamrl_queue.schema import Span

from .agent import Agent
from .chat import Chat, GenerateFn
from .config import Limits
from .conversation import Conversation
from .parsing import ToolCall
from .template import ChatTemplate

Demonstration = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]

# A script ends by itself; these only catch one that does not.
SCRIPT_LIMITS: Final = Limits(max_turns=256, max_turn_tokens=1 << 16, max_tokens=1 << 18, turn_seconds=10.0)


class _Turn(msgspec.Struct, frozen=True):
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[Span, ...] = (Span(0, 0, 0),)
    finish_reason: Literal["stop"] = "stop"


def play(agent: Agent, template: ChatTemplate, rng: random.Random, sloppy: bool) -> Demonstration:
    """One scripted episode of a freshly sampled task: ids and mask, both `[tokens]`.

    Not to be called from within trio: it runs a loop of its own (0.25 ms; `play_many` shares one).

    Raises:
        ConfigError: when the agent samples no tasks or demonstrates nothing.
        EnvironmentFailed: when the environment wanted a turn that the script does not have.
        TemplateError: when the template rewrites history; a warm start has no segments to express that.
        Exception: whatever the environment raised.
    """
    return play_many(agent, template, rng, sloppy, 1)[0]


def play_many(
    agent: Agent, template: ChatTemplate, rng: random.Random, sloppy: bool, count: int
) -> list[Demonstration]:
    """`count` scripted episodes, one after another; errors as `play`."""

    async def run() -> list[Demonstration]:
        return [await _play(agent, template, rng, sloppy) for _ in range(count)]

    return trio.run(run)


async def _play(agent: Agent, template: ChatTemplate, rng: random.Random, sloppy: bool) -> Demonstration:
    if agent.demonstrate is None:
        raise ConfigError(f"{agent.name}: a warm start needs demonstrate(task, rng, sloppy), which yields the turns")
    task = agent.sample_task(rng)
    if agent.tools:
        template.needed_tool_format(agent.name)
    generate = _scripted(agent, template, agent.demonstrate(task, rng, sloppy))
    conversation = Conversation(template, agent.tools, rewrites="refuse")
    await agent.play(task, Chat(conversation, generate, limits=SCRIPT_LIMITS, tool_format=template.tool_format))
    trajectory = conversation.trajectory(status="completed", sampling={})
    return trajectory.tokens, trajectory.mask


def _scripted(agent: Agent, template: ChatTemplate, turns: Iterator[str | ToolCall]) -> GenerateFn:
    end = template.end_id

    async def generate(tokens: npt.NDArray[np.int32], max_tokens: int) -> _Turn:
        turn = next(turns, None)
        if turn is None:
            raise EnvironmentFailed(f"{agent.name}: demonstrate() ended although the last turn called a tool")
        text = turn if isinstance(turn, str) else template.needed_tool_format(agent.name).render(turn)
        ids = np.asarray([*template.encode(text), end], np.int32)
        return _Turn(ids, np.zeros(len(ids), np.float32))

    return generate
