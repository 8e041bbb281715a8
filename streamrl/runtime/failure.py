"""Which of several errors to tell: nurseries report groups, a person wants the one that came first."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl_queue.errors import RoleFailed, StreamRLError


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The single errors inside nested groups, in order."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error


def first_error(error: BaseException) -> BaseException:
    """The error to show for `error`: a role's failure before its consequences elsewhere, ours before others."""
    found = list(leaves(error))
    for kind in (RoleFailed, StreamRLError, Exception):
        for leaf in found:
            if isinstance(leaf, kind):
                return leaf
    return found[0]
