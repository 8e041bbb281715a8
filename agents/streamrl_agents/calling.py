"""How an environment's own functions are run from trio.

Asynchronous functions are awaited. Synchronous ones run in a worker thread by default: whatever they do, the
producer's heartbeat and every other episode go on, and a deadline can leave them behind. A hop to a thread and
back costs about 0.1 ms of CPU. An environment whose methods only compute says so with `inline = True` and is
called directly. That is a promise and not a guess from earlier timings, because a method that was fast a
thousand times and then hangs on a socket would stop the whole process, beyond the reach of any deadline.

The user's code ends its own call and nothing else: `sys.exit` in it (argparse!) is an error like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import trio

from streamrl_queue.errors import EnvironmentFailed


class Caller:
    """Runs the functions of one episode. `left_behind` counts threads that a deadline abandoned."""

    def __init__(self, *, inline: bool = False) -> None:
        self.inline = inline
        self.left_behind = 0
        # Own tokens, so that one episode's stuck threads never keep another's calls waiting. An episode calls
        # one function at a time: two tokens let `close` run while an abandoned call still holds the other.
        self._tokens = trio.CapacityLimiter(2)

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The function's result; its errors are raised as they are.

        Raises:
            EnvironmentFailed: when it raised what would end the process: SystemExit, KeyboardInterrupt and the like.
        """
        with contained():
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            if self.inline:
                result = function(*args, **kwargs)
            else:
                result = await self._in_thread(partial(function, *args, **kwargs))
            return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        try:
            return await trio.to_thread.run_sync(function, limiter=self._tokens, abandon_on_cancel=True)
        except trio.Cancelled:
            self.left_behind += 1
            raise


@contextmanager
def contained() -> Iterator[None]:
    """The user's code runs in here. What it raises is an Exception afterwards; trio's cancellation passes through."""
    try:
        yield
    except (Exception, trio.Cancelled, GeneratorExit):
        raise
    except BaseExceptionGroup as group:
        cancelled, failed = group.split(trio.Cancelled)
        if failed is None or isinstance(failed, Exception):
            raise
        error = _failure(failed)
        if cancelled is None:
            raise error from group
        raise BaseExceptionGroup(group.message, [cancelled, error]) from group
    except BaseException as error:  # supervision edge: the user's code must not end the process
        raise _failure(error) from error


def _failure(error: BaseException) -> EnvironmentFailed:
    return EnvironmentFailed(f"raised {error!r}")
