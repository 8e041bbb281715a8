"""What a docstring says of a function and of its parameters (Google style)."""

from __future__ import annotations

import inspect
import re
from typing import Final

_SECTION: Final = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):(.*)$")
_PARAMETERS: Final = frozenset({"Args", "Arguments", "Parameters"})
_ENTRY: Final = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def parse(docstring: str | None) -> tuple[str, dict[str, str]]:
    """The description, and the description of each parameter under `Args:`.

    An entry is `name: text` or `name (type): text`; deeper-indented lines continue it. Sections other than the
    arguments (`Returns:`, `Raises:`, …) are for people and are left out.
    """
    description: list[str] = []
    parameters: list[str] = []
    target: list[str] | None = description
    for line in inspect.cleandoc(docstring or "").splitlines():
        if section := _SECTION.match(line):
            target = parameters if section[1] in _PARAMETERS else None
            line = section[2]
        if target is not None:
            target.append(line)
    return "\n".join(description).strip(), _entries(parameters)


def _entries(lines: list[str]) -> dict[str, str]:
    entries: dict[str, str] = {}
    name, indent = "", 0
    for line in filter(str.strip, lines):
        depth = len(line) - len(line.lstrip())
        entry = _ENTRY.match(line.strip())
        if entry and (not name or depth <= indent):
            name, indent = entry[1], depth
            entries[name] = entry[2].strip()
        elif name:
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return entries
