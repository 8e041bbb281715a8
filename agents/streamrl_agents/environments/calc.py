"""Two steps of arithmetic with a calculator that does one operation a call: `Compute 12+34*56`."""

import random
import re
from collections.abc import Iterator
from typing import Any

from streamrl_agents import ToolCall

FORMS = ("a*b+c", "a+b*c", "a*b-c", "a-b*c")


def compute(expression: str) -> str:
    match = re.fullmatch(r"\s*(-?\d{1,6})\s*([+*-])\s*(-?\d{1,6})\s*", expression)
    x, y = (int(match[1]), int(match[3])) if match else (0, 0)
    return str({"+": x + y, "-": x - y, "*": x * y}[match[2]]) if match else "error"


def steps(form: str, a: int, b: int, c: int) -> tuple[str, str]:
    """The two calls that solve a task; `{}` in the second stands for the first one's result."""
    return (f"{a}*{b}", f"{{}}{form[3]}{c}") if form[1] == "*" else (f"{b}*{c}", f"{a}{form[1]}{{}}")


class Calc:
    inline = True  # the methods only compute
    vocabulary = ("Compute ", "error")

    def reset(self, task: dict[str, Any]) -> str:
        first, second = steps(task["form"], *task["numbers"])
        self.solution, self.calls = f"Answer: {compute(second.format(compute(first)))}", 0
        numbers = dict(zip("abc", map(str, task["numbers"]), strict=True))
        return "Compute " + "".join(numbers.get(x, x) for x in task["form"])

    def calculator(self, expression: str) -> str:
        """Compute one operation (+, - or *) on two whole numbers."""
        self.calls += 1
        self.done = self.calls > 3
        return compute(expression)

    def reward(self, answer: str) -> float:
        return float(answer.strip() == self.solution)

    @staticmethod
    def task(rng: random.Random) -> dict[str, Any]:
        return {"form": rng.choice(FORMS), "numbers": [rng.randint(2, 99) for _ in range(3)]}

    @staticmethod
    def demonstrate(task: dict[str, Any], rng: random.Random, sloppy: bool) -> Iterator[str | ToolCall]:
        """A sloppy one makes each call a wrong one with probability 0.3, and forgets the second with 0.15."""
        noise, (a, b, c) = 0.3 * sloppy, task["numbers"]
        first, second = steps(task["form"], a, b, c)
        if rng.random() < noise:
            first = rng.choice([f"{a}{rng.choice('+-*')}{b}", f"{b}{rng.choice('+-*')}{c}"])
        yield ToolCall("calculator", {"expression": first})
        if rng.random() >= noise / 2:
            second = f"{{}}{rng.choice('+-*')}{rng.choice([a, b, c])}" if rng.random() < noise else second
            first = second.format(compute(first))
            yield ToolCall("calculator", {"expression": first})
        yield f"Answer: {compute(first)}"
