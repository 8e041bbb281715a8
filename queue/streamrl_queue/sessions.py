"""Who is at the queue: sessions that live by heartbeat, and what they say about themselves. Pure.

Sessions are not journaled. After a restart the holders of leases are expected back within `session_seconds`.
"""

from __future__ import annotations

import msgspec

from .errors import SessionLost
from .messages import Announce, Heartbeat, Hello, Member, Membership


class Sessions:
    """All live sessions, and an epoch that moves when somebody joins, leaves, announces or is fenced."""

    def __init__(self, session_seconds: float, *, epoch: int = 0) -> None:
        """`epoch`: where to start; a broker that restarts must not repeat one that somebody waits for to pass."""
        self.session_seconds = session_seconds
        self.epoch = epoch
        self._members: dict[str, Member] = {}
        self._deadlines: dict[str, float] = {}
        self._beats: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def open(self, now: float, at: float, session: str, hello: Hello, fenced: int | None = None) -> None:
        """A process is here, or here again. Announcements up to the number `fenced` do not count."""
        counts = fenced is None or hello.announced > fenced
        ready, version = (hello.ready, hello.version) if counts else (False, None)
        self._members[session] = Member(
            session, hello.name, hello.role, hello.endpoint, ready, version, "starts", at, {}, hello.announced
        )
        self._deadlines[session] = now + self.session_seconds
        self.epoch += 1

    def expect(self, now: float, session: str) -> None:
        """A session that held leases before a restart: keep them until it is back or late."""
        self._deadlines.setdefault(session, now + self.session_seconds)

    def is_open(self, session: str) -> bool:
        """Whether somebody has said Hello under this name and has not left or been lost."""
        return session in self._members

    def require(self, session: str) -> None:
        """Raise SessionLost unless the session is open."""
        if not self.is_open(session):
            raise SessionLost(f"session {session} is not open here")

    def beat(self, now: float, session: str, beat: Heartbeat, number: int) -> None:
        """A sign of life, with what the process does or waits for. Its number rises: a copy is no sign of life."""
        if number <= self._beats.get(session, 0):
            return
        self._beats[session] = number
        self._deadlines[session] = now + self.session_seconds
        self._members[session] = msgspec.structs.replace(
            self._members[session],
            activity=beat.activity,
            since=beat.since,
            gauges=beat.gauges,
            waits=beat.waits,
        )

    def announce(self, session: str, message: Announce) -> None:
        """An engine may be used from now on, or not. One that comes late, behind a later one, does not count."""
        if message.announced > self.announced(session):
            self._set(session, ready=message.ready, version=message.version, announced=message.announced)

    def announced(self, session: str) -> int:
        """The number of the open session's last announcement."""
        return self._members[session].announced

    def fence(self, session: str) -> None:
        """An open session's engine must not be used until it announces itself again."""
        self._set(session, ready=False, version=None)

    def _set(self, session: str, **changes: object) -> None:
        self._members[session] = msgspec.structs.replace(self._members[session], **changes)
        self.epoch += 1

    def end(self, session: str) -> None:
        """The process is gone."""
        self._deadlines.pop(session, None)
        self._beats.pop(session, None)
        if self._members.pop(session, None):
            self.epoch += 1

    def named(self, name: str) -> list[str]:
        """The sessions of the process of that name."""
        return [session for session, member in self._members.items() if member.name == name]

    def name(self, session: str) -> str:
        """What to call a session in a message."""
        return self._members[session].name if session in self._members else f"session {session}"

    def absent(self) -> list[str]:
        """Sessions that held leases before a restart and have not come back."""
        return [session for session in self._deadlines if session not in self._members]

    def late(self, now: float) -> list[str]:
        """The sessions whose heartbeat is overdue."""
        return [session for session, deadline in self._deadlines.items() if deadline <= now]

    def next_deadline(self) -> float:
        """When the first session will be late."""
        return min(self._deadlines.values(), default=float("inf"))

    def membership(self, role: str | None) -> Membership:
        """Who is here, of one role or of all."""
        members = (m for m in self._members.values() if role is None or m.role == role)
        return Membership(self.epoch, tuple(members))
