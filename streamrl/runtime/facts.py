"""Asks a run's queue for all that `chain` needs. Three small requests; none walks over rows."""

from __future__ import annotations

import time
from collections.abc import Sequence

from streamrl_queue import TransferQueue

from .chain import Facts


async def facts_of(queue: TransferQueue, roles: Sequence[str]) -> Facts:
    """The run at this moment; `roles` are the names of its processes, the broker's not among them."""
    members = (await queue.members()).members
    rows = [wait.row for member in members for wait in member.waits if wait.row]
    return Facts(time.time(), tuple(roles), members, await queue.statistics(), await queue.leased(rows))
