"""Stands in for SGLang's compiled kernels on a CPU without them: every name imports, and raises when it is called.

SGLang imports these names at the top of its modules and, on a CPU without AMX, calls none of them.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but there is no kernel for this CPU")

    return missing
