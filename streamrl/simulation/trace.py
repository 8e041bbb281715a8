"""What happened in a simulated run, in order, with a digest that two equal runs share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from blake3 import blake3

# Enough to hold the life of every row of a short run; a long one keeps its end.
KEPT: Final = 200_000


class Line(NamedTuple):
    """One thing that happened, and the rows it concerned."""

    time: float
    text: str
    rows: tuple[int, ...]

    def __str__(self) -> str:
        rows = (
            f"  rows {', '.join(map(str, self.rows[:12]))}{', …' if len(self.rows) > 12 else ''}" if self.rows else ""
        )
        return f"{self.time:12.4f}  {self.text}{rows}"


class Trace:
    """The lines of a run. The digest also covers what is not kept, as every message on the network."""

    def __init__(self) -> None:
        self.lines: deque[Line] = deque(maxlen=KEPT)
        self.count = 0
        self._hash = blake3()

    def __repr__(self) -> str:
        return f"<Trace {self.count} entries>"

    def note(self, time: float, text: str, rows: tuple[int, ...] = ()) -> None:
        """Keep a line."""
        self.lines.append(Line(time, text, rows))
        self.mix(time, text, repr(rows).encode())

    def mix(self, time: float, text: str, data: bytes = b"") -> None:
        """Let the digest cover something without keeping it."""
        self.count += 1
        self._hash.update(b"%r %s %s\n" % (time, text.encode(), data))

    @property
    def digest(self) -> str:
        """Of everything so far, as hexadecimal."""
        return str(self._hash.hexdigest(length=16))

    def tail(self, rows: Iterable[int] = (), *, lines: int = 25) -> list[str]:
        """The last lines that concern any of `rows`, or simply the last lines."""
        wanted = set(rows)
        chosen = [line for line in self.lines if not wanted or wanted & set(line.rows)]
        return [str(line) for line in chosen[-lines:]]
