"""What a run came to: numbers from its metrics and its queue, as a table, a JSON file and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from .counts import NO_CALL_ERRORS, CallErrors
from .rundir import RunDirectory, write_atomically

WINDOW: Final = 5
"""Steps whose mean is "before" and "after": one step of 64 rows has a standard error of about 0.05."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation: mean reward over the rows that got one; None when all of them failed."""

    step: int
    reward: float | None
    rows: int
    failed: int = 0

    def __str__(self) -> str:
        if self.reward is None:
            return f"no reward: all {self.failed} tasks failed"
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.reward:.3f} ({self.rows} tasks{failed})"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How a run went. A number that could not be had is None, never 0.

    Steps, rewards and rows are those of the whole run; times, idle shares, restarts and failed calls those of this
    launch, which `resumed` says is not the first.
    """

    name: str
    outcome: str
    steps: int
    seconds: float
    cpu_seconds: float
    reward_before: float | None
    reward_after: float | None
    evaluations: tuple[Evaluation, ...]
    rows_trained: int
    lag_mean: float | None
    lag_max: float | None
    tokens_trained: int
    tokens_per_second: float | None
    learner_idle: float | None
    engine_idle: float | None
    restarts: dict[str, int]
    conservation: dict[str, Any]
    resumed: bool = False
    calls: CallErrors = NO_CALL_ERRORS
    outputs: dict[str, str]


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[Evaluation]]:
    """The steps and evaluations in a `metrics.jsonl`. A step that was trained again after a resume counts once."""
    steps: dict[int, dict[str, Any]] = {}
    evaluations: list[Evaluation] = []
    if not path.exists():
        return [], []
    for line in path.read_bytes().splitlines():
        try:
            entry = msgspec.json.decode(line)
        except msgspec.DecodeError:
            # A line that a killed writer did not finish.
            continue
        if entry.get("event") == "eval":
            evaluations.append(msgspec.convert(entry, Evaluation))
        elif entry.get("event", "step") == "step" and "step" in entry:
            steps[int(entry["step"])] = entry
    return [steps[step] for step in sorted(steps)], evaluations


def mean(values: Iterable[Any]) -> float | None:
    """The mean of the finite numbers among `values`, or None."""
    numbers = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return sum(numbers) / len(numbers) if numbers else None


def summarise(
    run: RunDirectory,
    *,
    outcome: str,
    seconds: float,
    cpu_seconds: float,
    engine_idle: float | None,
    restarts: Mapping[str, int],
    conservation: Mapping[str, Any],
    resumed: bool = False,
    calls: CallErrors = NO_CALL_ERRORS,
) -> Summary:
    """Put the summary together; `conservation` are the queue's counts by state."""
    steps, evaluations = read_metrics(run.metrics)
    rewards = [s.get("reward_mean") for s in steps]
    lags = [s["lag_max"] for s in steps if isinstance(s.get("lag_max"), int | float)]
    tokens = sum(int(s.get("tokens", 0)) for s in steps)
    training = sum(float(s.get("seconds", 0.0)) for s in steps)
    outputs = {
        "configuration": run.config,
        "metrics": run.metrics,
        "checkpoints": run.checkpoints,
        "model": run.model,
        "journal": run.journal,
        "plot": run.plot,
        "logs": run.logs,
    }
    return Summary(
        name=run.path.name,
        outcome=outcome,
        steps=len(steps),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        reward_before=mean(rewards[:WINDOW]),
        reward_after=mean(rewards[-WINDOW:]),
        evaluations=tuple(evaluations),
        rows_trained=int(conservation.get("trained", 0)),
        lag_mean=mean(s.get("lag_mean") for s in steps),
        lag_max=max(lags, default=None),
        tokens_trained=tokens,
        tokens_per_second=tokens / training if training > 0 else None,
        learner_idle=mean(s.get("idle_share") for s in steps),
        engine_idle=engine_idle,
        restarts=dict(restarts),
        conservation=dict(conservation),
        resumed=resumed,
        calls=calls,
        outputs={name: str(path) for name, path in outputs.items() if path.exists()},
    )


