"""Which tokens are forwarded in one step, and how their attention is grouped. Pure numpy.

Linear layers see one flat list of tokens without any padding: decoding rows give one token each, newcomers give
their prompt (or the part of it that is not cached). Attention sees groups of rows with similar numbers of tokens,
padded to the longest of the group: one group for all decoding rows, and few others.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows whose attention is computed together: flat tokens `[start, end)`, `rows` rows of `width` queries."""

    start: int
    end: int
    width: int
    slots: Ints  # [rows]
    positions: Ints  # [rows, width], of the padded queries
    pad: Ints | None  # [rows * width] flat tokens relative to `start`; None when every row has `width` tokens
    unpad: Ints | None  # [end - start] padded queries that are real

    @property
    def longest(self) -> int:
        """Cached positions that the group attends to."""
        return int(self.positions.max()) + 1


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: `n` flat tokens of `r` rows, ordered by group.

    `row_slots` `[r]` are the slots of the rows; `last` `[r]` is the flat index of each row's last token.
    """

    slots: Ints  # [n]
    positions: Ints  # [n]
    row_slots: Ints  # [r]
    counts: Ints  # [r]
    last: Ints  # [r]
    groups: tuple[Group, ...]


def share(pending: Ints, order: Ints, budget: int) -> Ints:
    """How many of its `pending` `[rows]` tokens each row may forward when a step forwards at most `budget`.

    Decoding rows (one pending token) come first, so that a long prompt never stalls them; the others by `order`
    `[rows]` (lower is earlier), so that no prompt is overtaken for ever.
    """
    if int(pending.sum()) <= budget:
        return pending
    ranked = np.lexsort((order, pending > 1))
    before = np.cumsum(pending[ranked]) - pending[ranked]
    counts = np.empty_like(pending)
    counts[ranked] = np.clip(budget - before, 0, pending[ranked])
    return counts


def plan(slots: Ints, cached: Ints, counts: Ints) -> Plan:
    """The step that forwards `counts` `[rows]` (each at least 1) tokens of `slots` after their `cached` ones."""
    widths = np.ceil(np.log2(counts))  # groups of 1, 2, 3-4, 5-8, …: padding at most doubles the queries
    order = np.argsort(widths, kind="stable")
    slots, cached, counts, widths = slots[order], cached[order], counts[order], widths[order]
    ends = np.cumsum(counts)
    starts = ends - counts
    flat_slots = np.repeat(slots, counts)
    positions = np.arange(len(flat_slots)) + np.repeat(cached - starts, counts)
    borders = [0, *(np.flatnonzero(np.diff(widths)) + 1).tolist(), len(slots)]
    groups = tuple(
        _group(slots[a:b], cached[a:b], counts[a:b], int(starts[a]), int(ends[b - 1])) for a, b in pairwise(borders)
    )
    return Plan(flat_slots, positions, slots, counts, ends - 1, groups)


def _group(slots: Ints, cached: Ints, counts: Ints, start: int, end: int) -> Group:
    width = int(counts.max())
    if width * len(slots) == end - start:
        positions = cached[:, None] + np.arange(width)
        return Group(start, end, width, slots, positions, None, None)
    # A padding query repeats the row's last one: its mask is never empty and its result is thrown away.
    steps = np.minimum(np.arange(width), counts[:, None] - 1)
    first = np.cumsum(counts) - counts
    pad = (first[:, None] + steps).ravel()
    unpad = np.flatnonzero(np.arange(width) < counts[:, None])
    return Group(start, end, width, slots, cached[:, None] + steps, pad, unpad)
