"""What a worker does with the rest of its lease when rows of it have ended meanwhile, for example as stragglers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from .errors import LeaseExpired

if TYPE_CHECKING:
    from .client import Lease, TransferQueue

log: Final = logging.getLogger(__name__)

Rows = tuple[int, ...]


async def on_held(
    queue: TransferQueue, lease: Lease, rows: Iterable[int], act: Callable[[Rows], Awaitable[Any]]
) -> Rows:
    """`act(rows)`, a write or drop of rows of `lease`; on those that it still holds, when some have ended meanwhile.

    A request that names one row too many is refused as a whole. The rows that are left would then wait for the lease's
    deadline, and lose a delivery.

    Returns:
        The rows that `act` was done on; none when the lease holds none of them any more.

    Raises:
        LeaseExpired: `act` was refused although the lease holds all of its rows.
    """
    rows = tuple(rows)
    while rows:
        try:
            await act(rows)
            return rows
        except LeaseExpired as error:
            log.info("%s; going on with what is left", error)
            held = await _held(queue, lease)
            if held >= set(rows):
                raise
        rows = tuple(row for row in rows if row in held)
    return rows


async def _held(queue: TransferQueue, lease: Lease) -> set[int]:
    try:
        return set(await queue.extend(lease))
    except LeaseExpired:  # the rows are somebody else's now
        return set()
