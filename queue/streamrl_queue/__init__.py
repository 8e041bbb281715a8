"""The TransferQueue: rows, leases, a journal, commits tied to checkpoints, bounded staleness. Usable alone.

Names are imported when they are first asked for, so that a light module costs nothing but itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .asyncio_client import AsyncioTransferQueue
    from .blocking import BlockingTransferQueue
    from .broker import Broker, open_broker
    from .client import Lease, TransferQueue
    from .config import Admission, Flow, QueueConfig, Stage, training_flow, work_flow
    from .messages import Member, Membership, Receipt
    from .schema import Segment, Span, Task, Trajectory
    from .state import Statistics, Version
    from .streaming import StreamingBatches
    from .tensors import Batch
    from .waits import Waiting

_MODULES: Final = {
    "Admission": ".config",
    "AsyncioTransferQueue": ".asyncio_client",
    "Batch": ".tensors",
    "BlockingTransferQueue": ".blocking",
    "Broker": ".broker",
    "Flow": ".config",
    "Lease": ".client",
    "Member": ".messages",
    "Membership": ".messages",
    "QueueConfig": ".config",
    "Receipt": ".messages",
    "Segment": ".schema",
    "Span": ".schema",
    "Stage": ".config",
    "Statistics": ".state",
    "StreamingBatches": ".streaming",
    "Task": ".schema",
    "Trajectory": ".schema",
    "TransferQueue": ".client",
    "Version": ".state",
    "Waiting": ".waits",
    "open_broker": ".broker",
    "training_flow": ".config",
    "work_flow": ".config",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name], __name__), name)
    return value


__all__ = [
    "Admission",
    "AsyncioTransferQueue",
    "Batch",
    "BlockingTransferQueue",
    "Broker",
    "Flow",
    "Lease",
    "Member",
    "Membership",
    "QueueConfig",
    "Receipt",
    "Segment",
    "Span",
    "Stage",
    "Statistics",
    "StreamingBatches",
    "Task",
    "Trajectory",
    "TransferQueue",
    "Version",
    "Waiting",
    "open_broker",
    "training_flow",
    "work_flow",
]
