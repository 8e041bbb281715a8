"""The demo's environment and a reward function that stand still as long as files say so."""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamrl_agents import ToolCall
from streamrl_agents.environments.lookup import Lookup

# Names the directory in which a file `tool` or `scorer` stops one or the other.
PLACE = "STREAMRL_TEST_STALLS"
LOOK_SECONDS = 0.02


def stand_still(who: str) -> None:
    while (Path(os.environ[PLACE]) / who).exists():
        time.sleep(LOOK_SECONDS)


def judge(turns: int) -> float:
    stand_still("scorer")
    return 0.0


class Stalling(Lookup):
    inline = False
    scripted = False

    def get(self, key: str) -> str:
        """Look a key up in the store.

        Args:
            key: two letters.
        """
        if not self.scripted:
            stand_still("tool")
        return super().get(key)

    @staticmethod
    def demonstrate(task: dict[str, Any], rng: random.Random, sloppy: bool) -> Iterator[str | ToolCall]:
        """The learner's process plays demonstrations before the first step."""
        Stalling.scripted = True
        return Lookup.demonstrate(task, rng, sloppy)
