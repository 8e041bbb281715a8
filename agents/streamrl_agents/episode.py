"""One task -> one Trajectory, whatever happens on the way.

An episode that fails is data: its status says how, its error why, its tokens how far it came. Only what is not
the episode's own failure is raised: cancellation, and errors of `generate` (the engine's, for the producer to
handle).
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, Final

import trio

from streamrl_queue.errors import ToolFailed
from streamrl_queue.schema import Trajectory

from .agent import Agent, Outcome
from .chat import Chat, Doing, GenerateFn, untold
from .config import Limits
from .conversation import Conversation
from .rewards import checked
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
    doing: Doing = untold,
) -> Trajectory:
    """Play one task.

    `sampling` describes the distribution that `generate` samples from; it is stored with the log-probabilities. `doing`
    is told which tool or method of the environment runs.
    The outcome of several named parts is their sum; the parts are kept in `metrics` as `reward/<name>`. A tool that
    raised ends no episode; `error` tells the last of these where nothing worse happened.

    Raises:
        ConfigError: when the agent has tools and nobody knows how the model calls them.
        Exception: whatever `generate` raised.
    """
    if agent.tools:
        template.needed_tool_format(agent.name)
    conversation = Conversation(template, agent.tools)
    chat = Chat(conversation, generate, limits=limits, tool_format=template.tool_format, doing=doing)
    outcome = await _play(agent, task, chat)
    return conversation.trajectory(
        status=chat.status,
        sampling=dict(sampling),
        outcome=None if outcome is None else sum(outcome.values()),
        error=_end_of(chat.error or chat.tool_error or "") or None,
        metrics=_metrics(chat, conversation, outcome or {}),
    )


async def _play(agent: Agent, task: dict[str, Any], chat: Chat) -> dict[str, float] | None:
    """The parts of the outcome; None when the chat's status says why there is none."""
    seconds = chat.limits.episode_seconds
    try:
        with trio.move_on_after(seconds):
            return _parts(await agent.play(task, chat))
        chat.end("error_timeout", f"the episode took longer than {seconds:g} s (episode_seconds)")
    except Exception as error:  # supervision edge: an environment's failure is its row's status, not the run's
        if chat.fault is not None:
            raise chat.fault from None
        if chat.status == "completed":
            status = "error_tool" if isinstance(error, ToolFailed) else "error_env"
            chat.end(status, "".join(traceback.format_exception(error)))
    return None


def _parts(outcome: Outcome) -> dict[str, float] | None:
    if outcome is None:
        return None
    if not isinstance(outcome, Mapping):
        return {"": checked(outcome, "reward")}
    parts = {name: checked(value, f"reward {name}") for name, value in outcome.items()}
    checked(sum(parts.values()), "reward, the sum of its parts")
    return parts


def _metrics(chat: Chat, conversation: Conversation, parts: Mapping[str, float]) -> dict[str, float]:
    counts = {
        "turns": conversation.turns,
        "tool_calls": chat.tool_calls,
        "tool_errors": chat.tool_errors,
        "parse_errors": chat.parse_errors,
        "tool_texts_cut": chat.tool_texts_cut,
        "tokens_sampled": conversation.tokens_sampled,
        "forks": conversation.forks,
    }
    rewards = {f"reward/{name}": value for name, value in parts.items() if name}
    return {name: float(value) for name, value in counts.items()} | rewards


def _end_of(text: str) -> str:
    """The end of an error's text, where the reason is; marked when the beginning is missing."""
    return text if len(text) <= MAX_ERROR_CHARS else f"[…]{text[-MAX_ERROR_CHARS:]}"
