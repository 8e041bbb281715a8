"""The TransferQueue: rows, leases, a journal, commits tied to checkpoints, bounded staleness. Usable alone."""

from .blocking import BlockingTransferQueue
from .broker import Broker, open_broker
from .client import Lease, TransferQueue
from .config import Admission, Flow, QueueConfig, Stage, training_flow, work_flow
from .messages import Member, Membership, Receipt
from .schema import Segment, Span, Task, Trajectory
from .state import Statistics, Version

__all__ = [
    "Admission",
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
    "Task",
    "Trajectory",
    "TransferQueue",
    "Version",
    "open_broker",
    "training_flow",
    "work_flow",
]
