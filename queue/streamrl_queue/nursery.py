"""Nurseries whose first error wins and arrives as itself, not wrapped in a group.

A caller of `async with TransferQueue.connect(...)` writes `except LeaseExpired`, whatever runs beside its block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

T = TypeVar("T")


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the nursery: the first that is not a mere cancellation."""
    flat: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending[:0] = error.exceptions
        else:
            flat.append(error)
    return next((error for error in flat if not isinstance(error, trio.Cancelled)), flat[0])


@asynccontextmanager
async def open_nursery() -> AsyncIterator[trio.Nursery]:
    """A trio nursery that raises its first error ungrouped; the others are its context."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        error = first_error(group)
        raise error from error.__cause__


def run(main: Callable[..., Awaitable[T]], *args: object) -> T:
    """`trio.run`, with the first error ungrouped."""
    try:
        return trio.run(main, *args)
    except BaseExceptionGroup as group:
        error = first_error(group)
        raise error from error.__cause__
