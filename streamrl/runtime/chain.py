"""Who waits for whom, followed to its end: a pure function of what the members and the queue say.

    coordinator ──► learner-0 ──► stage learn ──► group 812 ──► producer-0, row 6501 ──► engine ──► engine-1

Each process tells what it waits for and, where somebody else must act, who (`Waiting.on`): a process, a role, or a
stage of the queue. A stage stands for the rows that have not reached it: of these the one whose holder is at one thing
for the longest is followed; where nobody holds any, whoever should take them is. The last link is where to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from streamrl_queue import Member, Statistics, Waiting
from streamrl_queue.messages import Leased, LeasedRow

COORDINATOR: Final = "coordinator"
LEADER: Final = "learner-0"
QUEUE: Final = "queue"
SILENT: Final = "is silent"
"""What the coordinator's entry says of a process that has lost its session."""
TAKERS: Final = {"advantage": "scorer", "reward": "scorer", "rollout": "producer"}
"""Stage → the role that takes its rows; those nearest to the learner first."""


class Link(msgspec.Struct, frozen=True):
    """One that waits: `what` it waits for or does, and for how many seconds (None: not known)."""

    who: str
    what: str
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.who}: {self.what}" + ("" if self.seconds is None else f" for {self.seconds:.0f} s")


@dataclass(frozen=True)
class Facts:
    """A run at one moment. `roles` are all processes that should be members; `now` is in seconds since the epoch."""

    now: float
    roles: Sequence[str]
    members: Sequence[Member]
    statistics: Statistics
    leased: Leased

    def member(self, name: str) -> Member | None:
        """The process of that name, if it has a session."""
        return next((member for member in self.members if member.name == name), None)

    def of_role(self, role: str) -> list[str]:
        """The names of all processes of a role."""
        return [name for name in self.roles if name.rpartition("-")[0] == role]

    @property
    def silent(self) -> list[str]:
        """Processes without a session."""
        return [name for name in self.roles if self.member(name) is None]


def told(links: Sequence[Link]) -> str:
    """The chain in one line."""
    return "; ".join(map(str, links))


def chain(facts: Facts) -> tuple[Link, ...]:
    """Who waits for whom, from the coordinator on; the last link waits for nobody that is known."""
    return tuple(_Walk(facts).links)


class _Walk:
    """Follows the waiting from one to the next; nobody is passed twice."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.links: list[Link] = []
        self._passed: set[str] = set()
        self._follow(COORDINATOR)

    def _follow(self, who: str) -> None:
        if not who or who in self._passed:
            return
        self._passed.add(who)
        if who == QUEUE:
            self._add(QUEUE, self.facts.leased.full or "answers")
        elif who in self.facts.statistics.stages:
            self._rows_before(who)
        elif who in self.facts.roles or who == COORDINATOR:
            self._process(who)
        elif of_role := self.facts.of_role(who):
            self._follow(max(of_role, key=self._trouble))

    def _add(self, who: str, what: str, since: float | None = None) -> None:
        self.links.append(Link(who, what, None if since is None else max(0.0, self.facts.now - since)))

    def _process(self, name: str) -> None:
        member = self.facts.member(name)
        if member is None:
            self._add(name, f"{SILENT}: it has no session at the queue", self._silent_since(name))
        elif wait := _first(member.waits):
            self._wait(name, wait)
        else:
            self._add(name, member.activity, member.since)
            self._fellows(name)

    def _wait(self, name: str, wait: Waiting) -> None:
        self._add(name, f"row {wait.row}: {wait.what}" if wait.row else wait.what, wait.since)
        if wait.on:
            self._follow(wait.on)
        else:
            self._fellows(name)

    def _fellows(self, name: str) -> None:
        """A rank computes together with the others: one that is silent stops all."""
        ranks = self.facts.of_role("learner")
        if name in ranks:
            self._follow(next((rank for rank in ranks if rank in self.facts.silent), ""))

    def _silent_since(self, name: str) -> float | None:
        coordinator = self.facts.member(COORDINATOR)
        waits = coordinator.waits if coordinator else ()
        return next((wait.since for wait in waits if wait.on == name and wait.what.startswith(SILENT)), None)

    def _trouble(self, name: str) -> tuple[bool, bool, float]:
        """Of several processes that may be waited for, the largest is the likeliest: silent, not ready, long at one
        thing.
        """
        member = self.facts.member(name)
        if member is None:
            return True, True, 0.0
        wait = _first(member.waits)
        return False, member.role == "engine" and not member.ready, -(wait.since if wait else member.since)

    # -- rows

    def _rows_before(self, stage: str) -> None:
        """Why rows do not reach `stage`."""
        if self.facts.leased.rows:
            self._held(min(self.facts.leased.rows, key=self._held_since))
            return
        ready = {name: self.facts.statistics.stages[name].ready for name in TAKERS if name != stage}
        taker = next((name for name, rows in ready.items() if rows), None)
        if taker is None:
            full = self.facts.leased.full
            self._add(QUEUE, f"has no room for tasks: {full}" if full else "has no tasks; the coordinator feeds them")
        elif taker == "rollout" and self._admission_holds():
            self._admission(ready["rollout"])
        else:
            self._add(QUEUE, f"{ready[taker]} rows are ready for {taker}, and nobody takes them")
            self._follow(TAKERS[taker])

    def _held(self, held: LeasedRow) -> None:
        through = f"{held.members - held.behind} of {held.members} are through {held.stage}"
        missing = f"waits for member {held.member} (row {held.row}), {through}"
        self._add(f"group {held.group}", missing, held.since)
        if wait := self._wait_of(held):
            self._passed.add(held.holder)
            self._wait(held.holder, wait)
        else:
            self._follow(held.holder)

    def _wait_of(self, held: LeasedRow) -> Waiting | None:
        member = self.facts.member(held.holder)
        return next((wait for wait in (member.waits if member else ()) if wait.row == held.row), None)

    def _held_since(self, held: LeasedRow) -> tuple[bool, float]:
        """What its holder is at for long goes first; holders tell only of those."""
        wait = self._wait_of(held)
        return wait is None, wait.since if wait else held.since or self.facts.now

    def _admission_holds(self) -> bool:
        """Producers are there and want rows, and do not get those that are ready."""
        producers = [self.facts.member(name) for name in self.facts.of_role("producer")]
        return all(producer is not None and not producer.waits for producer in producers)

    def _admission(self, rows: int) -> None:
        counts = self.facts.statistics
        self._add(
            QUEUE,
            f"{rows} tasks wait for a newer version: {counts.version} has the weights of step {counts.version_step}, "
            f"step {counts.step} is committed, and more would pass queue.max_staleness",
        )
        leader = self.facts.member(LEADER)
        if publish := next((wait for wait in (leader.waits if leader else ()) if wait.on == "engine"), None):
            self._wait(LEADER, publish)
        else:
            self._follow(LEADER)


def _first(waits: Sequence[Waiting]) -> Waiting | None:
    """What a whole process waits for, before what single rows of it do; of these the longest."""
    return min(waits, key=lambda wait: (wait.row != 0, wait.since), default=None)
