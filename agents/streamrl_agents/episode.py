"""One task -> one Trajectory, whatever happens on the way.

An episode that fails is data: its status says how, its error why, its tokens how far it came. Only what is not
the episode's own failure is raised: cancellation, and errors of `generate` (the engine's, for the producer to
handle).
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from typing import Any, Final

import trio

from streamrl_queue.errors import EnvironmentFailed, ToolFailed
from streamrl_queue.schema import Trajectory

from .agent import Agent, Outcome
from .chat import Chat, GenerateFn
from .config import Limits
from .conversation import Conversation
from .parsing import tool_format as format_named
from .template import ChatTemplate

__all__ = ["GenerateFn", "Limits", "run_episode"]

# A traceback goes into the row and from there into every log and table that shows it.
MAX_ERROR_CHARS: Final = 4000


async def run_episode(
    agent: Agent,
    task: dict[str, Any],
    *,
    generate: GenerateFn,
    template: ChatTemplate,
    limits: Limits,
    sampling: Mapping[str, float],
    tool_format: str = "hermes",
) -> Trajectory:
    """Play one task.

    `sampling` describes the distribution that `generate` samples from; it is stored with the log-probabilities.
    The outcome of several named parts is their sum; the parts are kept in `metrics` as `reward/<name>`.

    Raises:
        ConfigError: for an unknown `tool_format`.
        Exception: whatever `generate` raised.
    """
    conversation = Conversation(template, agent.tools)
    chat = Chat(conversation, generate, limits=limits, tool_format=format_named(tool_format))
    outcome = await _play(agent, task, chat)
    return conversation.trajectory(
        status=chat.status,
        sampling=dict(sampling),
        outcome=None if outcome is None else sum(outcome.values()),
        error=chat.error,
        metrics=_metrics(chat, conversation, outcome or {}),
    )


async def _play(agent: Agent, task: dict[str, Any], chat: Chat) -> dict[str, float] | None:
    """The parts of the outcome; None when the chat's status says why there is none."""
    seconds = chat.limits.episode_seconds
    try:
        with trio.move_on_after(seconds):
            return _parts(agent, await agent.play(task, chat))
        chat.end("error_timeout", f"the episode took longer than {seconds:g} s (episode_seconds)")
    except Exception as error:  # supervision edge: an environment's failure is its row's status, not the run's
        if chat.fault is not None:
            raise chat.fault from None
        if chat.status == "completed":
            status = "error_tool" if isinstance(error, ToolFailed) else "error_env"
            chat.end(status, _text(error))
    return None


def _parts(agent: Agent, outcome: Outcome) -> dict[str, float] | None:
    if outcome is None:
        return None
    parts = outcome if isinstance(outcome, Mapping) else {"": outcome}
    for name, value in parts.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise EnvironmentFailed(f"{agent.name}: reward {name}: expected a finite number, got {value!r}")
    return {name: float(value) for name, value in parts.items()}


def _metrics(chat: Chat, conversation: Conversation, parts: Mapping[str, float]) -> dict[str, float]:
    counts = {
        "turns": conversation.turns,
        "tool_calls": chat.tool_calls,
        "tool_errors": chat.tool_errors,
        "parse_errors": chat.parse_errors,
        "tokens_sampled": conversation.tokens_sampled,
        "forks": conversation.forks,
    }
    rewards = {f"reward/{name}": value for name, value in parts.items() if name}
    return {name: float(value) for name, value in counts.items()} | rewards


def _text(error: Exception) -> str:
    """The end of the traceback, where the reason is; marked when the beginning is missing."""
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= MAX_ERROR_CHARS else f"[…]{text[-MAX_ERROR_CHARS:]}"
