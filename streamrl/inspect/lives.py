"""The life of every row, as the fold of the journal's events. Pure: no file, no clock, no printing.

`streamrl_queue.table` folds the same events into what the broker must know to go on, and forgets a row when it ends.
Here nothing is forgotten: each row keeps the list of what happened to it. The two are independent, so that `verify`
can ask whether they agree.

The journal says what was done, and leaves out what follows from it: that a row is dead after its last delivery, done
after its last stage, dropped with a group that became too small. That is derived here from the flow, by the
sentences of `Stage`. Without a flow such rows stay open.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from streamrl_queue.config import Flow, Stage
from streamrl_queue.events import (
    Committed,
    Configured,
    Dropped,
    Ended,
    Event,
    Granted,
    Moved,
    Put,
    Reconciled,
    Retired,
    VersionBegun,
    VersionCommitted,
    Written,
)
from streamrl_queue.state import TASK

Columns = Mapping[str, Sequence[Any]]
"""Values by column, one per line of a payload."""

ENDS: Final = ("trained", "done", "dropped", "dead")


class Moment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to one row. `at` is in seconds since the epoch; None: the event has no such thing."""

    at: float
    event: str
    stage: str | None = None
    lease: int | None = None
    session: str | None = None
    attempt: int | None = None
    version: int | None = None
    step: int | None = None
    cause: str | None = None
    reason: str | None = None
    tokens: int | None = None
    oldest_version: int | None = None
    # Number of the journal's record: segment · 2^32 + byte.
    record: int | None = None


class Life(msgspec.Struct, kw_only=True):
    """One row from its birth on."""

    row: int
    group: int
    member: int
    split: str
    env: str
    key: str
    priority: int
    moments: list[Moment]
    # How it ended: trained, done, dropped or dead; None while it is open.
    end: str | None = None
    reason: str | None = None
    step: int | None = None
    lag: int | None = None
    tokens: int | None = None
    # None: nothing was written, or nothing was sampled.
    oldest_version: int | None = None
    retired: bool = False
    # Stages whose columns are there; stage → lease; stage → deliveries that were not given back.
    done: set[str]
    leases: dict[str, int]
    attempts: dict[str, int]
    # Stage → line of the payload that its columns are in.
    lines: dict[str, int]
    # Column → value, of the payloads that were there to be read.
    columns: dict[str, Any]

    @property
    def born(self) -> float:
        return self.moments[0].at

    def last(self, event: str, stage: str | None = None) -> Moment | None:
        """The last moment of that kind."""
        return next((m for m in reversed(self.moments) if m.event == event and stage in (None, m.stage)), None)

    def first(self, event: str, stage: str | None = None) -> Moment | None:
        """The first moment of that kind."""
        return next((m for m in self.moments if m.event == event and stage in (None, m.stage)), None)


class VersionLife(msgspec.Struct, kw_only=True):
    """One policy version: the weights after `step` steps."""

    version: int
    step: int
    parent: int | None
    begun: float
    committed: float | None = None
    digest: str | None = None


class StepLife(msgspec.Struct, kw_only=True):
    """One training step. A step that a resumed run trained again is there twice, the first with `given_back`."""

    step: int
    at: float
    rows: tuple[int, ...]
    version: int
    retired: float | None = None
    given_back: float | None = None


