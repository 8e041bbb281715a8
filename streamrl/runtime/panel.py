"""What a person sees while a run lasts: one live panel per role on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel as Box
from rich.table import Table
from rich.text import Text

from .counts import NO_CALL_ERRORS, CallErrors

QUIET: Final = ("tool_errors", "parse_errors", "tool_error_episodes", "parse_error_episodes")
"""Gauges that say something only when they are not 0."""
EARLY: Final = ("starting", "warm start", "waits for weights")
"""Phases in which everybody waits for the learner."""
LINE_SECONDS: Final = 2.0
"""A plain line at most this often: a demo of one minute fits on one screen."""
NOTES: Final = 4
"""Latest notes kept on the terminal; all of them are in logs/coordinator.log."""

RECENT: Final = 5
"""Steps whose mean reward is shown: one step alone jumps about."""
BARS: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class RoleView:
    """One process as its last heartbeat told."""

    name: str
    activity: str = ""
    waited: float = 0.0
    ready: bool = True
    gauges: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment."""

    phase: str
    steps: int
    step: int
    version: int | None
    roles: tuple[RoleView, ...]
    rows: Mapping[str, int]
    depths: Mapping[str, int]
    waits: str = ""
    calls: CallErrors = NO_CALL_ERRORS
    rewards: tuple[float, ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Panel(Protocol):
    """Shows snapshots and notes."""

    def update(self, snapshot: Snapshot) -> None: ...

    def note(self, text: str) -> None: ...


@contextmanager
def open_panel(console: Console, name: str, log: Path) -> Iterator[Panel]:
    """Live panels when `console` is a terminal, lines when it is not; notes go to the file `log` as well."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        if not console.is_terminal:
            yield Noted(LinePanel(console), file)
            return
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield Noted(LivePanel(live, name), file)


class Noted:
    """A panel whose notes are kept in a file."""

    def __init__(self, panel: Panel, file: TextIO) -> None:
        self._panel = panel
        self._file = file

    def update(self, snapshot: Snapshot) -> None:
        self._panel.update(snapshot)

    def note(self, text: str) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=self._file, flush=True)
        self._panel.note(text)


class LinePanel:
    """One line per `LINE_SECONDS` and change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = (-LINE_SECONDS, "")
        self._start = time.monotonic()

    def update(self, snapshot: Snapshot) -> None:
        text = status_line(snapshot)
        at, before = self._last
        now = time.monotonic()
        if text != before and now - at >= LINE_SECONDS:
            self._last = (now, text)
            self.note(text)

    def note(self, text: str) -> None:
        elapsed = time.monotonic() - self._start
        self._console.print(f"{elapsed:6.1f}s  {text}", highlight=False, markup=False, soft_wrap=True)


class LivePanel:
    """Boxes, one per role."""

    def __init__(self, live: Live, name: str) -> None:
        self._live = live
        self._name = name
        self._notes: list[str] = []
        self._start = time.monotonic()
        self._snapshot: Snapshot | None = None

    def update(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._live.update(self._render(snapshot), refresh=True)

    def note(self, text: str) -> None:
        self._notes = [*self._notes, text][-NOTES:]
        if self._snapshot:
            self.update(self._snapshot)
        else:
            self._live.update(Text(text), refresh=True)

    def _render(self, snapshot: Snapshot) -> RenderableType:
        boxes = [_queue_box(snapshot), *(_role_box(role, snapshot) for role in snapshot.roles)]
        numbers = [f"step {snapshot.step}/{snapshot.steps}", *_reward(snapshot)]
        if "lag_mean" in snapshot.metrics:
            # Its maximum is in the learner's box; 40 columns have no room for it.
            numbers.append(f"lag {snapshot.metrics['lag_mean']:.1f}")
        doing = f"{self._name}  {snapshot.phase}  {time.monotonic() - self._start:.0f} s"
        lines = [Text("  ".join(numbers), style="bold"), Text(doing)]
        if snapshot.rewards:
            lines.append(Text(sparkline(snapshot.rewards), style="green"))
        lines += [Text(f"{kind} {said}", style="yellow") for kind, said in snapshot.calls.told().items()]
        # Below the head, because a terminal that is too small cuts off what is last.
        notes = [Text(note, style="dim") for note in self._notes]
        return Group(*lines, *notes, Columns(boxes, equal=True))


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values between 0 and 1 (others are clamped) as small bars, the last `width` of them."""
    return "".join(BARS[min(len(BARS) - 1, int(max(0.0, min(1.0, v)) * len(BARS)))] for v in values[-width:])


def _grid(pairs: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim")
    grid.add_column(justify="right")
    for name, value in pairs:
        grid.add_row(name, value)
    return grid


def _queue_box(snapshot: Snapshot) -> Box:
    pairs = [(state, str(count)) for state, count in snapshot.rows.items()]
    pairs += [(f"ready for {stage}", str(count)) for stage, count in snapshot.depths.items()]
    return Box(_grid(pairs), title="queue", title_align="left")


def _role_box(role: RoleView, snapshot: Snapshot) -> Box:
    pairs = gauges(role.gauges)
    if role.name == "learner-0":
        pairs += [("reward", _gauge("reward", snapshot.rewards[-1]))] if snapshot.rewards else []
        if snapshot.version is not None:
            pairs.append(("version", str(snapshot.version)))
    activity = f"{role.activity} ({role.waited:.0f} s)" if role.waited >= 2 and role.activity else role.activity
    state = Text(activity or ("ready" if role.ready else "not ready"), style="cyan" if role.ready else "yellow")
    return Box(Group(state, _grid(list(dict(pairs).items()))), title=role.name, title_align="left")


def gauges(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Names and numbers as people read them, without those that say nothing."""
    return [(name.replace("_", " "), _gauge(name, n)) for name, n in values.items() if n or name not in QUIET]


def _gauge(name: str, value: float) -> str:
    if name.endswith("_share"):
        return f"{value:.0%}"
    if abs(value) >= 10_000:
        return f"{value / 1000:.1f}k"
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def status_line(snapshot: Snapshot) -> str:
    """One line that says how far the run is, and who waits when nothing moves."""
    if snapshot.phase == "draining":
        return f"draining  ({snapshot.waits})"
    if snapshot.step == 0 or snapshot.phase != "training":
        early = snapshot.phase in EARLY
        roles = [r for r in snapshot.roles if r.activity and (r.name == "learner-0" or not early)]
        waiting = ", ".join(f"{r.name}: {r.activity}" for r in roles) or snapshot.waits
        return f"{snapshot.phase}  ({waiting})" if waiting else snapshot.phase
    metrics, parts = snapshot.metrics, [f"step {snapshot.step}/{snapshot.steps}", *_reward(snapshot), *_lag(snapshot)]
    if snapshot.version is not None:
        parts.append(f"version {snapshot.version}")
    states = [name for name in ("leased", "ready") if name in snapshot.rows]
    states += [name for name in ("dropped", "dead") if snapshot.rows.get(name)]
    parts.append(" ".join(f"{name} {snapshot.rows[name]}" for name in states))
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:.0f} tokens/s")
    calls = snapshot.calls
    errors = {"tool errors": calls.tool_errors, "parse errors": calls.parse_errors}
    parts += [f"{kind} {count}" for kind, count in errors.items() if count]
    return "  ".join(parts)


def _reward(snapshot: Snapshot) -> list[str]:
    recent = snapshot.rewards[-RECENT:]
    return [f"reward {sum(recent) / len(recent):.3f}"] if recent else []


def _lag(snapshot: Snapshot) -> list[str]:
    metrics = snapshot.metrics
    return [f"lag {metrics['lag_mean']:.1f} (max {metrics.get('lag_max', 0):.0f})"] if "lag_mean" in metrics else []
