"""Follow references through a key/value store that only a tool can see: `see cd`, `see ef`, `value 42`."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from streamrl_agents import ToolCall

LETTERS = "abcdefghij"
MAX_CALLS = 4


class Lookup:
    inline = True  # the methods only compute
    vocabulary = ("Find the value of ", "see ", "value ", "not found")

    def reset(self, task: dict[str, Any]) -> str:
        keys, value = task["keys"], task["value"]
        self.store = {key: f"see {following}" for key, following in pairwise(keys)}
        self.store[keys[-1]] = f"value {value}"
        self.solution = f"Answer: {value}"
        self.calls = 0
        return f"Find the value of {keys[0]}"

    def get(self, key: str) -> str:
        """Look a key up in the store.

        Args:
            key: two letters.
        """
        self.calls += 1
        self.done = self.calls > MAX_CALLS
        return self.store.get(key, "not found")

    def reward(self, answer: str) -> float:
        return float(answer.strip() == self.solution)

    @staticmethod
    def task(rng: random.Random) -> dict[str, Any]:
        pairs = [first + second for first in LETTERS for second in LETTERS]
        return {"keys": rng.sample(pairs, rng.randint(1, 3)), "value": rng.randint(10, 99)}

    @staticmethod
    def demonstrate(task: dict[str, Any], rng: random.Random, sloppy: bool) -> Iterator[str | ToolCall]:
        """A sloppy one gives up before each call with probability 0.6, or wastes a call with 0.05."""
        keys, step = task["keys"], 0
        while step < len(keys):
            luck = rng.random() if sloppy else 1.0
            if luck < 0.6:
                yield f"Answer: {rng.randint(10, 99)}"
                return
            if luck < 0.65:  # a made-up key; then it goes one step back
                yield ToolCall("get", {"key": rng.choice(LETTERS) + rng.choice(LETTERS)})
                step = max(step - 1, 0)
            else:
                yield ToolCall("get", {"key": keys[step]})
                step += 1
        yield f"Answer: {task['value']}"
