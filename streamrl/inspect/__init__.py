"""What happened in a run or a queue, read from its journal; the broker may be running.

    rows = streamrl.inspect.read_rows("runs/demo")        # a pyarrow.Table, one line per row

Each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lives import Life as Life
    from .lives import Lives as Lives
    from .reading import read_lives as read_lives
    from .tables import read_events as read_events
    from .tables import read_rows as read_rows
    from .tables import read_steps as read_steps
    from .tables import read_tables as read_tables
    from .tables import read_versions as read_versions

_HOMES = {
    "Life": "lives",
    "Lives": "lives",
    "read_events": "tables",
    "read_lives": "reading",
    "read_rows": "tables",
    "read_steps": "tables",
    "read_tables": "tables",
    "read_versions": "tables",
}

__all__ = [
    "Life",
    "Lives",
    "read_events",
    "read_lives",
    "read_rows",
    "read_steps",
    "read_tables",
    "read_versions",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'streamrl.inspect' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
