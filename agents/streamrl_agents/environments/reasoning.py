"""Any data set of reasoning-gym (`streamrl[envs]`) as an environment of one turn.

`env=streamrl_agents.environments.reasoning:chain_sum` plays a data set as it is. With other settings it is a class:

    class Sums(ReasoningGym):
        dataset = "chain_sum"
        settings = {"max_terms": 3, "max_digits": 2}

A task is the seed of an entry; each attempt makes the entry again. The reward is the data set's own `score_answer`,
which may give parts of a point. Where it raises, as a few do on answers they cannot parse, the row is an error.
"""

import difflib
import importlib
import random
from typing import Any, ClassVar

from streamrl_queue.errors import ConfigError, EnvironmentFailed


class ReasoningGym:
    dataset: ClassVar[str] = ""
    settings: ClassVar[dict[str, Any]] = {}
    system: ClassVar[str] = "Think first. Then give the final answer alone, between <answer> and </answer>."

    def __init_subclass__(cls) -> None:
        """Refuse a class that could never play, when it is defined."""
        if cls.dataset:
            _check(cls)

    def reset(self, task: dict[str, Any]) -> list[dict[str, str]]:
        self.source = _make(self, task["seed"])
        self.entry = self.source[0]
        if self.entry["question"] != task["question"]:
            raise EnvironmentFailed(
                f"{self.dataset}: seed {task['seed']} gives another question here than where the task was made; use "
                "one version of reasoning-gym, and set PYTHONHASHSEED=0: some data sets depend on the order of sets"
            )
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.entry["question"]}]

    def reward(self, answer: str) -> float:
        """The score of what stands between the last <answer> and </answer>, or of the whole text without them."""
        final = answer.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        return float(self.source.score_answer(final, self.entry))

    @classmethod
    def task(cls, rng: random.Random) -> dict[str, Any]:
        if not cls.dataset:
            raise ConfigError(f"{cls.__name__}.dataset: expected the name of a data set; write reasoning:chain_sum")
        seed = rng.randrange(2**31)
        return {"seed": seed, "question": _make(cls, seed)[0]["question"]}


def __getattr__(name: str) -> type[ReasoningGym]:
    """The environment of the data set of this name."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return type(name, (ReasoningGym,), {"dataset": name, "__module__": __name__})


def _make(kind: type[ReasoningGym] | ReasoningGym, seed: int) -> Any:
    return importlib.import_module("reasoning_gym").create_dataset(kind.dataset, size=1, seed=seed, **kind.settings)


def _check(kind: type[ReasoningGym]) -> None:
    try:
        known = importlib.import_module("reasoning_gym").factory.DATASETS
    except ImportError as error:
        raise ConfigError(f"{kind.__name__} needs reasoning-gym ({error}); pip install 'streamrl[envs]'") from error
    if kind.dataset not in known:
        close = difflib.get_close_matches(kind.dataset, known, 3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"reasoning-gym has no data set {kind.dataset}{hint}")
    try:
        _make(kind, 0)
    except (AssertionError, TypeError, ValueError) as error:  # what its configurations raise
        raise ConfigError(f"{kind.__name__}.settings: {kind.dataset} refuses {kind.settings}: {error}") from error
