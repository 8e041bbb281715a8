"""Child processes: started in their own sessions, restarted within limits, never left behind.

A process that a signal killed (out of memory, kill -9, a crash in native code) is restarted when its policy
allows it. A process that *raised* is not: it would raise again, and the first error should end the run with its
own words. All children hang on one death pipe and die with this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from streamrl_queue.errors import RoleFailed

from .failure import LastWords

TAIL_LINES: Final = 15
"""Lines of a failed role's log in the error: a traceback's end and what led to it, on one screen."""


@dataclass(frozen=True)
class RoleSpec:
    """One process of a run.

    `restarts` is how often it may be restarted within `window` seconds after a signal killed it; `ends` says that
    it may end by itself with exit code 0.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    restarts: int = 0
    window: float = 600.0
    ends: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def last_words(self) -> Path:
        """Where the role leaves the error that ended it."""
        return self.log.with_suffix(".error")


class Role:
    """One supervised process: its present incarnation and what became of the earlier ones."""

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.stopping = False
        # Why its supervisor killed it, if it did.
        self.killed_for: str | None = None
        self.ended = trio.Event()
        self._deaths: deque[float] = deque()

    def __repr__(self) -> str:
        state = "ended" if self.ended.is_set() else f"pid {self.pid}"
        return f"<Role {self.spec.name} {state} starts={self.starts}>"

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def signal(self, number: int) -> None:
        """Send a signal to the role's process, if it still runs."""
        if self.running:
            assert self.process is not None
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the whole process group, grandchildren included."""
        if self.running:
            assert self.process is not None
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill_for(self, reason: str) -> None:
        """Kill the role, and say why when its end is told."""
        self.killed_for = reason
        self.kill()

    def may_restart(self, now: float) -> bool:
        """Count one death at `now` and say whether the policy forgives it."""
        self._deaths.append(now)
        while self._deaths and self._deaths[0] <= now - self.spec.window:
            self._deaths.popleft()
        return len(self._deaths) <= self.spec.restarts

    def failure(self) -> RoleFailed:
        """Says how the role ended, with the end of its log."""
        assert self.process is not None
        code = self.process.returncode
        words = LastWords.read(self.spec.last_words)
        if words and words.ours:
            return RoleFailed(f"{self.spec.name}: {words.error}: {words.message} (log: {self.spec.log})")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code < 0 and self.killed_for:
            how += f" by its supervisor, because {self.killed_for}"
        if code >= 0 and words is None:
            how += " and left no error: something in it may have called sys.exit or os._exit, code of yours included"
        if code < 0 and self.spec.restarts:
            how += f" {len(self._deaths)} times within {self.spec.window:.0f} s (limit {self.spec.restarts})"
        return RoleFailed(f"{self.spec.name} {how}; the end of {self.spec.log}:\n{log_tail(self.spec.log)}")


Died = Callable[[Role, bool], Awaitable[None]]
"""Told of each death that was not asked for, and whether the role is started again."""


class Supervisor:
    """Starts roles in one nursery and keeps the promises of this module."""

    def __init__(self, nursery: trio.Nursery, died: Died) -> None:
        self.nursery = nursery
        self._died = died
        self.roles: dict[str, Role] = {}
        # Non-inheritable: only this process holds the write end.
        self._read, self._write = os.pipe()

    def __repr__(self) -> str:
        return f"<Supervisor {', '.join(map(repr, self.roles.values()))}>"

    def start(self, spec: RoleSpec) -> Role:
        """Start a role and supervise it from now on; an unforgiven death raises RoleFailed in the nursery."""
        role = self.roles[spec.name] = Role(spec)
        self._spawn(role)
        self.nursery.start_soon(self._supervise, role)
        return role

    async def stop(self, roles: Sequence[Role], seconds: float) -> tuple[str, ...]:
        """Ask roles to drain (SIGTERM), kill what still runs after `seconds`; returns the names of those killed."""
        for role in roles:
            role.stopping = True
            role.signal(signal.SIGTERM)
        with trio.move_on_after(seconds):
            for role in roles:
                await role.ended.wait()
        late = tuple(role.spec.name for role in roles if role.running)
        for role in roles:
            role.kill()
        for role in roles:
            await role.ended.wait()
        return late

    def kill_all(self) -> None:
        """Kill every role now, and wait until the kernel has ended them."""
        for role in self.roles.values():
            role.stopping = True
            role.kill()
        for role in self.roles.values():
            if role.process is not None:
                role.process.wait()

    def close(self) -> None:
        self.kill_all()
        os.close(self._read)
        os.close(self._write)

    def _spawn(self, role: Role) -> None:
        spec = role.spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        spec.last_words.unlink(missing_ok=True)
        with spec.log.open("ab") as log:
            role.process = subprocess.Popen(
                [*spec.command, "--lifeline", str(self._read)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(self._read,),
                env={**os.environ, **spec.environment},
            )
        role.starts += 1

    async def _supervise(self, role: Role) -> None:
        """Consumes the exits of one role's processes, produces restarts or RoleFailed.

        Waits for the process to end; unblocked by its exit, which `stop` and `kill_all` bring about.
        """
        try:
            while True:
                assert role.process is not None
                await _exited(role.process)
                # What the process leaves in its group must not outlive it. Not reaped yet, it still owns the id.
                role.kill()
                code = role.process.wait()
                if role.stopping or (code == 0 and role.spec.ends):
                    return
                again = code < 0 and role.may_restart(time.monotonic())
                await self._died(role, again)
                if not again:
                    raise role.failure()
                self._spawn(role)
        finally:
            role.ended.set()


@asynccontextmanager
async def supervisor(died: Died) -> AsyncIterator[Supervisor]:
    """A supervisor whose roles are all dead when the block is left, in whichever way."""
    async with trio.open_nursery() as nursery:
        roles = Supervisor(nursery, died)
        try:
            yield roles
        finally:
            roles.close()


async def _exited(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has ended, and leave it unreaped."""
    if process.returncode is not None:
        return
    if sys.platform != "linux":
        await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        return
    fd = os.pidfd_open(process.pid)
    try:
        await trio.lowlevel.wait_readable(fd)
    finally:
        os.close(fd)


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented; reads only the end of a large file."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        text = ""
    tail = text.splitlines()[-lines:]
    return "\n".join(f"    {line}" for line in tail) or "    (the log is empty)"
