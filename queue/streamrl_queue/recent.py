"""What is remembered of a past that has no end: the last so many."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def remember(past: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """`key` is the newest; beyond `most` the oldest go."""
    past[key] = value
    past.move_to_end(key)
    while len(past) > most:
        past.popitem(last=False)