def save(run: RunDirectory, summary: Summary) -> None:
    """Write `summary.json`."""
    write_atomically(run.summary, msgspec.json.format(msgspec.json.encode(summary)) + b"\n")


def _number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _shown(path: str) -> str:
    """Relative to the working directory where that is shorter."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def table(summary: Summary) -> Table:
    """The summary as a table of two columns."""
    out = Table(title=f"{summary.name}: {summary.outcome}", show_header=False, title_justify="left")
    first, last = (summary.evaluations[0], summary.evaluations[-1]) if summary.evaluations else (None, None)
    add = out.add_row
    reward = f"{_number(summary.reward_before)} → {_number(summary.reward_after)}"
    add("sampled reward", f"{reward}  (means of the first and the last {min(WINDOW, max(1, summary.steps))} steps)")
    if first and last:
        after = "–" if last is first else _number(last.reward)
        failed = f", {last.failed} failed" if last.failed else ""
        add("greedy evaluation", f"{_number(first.reward)} → {after}  ({last.rows} tasks{failed})")
    add("steps", f"{summary.steps}, {summary.rows_trained} rows trained")
    add("lag in steps", f"mean {_number(summary.lag_mean, '.2f')}, max {_number(summary.lag_max, '.0f')}")
    add("tokens trained", f"{summary.tokens_trained} ({_number(summary.tokens_per_second, '.0f')} per second)")
    add("idle", f"learner {_share(summary.learner_idle)}, engine {_share(summary.engine_idle)}")
    for kind, said in summary.calls.told().items():
        add(kind, said)
    part = "time of this part" if summary.resumed else "time"
    add(part, f"{summary.seconds:.1f} s, {summary.cpu_seconds:.1f} CPU-seconds")
    if summary.restarts:
        add("restarted", ", ".join(f"{name} {count}×" for name, count in summary.restarts.items()))
    return out


def conservation_table(conservation: Mapping[str, Any]) -> Table:
    """Every row that was ever put, by where it is: the states add up to the rows."""
    out = Table(title="rows", title_justify="left")
    out.add_column("state")
    out.add_column("rows", justify="right")
    for state, count in conservation.items():
        if isinstance(count, Mapping):
            for reason, part in count.items():
                out.add_row(f"{state}: {reason}", str(part))
        else:
            out.add_row(state, str(count), style="bold" if state == "tasks" else None)
    return out


def show(summary: Summary, console: Console) -> None:
    """Print the tables and where the outputs lie."""
    console.print(table(summary))
    console.print(conservation_table(summary.conservation))
    for name, path in summary.outputs.items():
        console.print(f"{name:>14}  {_shown(path)}", highlight=False, soft_wrap=True)


def plot(run: RunDirectory) -> None:
    """Draw `reward.png`: sampled reward by step, its running mean, and the greedy evaluations.

    Without matplotlib, which only the extra `train` brings, or without anything to draw, there is no plot.
    """
    steps, evaluations = read_metrics(run.metrics)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    if not steps and not evaluations:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    xs = [int(s["step"]) for s in steps]
    rewards = [float(s.get("reward_mean", math.nan)) for s in steps]
    axes.plot(xs, rewards, ".", color="tab:blue", alpha=0.35, label="sampled, each step")
    axes.plot(xs, _running_mean(rewards), color="tab:blue", label=f"sampled, mean of {WINDOW} steps")
    if played := [(e.step, e.reward) for e in evaluations if e.reward is not None]:
        axes.plot(
            [step for step, _ in played], [reward for _, reward in played], "D", color="tab:orange", label="greedy"
        )
    axes.set(xlabel="step", ylabel="mean reward", title=run.path.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(run.plot, dpi=120)


def _running_mean(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, i - WINDOW + 1) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
