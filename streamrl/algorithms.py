"""The pieces that `algorithm` may name in a configuration, as text."""

from __future__ import annotations

import inspect
import textwrap

from msgspec import inspect as types

from streamrl_learners.algorithms.base import Advantage, Piece, tag_of
from streamrl_learners.algorithms.pieces import Algorithm

from .settings import variants

WIDTH = 100
INDENT = 24


def listing() -> str:
    """Every piece by the key that names it: what it does, and where its equation is from."""
    info = types.type_info(Algorithm)
    assert isinstance(info, types.StructType)
    lines = []
    for field in info.fields:
        kinds = [struct.cls for struct in variants(field.type) if issubclass(struct.cls, Piece)]
        if kinds:
            lines.append(f"algorithm.{field.name}" + (": null, or" if field.default is None else ":"))
            lines += [_entry(kind, chosen=type(field.default) is kind) for kind in kinds]
    return "\n".join(lines)


def _entry(kind: type[Piece], *, chosen: bool) -> str:
    notes = []
    if chosen:
        notes.append("the default")
    if issubclass(kind, Advantage) and kind.standardises:
        notes.append("holds a step until all its rows are in")
    if not kind.__module__.startswith("streamrl_learners."):
        notes.append(f"from {kind.__module__}")
    summary = (inspect.getdoc(kind) or "").partition("\n")[0] + (f" ({'; '.join(notes)})" if notes else "")
    name = f"  {tag_of(kind)}".ljust(INDENT - 1) + " "
    told = textwrap.fill(summary, WIDTH, initial_indent=name, subsequent_indent=" " * INDENT)
    return f"{told}\n{' ' * INDENT}[{kind.source}]"
