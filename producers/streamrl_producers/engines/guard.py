"""`python guard.py FD COMMAND…`: runs a server so that nothing of it outlives the process that started it.

It leads the server's process group. When the pipe FD closes, because the parent is gone however it died, the group
is killed. Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def main(arguments: list[str]) -> int:
    fd, command = int(arguments[0]), arguments[1:]
    # A byte per signal wakes the wait below: SIGCHLD tells the child's end.
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while child.poll() is None:
        readable, _, _ = select.select([fd, wakes], [], [])
        if fd in readable:
            os.killpg(0, signal.SIGKILL)
        os.read(wakes, 64)
    # What the server started is asked to end; the parent kills what is left once this process is gone.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
