"""The demo's environment with a tool that takes a while, so that episodes outlast the learner's steps."""

import random
from collections.abc import Iterator
from typing import Any

import trio

from streamrl_agents import ToolCall
from streamrl_agents.environments.lookup import Lookup

MAX_TOOL_SECONDS = 1.0


class SlowLookup(Lookup):
    scripted = False

    async def get(self, key: str) -> str:  # type: ignore[override]
        """Look a key up in the store.

        Args:
            key: two letters.
        """
        if not self.scripted:
            await trio.sleep(random.uniform(0, MAX_TOOL_SECONDS))
        return super().get(key)

    @staticmethod
    def demonstrate(task: dict[str, Any], rng: random.Random, sloppy: bool) -> Iterator[str | ToolCall]:
        """Demonstrations, which the learner's process plays one by one before the first step, do not wait."""
        SlowLookup.scripted = True
        return Lookup.demonstrate(task, rng, sloppy)
