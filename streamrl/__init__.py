"""streamrl: asynchronous, streaming reinforcement learning for language-model agents.

Importing this package imports nothing heavy; each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl_agents import ToolCall as ToolCall
    from streamrl_queue import AsyncioTransferQueue as AsyncioTransferQueue
    from streamrl_queue import BlockingTransferQueue as BlockingTransferQueue
    from streamrl_queue import StreamingBatches as StreamingBatches
    from streamrl_queue import TransferQueue as TransferQueue
    from streamrl_queue.errors import ConfigError as ConfigError
    from streamrl_queue.errors import StreamRLError as StreamRLError

    from .config import RunConfig as RunConfig
    from .runtime.launcher import run as run
    from .runtime.summary import Summary as Summary

_HOMES = {
    "AsyncioTransferQueue": "streamrl_queue",
    "BlockingTransferQueue": "streamrl_queue",
    "ConfigError": "streamrl_queue.errors",
    "RunConfig": "streamrl.config",
    "StreamRLError": "streamrl_queue.errors",
    "StreamingBatches": "streamrl_queue",
    "Summary": "streamrl.runtime.summary",
    "ToolCall": "streamrl_agents",
    "TransferQueue": "streamrl_queue",
    "run": "streamrl.runtime.launcher",
}

__all__ = [
    "AsyncioTransferQueue",
    "BlockingTransferQueue",
    "ConfigError",
    "RunConfig",
    "StreamRLError",
    "StreamingBatches",
    "Summary",
    "ToolCall",
    "TransferQueue",
    "run",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'streamrl' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
