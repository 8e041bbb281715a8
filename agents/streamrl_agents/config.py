"""Configuration of episodes and rewards. Light: imports nothing but msgspec, bounds and errors."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from streamrl_queue.bounds import COUNT, SECONDS, check_bounds
from streamrl_queue.errors import ConfigError

# How a model writes tool calls; `auto`: as its chat template shows it. See formats.py.
ToolFormatName = Literal["auto", "hermes", "llama3_json", "pythonic", "mistral", "deepseek", "json"]
# Of one part of the reward; a reward itself is at most so large.
MOST_WEIGHT: Final = 1_000_000


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one episode may use.

    `max_turns` counts the model's turns. `max_turn_tokens` bounds the ids sampled in one turn, `max_tokens` all
    ids of the row, prompts and tool results included. A turn deadline covers one `generate`, a tool deadline
    one call into the environment (constructor, reset, tool or reward), the episode deadline everything from the
    constructor to the reward. A tool's text that is longer than `max_tool_characters` (Unicode code points) loses its
    beginning: results and the reasons of errors stand at the end. A marker says how much is gone.

    Raises:
        ConfigError: when a limit is not positive.
    """

    max_turns: int = 8
    max_turn_tokens: int = 512
    max_tokens: int = 4096
    max_tool_characters: int = 16384
    turn_seconds: float = 120.0
    tool_seconds: float = 30.0
    episode_seconds: float = 600.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if not value > 0:
                raise ConfigError(f"{field}: expected a number above 0, got {value!r}")


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reward of a row: the sum over `parts` of weight times value.

    A part is `outcome` (what the environment's own `reward` returned) or the spec of a function,
    `module:name` or `path/file.py:name`. `rows` bounds one lease, `score_seconds` the scoring of one row by
    functions that are not built in.

    Raises:
        ConfigError: when there is no part, one is no function's name, or a number is out of its bounds.
    """

    parts: dict[str, float] = msgspec.field(default_factory=lambda: {"outcome": 1.0})
    """Reward functions and their weights: `outcome`, or a function's `module:name` or `path/file.py:name`."""
    rows: int = 64
    """Most rows of one lease."""
    score_seconds: float = 30.0
    """Deadline of scoring one row with functions that are not built in, in seconds."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError(
                'reward.parts: expected at least one reward function, got none; "outcome: 1.0" is the built-in one'
            )
        for name, weight in self.parts.items():
            if name != "outcome" and not all(name.rpartition(":")[::2]):
                raise ConfigError(f"reward.parts: expected outcome, module:name or path/file.py:name, got {name!r}")
            if not -MOST_WEIGHT <= weight <= MOST_WEIGHT:
                raise ConfigError(
                    f"reward.parts.{name}: expected a weight from {-MOST_WEIGHT} to {MOST_WEIGHT}, got {weight}"
                )
        check_bounds(self, "reward", {"rows": COUNT, "score_seconds": (0.001, SECONDS[1])})