class Lives:
    """All rows, versions and steps, changed by `apply` alone.

    Args:
        flow: decides what follows from the events, until one of them names another; None when it is not known.
        only: keep the group of this row and no other.
    """

    def __init__(self, flow: Flow | None, *, only: int | None = None) -> None:
        self.flow: Flow | None = None
        self.rows: dict[int, Life] = {}
        self.versions: dict[int, VersionLife] = {}
        self.steps: list[StepLife] = []
        self.version = 0
        self.tasks = 0
        self.events: Counter[str] = Counter()
        self._only = only
        self._configure(flow)
        # Group → its rows that are open; and the groups that were admitted.
        self._groups: defaultdict[int, list[Life]] = defaultdict(list)
        self._admitted: set[int] = set()
        # Lease → stage and session.
        self._leases: dict[int, tuple[str, str]] = {}

    def _configure(self, flow: Flow | None) -> None:
        self.flow = flow
        self.first_stage = flow.stages[0].name if flow and flow.stages else "rollout"
        self._stages: dict[str, Stage] = {stage.name: stage for stage in flow.stages} if flow else {}
        self._needs = flow.needs() if flow else {}

    def apply(self, event: Event, *, record: int | None = None, columns: Columns | None = None) -> None:
        """Fold one event.

        Args:
            event: what happened.
            record: its number in the journal.
            columns: values of the event's payload, when it is there.
        """
        self.events[type(event).__name__] += 1
        columns = columns or {}
        match event:
            case Put():
                self._put(event, record, columns)
            case Granted():
                self._granted(event, record)
            case Written():
                self._written(event, record, columns)
            case Moved():
                # Records are moved whole: a row's line is the one that it had, wherever it stands in the event.
                for _, life in self._of(event.rows):
                    _fill(life, columns, life.lines[event.stage])
            case Ended():
                self._ended(event, record)
            case Dropped():
                for _, life in self._of(event.rows):
                    if life.end in (None, "trained") and not life.retired:
                        self._end(life, event.at, "dropped", event.reason, record)
                self._settle(event.at, event.rows, record)
            case VersionBegun():
                self.versions[event.version] = VersionLife(
                    version=event.version, step=event.step, parent=event.parent, begun=event.at
                )
            case VersionCommitted():
                self.version = event.version
                if (version := self.versions.get(event.version)) is not None:
                    version.committed, version.digest = event.at, event.digest
            case Committed():
                self._committed(event, record)
            case Retired():
                self._retired(event, record)
            case Reconciled():
                self._reconciled(event, record)
            case Configured():
                self._configure(event.flow)

    def _of(self, rows: Iterable[int]) -> list[tuple[int, Life]]:
        return [(line, life) for line, row in enumerate(rows) if (life := self.rows.get(row)) is not None]

    def _put(self, event: Put, record: int | None, columns: Columns) -> None:
        self.tasks += len(event.rows)
        for i, (key, env) in enumerate(zip(event.keys, event.envs, strict=True)):
            first = event.first_row + i * event.members
            if self._only is not None and not first <= self._only < first + event.members:
                continue
            for member in range(event.members):
                number = i * event.members + member
                line = event.line(number)
                life = Life(
                    row=first + member,
                    group=event.first_group + i,
                    member=member,
                    split=event.split,
                    env=env,
                    key=key,
                    priority=event.priority,
                    moments=[Moment(at=event.at, event="born", record=record)],
                    done=set(event.filled),
                    leases={},
                    attempts={},
                    lines=dict.fromkeys((TASK, *event.filled), line),
                    columns={},
                )
                self._bring(life, event, number)
                _fill(life, columns, line)
                self.rows[life.row] = life
                self._groups[life.group].append(life)
                self._finish(life, event.at, record)
        self._settle(event.at, event.rows, record)

    @staticmethod
    def _bring(life: Life, event: Put, number: int) -> None:
        """What the columns say of stages that it was born with."""
        if event.tokens:
            life.tokens = event.tokens[number]
            life.oldest_version = event.oldest[number] if event.oldest[number] >= 0 else None

    def _finish(self, life: Life, at: float, record: int | None) -> None:
        stages = self._stages_of(life)
        if stages and all(stage.name in life.done for stage in stages):
            self._end(life, at, "done", None, record)

    def _granted(self, event: Granted, record: int | None) -> None:
        self._admitted.update(event.admitted)
        held = self._of(event.rows)
        if held:
            self._leases[event.lease] = event.stage, event.session
        for _, life in held:
            self._reopen(life)
            life.leases[event.stage] = event.lease
            life.attempts[event.stage] = life.attempts.get(event.stage, 0) + 1
            life.moments.append(
                Moment(
                    at=event.at,
                    event="granted",
                    stage=event.stage,
                    lease=event.lease,
                    session=event.session,
                    attempt=life.attempts[event.stage],
                    version=event.version,
                    step=event.step,
                    record=record,
                )
            )

    def _written(self, event: Written, record: int | None, columns: Columns) -> None:
        written = self._of(event.rows)
        for line, life in written:
            self._reopen(life)
            life.leases.pop(event.stage, None)
            life.done.add(event.stage)
            life.lines[event.stage] = line
            tokens = event.tokens[line] if event.tokens else None
            oldest = event.oldest[line] if event.oldest and event.oldest[line] >= 0 else None
            if event.tokens:
                life.tokens, life.oldest_version = tokens, oldest
            _fill(life, columns, line)
            life.moments.append(
                Moment(
                    at=event.at,
                    event="written",
                    stage=event.stage,
                    lease=event.lease,
                    session=self._leases.get(event.lease, (None, None))[1],
                    attempt=life.attempts.get(event.stage),
                    tokens=tokens,
                    oldest_version=oldest,
                    record=record,
                )
            )
        for _, life in written:
            self._finish(life, event.at, record)
        self._settle(event.at, event.rows, record)

    def _ended(self, event: Ended, record: int | None) -> None:
        name, session = self._leases.get(event.lease, ("", ""))
        stage = self._stages.get(name)
        for _, life in self._of(event.rows):
            life.leases.pop(name, None)
            attempt = life.attempts.get(name)
            if event.cause == "released" and attempt:
                life.attempts[name] = attempt - 1
            life.moments.append(
                Moment(
                    at=event.at,
                    event="lease ended",
                    stage=name or None,
                    lease=event.lease,
                    session=session or None,
                    attempt=attempt,
                    cause=event.cause,
                    reason=event.reason,
                    record=record,
                )
            )
            if stage is not None and life.attempts.get(name, 0) >= stage.max_deliveries:
                self._end(life, event.at, "dead", f"{name}: {event.reason}", record)
        self._settle(event.at, event.rows, record)

    def _committed(self, event: Committed, record: int | None) -> None:
        self.steps.append(StepLife(step=event.step, at=event.at, rows=event.rows, version=self.version))
        for _, life in self._of(event.rows):
            life.leases.clear()
            life.end, life.step, life.lag = "trained", event.step, self._lag(life, event.step)
            life.moments.append(Moment(at=event.at, event="trained", step=event.step, record=record))

    def _lag(self, life: Life, step: int) -> int | None:
        """Steps taken when the row is trained in `step`, minus those behind the version of its oldest token."""
        version = self.versions.get(life.oldest_version or 0)
        return None if version is None else step - 1 - version.step

    def _retired(self, event: Retired, record: int | None) -> None:
        for step in self.steps:
            if step.step <= event.through and step.retired is None and step.given_back is None:
                step.retired = event.at
                for _, life in self._of(step.rows):
                    life.retired = True
                    self._leave(life)
                    life.moments.append(Moment(at=event.at, event="retired", step=step.step, record=record))

    def _reconciled(self, event: Reconciled, record: int | None) -> None:
        back: list[int] = []
        for step in self.steps:
            if step.step > event.step and step.given_back is None and step.retired is None:
                step.given_back = event.at
                back.extend(step.rows)
                for _, life in self._of(step.rows):
                    life.end = life.step = life.lag = None
                    life.moments.append(Moment(at=event.at, event="given back", step=step.step, record=record))
        trains = {stage.name for stage in self._stages.values() if stage.trains}
        for life in self.rows.values():
            for stage in trains & life.leases.keys():
                lease = life.leases.pop(stage)
                back.append(life.row)
                life.moments.append(
                    Moment(
                        at=event.at,
                        event="lease ended",
                        stage=stage,
                        lease=lease,
                        cause="reconciled",
                        reason=f"the learner goes on from step {event.step}",
                        record=record,
                    )
                )
        self._settle(event.at, back, record)

    # -- what follows

    def _stages_of(self, life: Life) -> list[Stage]:
        return [stage for stage in self._stages.values() if life.split in stage.splits]

    def _end(self, life: Life, at: float, end: str, reason: str | None, record: int | None) -> None:
        life.end, life.reason = end, reason
        life.leases.clear()
        life.moments.append(Moment(at=at, event=end, reason=reason, record=record))
        self._leave(life)

    def _leave(self, life: Life) -> None:
        members = self._groups[life.group]
        self._groups[life.group] = [member for member in members if member is not life]

    def _reopen(self, life: Life) -> None:
        """The broker went on with a row that we took for ended: its flow was another one then."""
        if life.end is not None:
            life.end = life.reason = None
            self._leave(life)
            self._groups[life.group].append(life)

    def _settle(self, at: float, rows: Iterable[int], record: int | None) -> None:
        """Drop what is left of groups that wait to be compared with too few members."""
        for group in {life.group: life for _, life in self._of(rows)}:
            members = self._groups[group]
            for stage in self._stages_of(members[0]) if members else ():
                members = self._groups[group]
                small = stage.unit == "group" and 0 < len(members) < stage.min_members
                if small and all(self._wants(stage, member) for member in members):
                    for member in tuple(members):
                        self._end(member, at, "dropped", "group_too_small", record)

    def _wants(self, stage: Stage, life: Life) -> bool:
        return (
            life.end is None
            and stage.name not in life.done
            and stage.name not in life.leases
            and self._needs[stage.name] <= life.done
        )

    def state(self, life: Life) -> str:
        """Where the row is: waiting, ready, parked, leased, trained, done, dropped or dead; `open` when the flow is not
        known.
        """
        if life.end is not None:
            return life.end
        if life.leases:
            return "leased"
        if self.flow is None:
            return "open"
        asked = [stage for stage in self._stages_of(life) if self._asks(stage, life)]
        if asked and all(stage.parks for stage in asked):
            return "parked"
        admitting = [stage for stage in self._stages_of(life) if stage.admits and stage.name not in life.done]
        held_back = self.flow.admission is not None and life.split == "train" and bool(admitting)
        return "ready" if asked and not (held_back and life.group not in self._admitted) else "waiting"

    def _asks(self, stage: Stage, life: Life) -> bool:
        asking = [life] if stage.unit == "row" else self._groups[life.group]
        return all(self._wants(stage, member) for member in asking)

    def by_split(self) -> dict[str, dict[str, int]]:
        """How many rows are in which state, as `Statistics.by_split` says it."""
        out: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for life in self.rows.values():
            out[life.split][self.state(life)] += 1
        return {split: dict(states) for split, states in out.items()}


def _fill(life: Life, columns: Columns, line: int) -> None:
    for name, values in columns.items():
        if name != "row" and values[line] is not None:
            life.columns[name] = values[line]
