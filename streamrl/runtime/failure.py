"""Which of several errors to tell: nurseries report groups, a person wants the one that came first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from streamrl_queue.errors import RoleFailed, StreamRLError


class LastWords(msgspec.Struct, frozen=True):
    """What a role that raised leaves for its supervisor: the error's class and message.

    `ours` says that streamrl raised it on purpose, so that no traceback is needed to understand it.
    """

    error: str
    message: str
    ours: bool

    @classmethod
    def of(cls, error: BaseException) -> LastWords:
        return cls(type(error).__name__, str(error), isinstance(error, StreamRLError))

    @classmethod
    def read(cls, path: Path) -> LastWords | None:
        """None when the role left none."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))


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
