"""Does the demo learn? Three seeds, and two controls whose learning rate is 0, through the real `streamrl launch`.

    python bench/demo.py [--config demo] [--out runs/bench] [key=value ...]

The warm start plants the habit that reinforcement learning then removes, so the controls say what the reward does
without learning. Exits with 1 when the final sampled or greedy reward of any seed is less than 0.5 above that of
any control.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

MARGIN = 0.5


class Run(NamedTuple):
    """One finished run."""

    name: str
    control: bool
    summary: dict[str, Any]

    @property
    def greedy(self) -> tuple[float, float]:
        rewards = [evaluation["reward"] for evaluation in self.summary["evaluations"]]
        return rewards[0], rewards[-1]

    @property
    def sampled(self) -> tuple[float, float]:
        return self.summary["reward_before"], self.summary["reward_after"]


def launch(config: str, out: Path, seed: int, control: bool, overrides: Sequence[str]) -> Run:
    """One run in a process of its own; raises CalledProcessError when it fails."""
    name = f"{'control' if control else 'seed'}-{seed}"
    keys = [f"runs={out}", f"seed={seed}", *overrides]
    if control:
        # With nothing to learn there may be steps without any signal; they must not end the control.
        keys += ["learner.learning_rate=0", "learner.no_signal_steps=1000000"]
    command = [sys.executable, "-m", "streamrl.cli", "launch", "--config", config, "--name", name, *keys]
    print(f"{name} …", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise SystemExit(f"{name} ended with exit code {done.returncode}")
    return Run(name, control, json.loads((out / name / "summary.json").read_text()))


HEADER = ("run", "sampled", "greedy", "lag", "s", "CPU-s", "tokens/s", "learner idle", "engine idle")


def line(run: Run) -> tuple[str, ...]:
    """One line of the table."""
    s = run.summary
    (s0, s1), (g0, g1) = run.sampled, run.greedy
    share = tuple("–" if s[key] is None else f"{s[key]:.0%}" for key in ("learner_idle", "engine_idle"))
    lag = f"{s['lag_mean']:.2f} (max {s['lag_max']:.0f})"
    numbers = (f"{s['seconds']:.1f}", f"{s['cpu_seconds']:.1f}", f"{s['tokens_per_second']:.0f}")
    return (run.name, f"{s0:.3f} → {s1:.3f}", f"{g0:.3f} → {g1:.3f}", lag, *numbers, *share)


def medians(name: str, runs: Sequence[Run]) -> tuple[str, ...]:
    """The line of medians over `runs`."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    sampled = [median([r.sampled[i] for r in runs]) for i in (0, 1)]
    greedy = [median([r.greedy[i] for r in runs]) for i in (0, 1)]
    keys = ("lag_mean", "seconds", "cpu_seconds", "tokens_per_second")
    lag, wall, cpu, rate = (median([r.summary[key] for r in runs]) for key in keys)
    return (
        name,
        f"{sampled[0]:.3f} → {sampled[1]:.3f}",
        f"{greedy[0]:.3f} → {greedy[1]:.3f}",
        f"{lag:.2f}",
        f"{wall:.1f}",
        f"{cpu:.1f}",
        f"{rate:.0f}",
        "",
        "",
    )


def print_table(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for cells in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def main() -> int:
    """Run everything; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="demo")
    parser.add_argument("--out", type=Path, default=Path("runs") / f"bench-{os.getpid()}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--controls", type=int, default=2)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    plan = [(seed, False) for seed in range(options.seeds)] + [(seed, True) for seed in range(options.controls)]
    runs = [launch(options.config, options.out, seed, control, options.overrides) for seed, control in plan]
    seeds, controls = [r for r in runs if not r.control], [r for r in runs if r.control]
    print_table([HEADER, *map(line, runs), medians("median of seeds", seeds), medians("median of controls", controls)])
    gains = {
        kind: min(getattr(s, kind)[1] for s in seeds) - max(getattr(c, kind)[1] for c in controls)
        for kind in ("sampled", "greedy")
    }
    for kind, gain in gains.items():
        print(f"final {kind} reward, worst seed minus best control: {gain:.3f} (at least {MARGIN} is asked for)")
    return 0 if min(gains.values()) >= MARGIN else 1


if __name__ == "__main__":
    sys.exit(main())
