"""Values as people read them, and tables for the terminal, for spreadsheets and for machines."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

MOST_CHARACTERS: Final = 60
"""Of one value in a table for the terminal."""


def shown(value: Any) -> str:
    """A value in a cell: floats with four digits, times of day with milliseconds, nothing for null."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case datetime():
            return f"{value:%Y-%m-%d %H:%M:%S}.{value.microsecond // 1000:03d}"
        case dict():
            return " ".join(f"{key}={shown(part)}" for key, part in value.items())
        case bytes():
            return value.decode(errors="replace")
    return str(value)


def plain(value: Any) -> Any:
    """A value as JSON can say it: NaN and infinities as null, bytes as text, times in ISO format."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case bytes():
            return value.decode(errors="replace")
        case datetime():
            return value.isoformat()
        case Mapping():
            return {str(key): plain(part) for key, part in value.items()}
        case list() | tuple():
            return [plain(part) for part in value]
        case None | bool() | int() | str():
            return value
    return str(value)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(plain(value), sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")


def print_csv(names: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """A header and one line per row on standard output; null is empty."""
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(names)
    for line in lines:
        out.writerow(["" if value is None else _cell(value) for value in line])


def _cell(value: Any) -> Any:
    found = plain(value)
    return json.dumps(found, ensure_ascii=False) if isinstance(found, dict | list) else found


def print_table(
    console: Console, names: Sequence[str], lines: Sequence[Sequence[Any]], *, title: str | None = None
) -> None:
    """A table for the terminal; numbers to the right, long values cut."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(names):
        numbers = all(isinstance(line[i], int | float | None) and not isinstance(line[i], bool) for line in lines)
        table.add_column(name, justify="right" if numbers and lines else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text(_cut(shown(value))) for value in line))
    console.print(table)


def _cut(text: str) -> str:
    text = text.replace("\n", "⏎")
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count} bytes" if count < 1 << 20 else f"{count / 2**20:.1f} MiB"
