"""The reward stage: finished rows in, one number and its parts out.

The built-in part `outcome` is what the environment's own `reward` returned. Further parts are functions of the
user over a row, named by spec; they ask for what they need by the names of their parameters, and only those
columns travel:

    def brevity(turns: int) -> float: ...
    def verified(task: dict, answer: str) -> float: ...

Names: `task` (the task's dict), `answer` (text of the model's last turn), `text` (the whole row as text), and
the columns `env`, `outcome`, `status`, `turns`, `metrics`, `error`, `sampling`, `tokens`, `mask`.

A row that was cut by a limit (`truncated_*`) is scored. Its environment was never asked for a reward, so its
outcome counts as 0: right for tasks that verify an answer, because no answer is a wrong one. A row that failed
(`error_*`, `aborted`) says nothing about the policy: it is dropped with its status as the reason and leaves its
group's baseline. A row whose scoring raises is dropped as `error_reward`, never scored 0.

A reward is a finite number within ±MAX_REWARD. A bool is none: `reward` that returns a comparison has mostly
forgotten something, and a truth is written as 1.0.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import trio

from streamrl_queue.errors import ConfigError, RewardError
from streamrl_queue.held import on_held
from streamrl_queue.schema import reward_batch

from .agent import load_object
from .calling import contained
from .chat import Doing, untold
from .config import RewardConfig
from .template import ChatTemplate

if TYPE_CHECKING:
    from streamrl_queue import Lease, TransferQueue

log: Final = logging.getLogger(__name__)

OUTCOME: Final = "outcome"
# Float32 holds squares of these, summed over any group; a mean or a loss of what is larger could overflow.
MAX_REWARD: Final = 1e6
# A lease request waits in the broker; this bounds how stale the worker's own report of its activity can be.
LEASE_WAIT_SECONDS: Final = 5.0
_PLAIN: Final = ("env", "outcome", "status", "turns", "metrics", "error", "sampling", "tokens", "mask", "task")
_DERIVED: Final = {"answer": ("tokens", "mask"), "text": ("tokens",)}

Function = Callable[..., float]


def checked(value: Any, what: str) -> float:
    """A reward, or one part of it, as a float.

    Raises:
        RewardError: naming `what`, when it is a bool, no number, not finite, or larger than MAX_REWARD.
    """
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not -math.inf < value < math.inf:
        raise RewardError(f"{what}: expected a finite float, got {value!r}")
    if abs(value) > MAX_REWARD:
        raise RewardError(f"{what}: expected a float from {-MAX_REWARD:g} to {MAX_REWARD:g}, got {value!r}; scale it")
    return float(value)


class Scorer:
    """Reward functions with weights over a row.

    Raises:
        ConfigError: for a part that does not exist, asks for an unknown name, or needs text without a template.
    """

    def __init__(self, parts: Mapping[str, float] | None = None, *, template: ChatTemplate | None = None) -> None:
        self._weights = dict(parts or {OUTCOME: 1.0})
        self._template = template
        self._functions = {name: load_object(name) for name in self._weights if name != OUTCOME}
        self._wanted = {name: self._parameters(name) for name in self._functions}

    def __repr__(self) -> str:
        return f"<Scorer {' + '.join(f'{weight:g}*{name}' for name, weight in self._weights.items())}>"

    @property
    def built_in(self) -> bool:
        """Whether no code of the user runs."""
        return not self._functions

    @property
    def columns(self) -> list[str]:
        """The columns that scoring reads."""
        wanted = {c for names in self._wanted.values() for n in names for c in _DERIVED.get(n, (n,))}
        return sorted(wanted | {"status", "outcome"})

    def score(self, row: Mapping[str, Any], doing: Doing = untold) -> tuple[float, dict[str, float]]:
        """The reward of a row, and each part's value before its weight. `doing` is told which part is at work.

        Raises:
            RewardError: when a part, or their weighted sum, is not a finite number within MAX_REWARD.
            Exception: whatever a user's function raised.
        """
        parts: dict[str, float] = {}
        for name in self._weights:
            doing(f"scores with {name}")
            parts[name] = self._part(name, row)
        return checked(sum(self._weights[name] * value for name, value in parts.items()), "reward"), parts

    def _part(self, name: str, row: Mapping[str, Any]) -> float:
        return checked(self._outcome(row) if name == OUTCOME else self._call(name, row), name)

    def _outcome(self, row: Mapping[str, Any]) -> float | None:
        outcome: float | None = row["outcome"]
        return 0.0 if outcome is None and row["status"].startswith("truncated_") else outcome

    def _call(self, name: str, row: Mapping[str, Any]) -> float:
        value: float = self._functions[name](**{wanted: self._value(wanted, row) for wanted in self._wanted[name]})
        return value

    def _value(self, name: str, row: Mapping[str, Any]) -> Any:
        if name == "task":
            return msgspec.json.decode(row["task"])
        if name == "text":
            return self._decode(row["tokens"])
        if name == "answer":
            return self._decode(_last_turn(np.asarray(row["tokens"]), np.asarray(row["mask"])))
        return dict(row[name]) if name in ("metrics", "sampling") else row[name]

    def _decode(self, tokens: Any) -> str:
        assert self._template is not None  # checked when the scorer was made
        ids = np.asarray(tokens).tolist()
        return self._template.decode(ids[:-1] if ids and ids[-1] in self._template.stop_ids else ids)

    def _parameters(self, name: str) -> tuple[str, ...]:
        parameters = tuple(inspect.signature(self._functions[name]).parameters)
        for parameter in parameters:
            if parameter not in _PLAIN and parameter not in _DERIVED:
                known = ", ".join([*_PLAIN, *_DERIVED])
                raise ConfigError(f"{name}: expected parameters out of {known}; got {parameter}")
            if parameter in _DERIVED and self._template is None:
                raise ConfigError(f"{name}: {parameter} needs the model's tokenizer; give the scorer a template")
        return parameters


async def run_reward_worker(queue: TransferQueue, scorer: Scorer, config: RewardConfig | None = None) -> None:
    """Score rows until cancelled.

    Consumes rows that the stage `reward` has ready. Produces their reward columns, or drops. Waits for rows,
    in the broker. Unblocked by a rollout that is written, or by the wait running out, after which it asks again.
    """
    config = config or RewardConfig()
    scored = 0
    while True:
        queue.report("waits for rows", scored=float(scored))
        lease = await queue.lease("reward", rows=config.rows, wait=LEASE_WAIT_SECONDS, columns=scorer.columns)
        if lease is not None:
            queue.report("scores", scored=float(scored))
            scored += await _serve(queue, scorer, config, lease)


async def _serve(queue: TransferQueue, scorer: Scorer, config: RewardConfig, lease: Lease) -> int:
    """Write what could be scored, drop the rest by reason; returns how many were scored."""
    scores: dict[int, tuple[float, dict[str, float]]] = {}
    drops: dict[str, list[int]] = {}
    for row in _lines(lease):
        try:
            _refuse_failed(row)
            with queue.waiting("scores", row=row["row"]) as wait:
                scores[row["row"]] = await _score(scorer, row, config.score_seconds, wait.at)
        except _Failed as error:
            drops.setdefault(error.reason, []).append(row["row"])
    return await _hand_back(queue, lease, scores, drops)


def _lines(lease: Lease) -> list[dict[str, Any]]:
    assert lease.batch is not None  # it was asked for with its payload
    lines: list[dict[str, Any]] = lease.batch.to_pylist()
    return lines


class _Failed(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _refuse_failed(row: Mapping[str, Any]) -> None:
    if row["status"] != "completed" and not row["status"].startswith("truncated_"):
        raise _Failed(row["status"])


async def _score(
    scorer: Scorer, row: Mapping[str, Any], seconds: float, doing: Doing
) -> tuple[float, dict[str, float]]:
    """Score one row; code of the user runs in a thread, under a deadline."""
    try:
        if scorer.built_in:
            return scorer.score(row)
        with trio.fail_after(seconds), contained():
            return await trio.to_thread.run_sync(scorer.score, row, doing, abandon_on_cancel=True)
    except Exception as error:  # supervision edge: a scorer's failure costs its row, and is never a reward
        log.exception("row %s could not be scored", row["row"])
        raise _Failed("error_reward") from error


async def _hand_back(
    queue: TransferQueue,
    lease: Lease,
    scores: Mapping[int, tuple[float, dict[str, float]]],
    drops: Mapping[str, list[int]],
) -> int:
    """Returns how many scores were written: rows may have ended, or have gone to another worker, meanwhile."""

    async def write(rows: tuple[int, ...]) -> None:
        rewards, parts = zip(*(scores[row] for row in rows), strict=True)
        await queue.write(lease, reward_batch(rows, rewards, parts))

    written = await on_held(queue, lease, scores, write)
    for reason, rows in drops.items():
        await on_held(queue, lease, rows, partial(queue.drop, lease, reason=reason))
    return len(written)


def _last_turn(tokens: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The ids of the last stretch that the policy sampled."""
    sampled = np.flatnonzero(mask)
    if not len(sampled):
        return tokens[:0]
    before = np.flatnonzero(mask[: sampled[-1]] == 0)
    return tokens[before[-1] + 1 if len(before) else 0 : sampled[-1] + 1]
