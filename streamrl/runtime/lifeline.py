"""The death pipe: a child process ends at once when its parent is gone, however the parent died.

The parent alone holds the write end. Nothing is ever written; the child's read returns when the kernel closes
the write end, which it does for SIGKILL too. The child then kills its own process group, grandchildren included.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def die_with_parent(fd: int, remove: Sequence[Path] = ()) -> None:
    """Watch the read end `fd` in a thread. `remove` are directories that nobody else would remove then."""
    if sys.platform == "linux":
        # A child that is stopped runs no thread: the kernel wakes it when its parent dies.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=_watch, args=(fd, tuple(remove)), name="lifeline", daemon=True).start()


def _watch(fd: int, remove: tuple[Path, ...]) -> None:
    os.read(fd, 1)
    for directory in remove:
        shutil.rmtree(directory, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
