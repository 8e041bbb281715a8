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

LINE_SECONDS: Final = 2.0
"""A plain line at most this often: a demo of one minute fits on one screen."""
NOTES: Final = 4
"""Latest notes kept on the terminal; all of them are in logs/coordinator.log."""

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
        head = Text.assemble(
            (self._name, "bold"),
            f"  {snapshot.phase}  step {snapshot.step}/{snapshot.steps}  ",
            (sparkline(snapshot.rewards), "green"),
            f"  {time.monotonic() - self._start:.0f} s",
        )
        notes = [Text(note, style="dim") for note in self._notes]
        return Group(head, Columns(boxes, equal=True), *notes)


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
    pairs = [(name.replace("_", " "), _gauge(name, value)) for name, value in role.gauges.items()]
    if role.name == "learner-0":
        pairs += [("reward", _gauge("reward", snapshot.rewards[-1]))] if snapshot.rewards else []
        if snapshot.version is not None:
            pairs.append(("version", str(snapshot.version)))
    activity = f"{role.activity} ({role.waited:.0f} s)" if role.waited >= 2 and role.activity else role.activity
    state = Text(activity or ("ready" if role.ready else "not ready"), style="cyan" if role.ready else "yellow")
    return Box(Group(state, _grid(list(dict(pairs).items()))), title=role.name, title_align="left")


def _gauge(name: str, value: float) -> str:
    if name.endswith("_share"):
        return f"{value:.0%}"
    if abs(value) >= 10_000:
        return f"{value / 1000:.1f}k"
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def status_line(snapshot: Snapshot) -> str:
    """One line that says how far the run is, and who waits when nothing moves."""
    if snapshot.step == 0:
        # Until the warm start is over everybody waits for the learner.
        early = snapshot.phase in ("starting", "warm start")
        roles = [r for r in snapshot.roles if r.activity and (r.name == "learner-0" or not early)]
        waiting = ", ".join(f"{r.name}: {r.activity}" for r in roles)
        return f"{snapshot.phase}  ({waiting})" if waiting else snapshot.phase
    metrics, parts = snapshot.metrics, [f"step {snapshot.step}/{snapshot.steps}"]
    if snapshot.rewards:
        recent = snapshot.rewards[-5:]
        parts.append(f"reward {sum(recent) / len(recent):.3f}")
    if "lag_mean" in metrics:
        parts.append(f"lag {metrics['lag_mean']:.1f} (max {metrics.get('lag_max', 0):.0f})")
    if snapshot.version is not None:
        parts.append(f"version {snapshot.version}")
    parts.append(" ".join(f"{name} {snapshot.rows[name]}" for name in ("leased", "ready") if name in snapshot.rows))
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:.0f} tokens/s")
    return "  ".join(parts)
