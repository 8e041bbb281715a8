"""The command line: which systems, how long, and the order of measurements."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from . import alone, environments
from .measure import Visit, visit
from .processes import SystemFailed
from .report import show
from .results import Results
from .system import SYSTEMS

SIZES: Final = (1, 8, 64)
QUICK_SIZES: Final = (1, 64)
QUICK: Final = alone.Scale(repeats=50, live_rows=(1_000, 10_000), recovery_bytes=32 << 20, disk_bytes=16 << 20)
FULL: Final = alone.Scale(live_rows=(1_000, 10_000, 100_000, 1_000_000), recovery_bytes=1 << 30)


def parse(arguments: Sequence[str], description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="about a minute, without what takes long to start")
    size.add_argument("--full", action="store_true", help="also 10^6 live rows, and the recovery of 1 GiB")
    parser.add_argument("--only", metavar="NAME,…", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=int, help="visits of each system; 3, with --quick 2")
    parser.add_argument("--seconds", type=float, help="of one measurement; 1.5, with --quick 0.5")
    parser.add_argument("--environments", type=Path, default=environments.DEFAULT, metavar="DIR", help="of the peers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], description: str) -> int:
    """Measure, print, and write the figures; 1 when streamrl failed, 2 when a system is named that is not there."""
    options = parse(arguments, description)
    console = Console(width=None if sys.stdout.isatty() else 200)
    names = options.only.split(",") if options.only else list(SYSTEMS)
    if unknown := sorted(set(names) - set(SYSTEMS)):
        console.print(f"--only: no system {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
        return 2
    directory: Path = options.environments.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    # Beside the environments: a disk, where a temporary directory may be memory.
    with tempfile.TemporaryDirectory(prefix="run-", dir=directory) as scratch:
        run = Run(options, directory, Path(scratch), lambda line: console.print(line, highlight=False, markup=False))
        results = run.measure(names)
    show(results, run.sizes, console)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return int(any(SYSTEMS[name].module == "ours" for name in results.skipped))


class Run:
    """One run of the benchmark: who takes part, who is left out and why, and what was found."""

    def __init__(self, options: argparse.Namespace, directory: Path, scratch: Path, say: Callable[[str], None]) -> None:
        quick = options.quick
        self.sizes = QUICK_SIZES if quick else SIZES
        self._rounds: int = options.rounds or (2 if quick else 3)
        self._seconds: float = options.seconds or (0.5 if quick else 1.5)
        self._scale = QUICK if quick else FULL if options.full else alone.Scale()
        self._as_is = quick and not options.only
        self._directory = directory
        self._scratch = scratch
        self._say = say
        self._skipped: dict[str, str] = {}
        self._visits: dict[str, list[Visit]] = {}

    def measure(self, names: Sequence[str]) -> Results:
        """Rounds over the systems, each time from another one on; then what is streamrl's alone."""
        pythons = self._prepare(names)
        self._say(f"{self._rounds} rounds of {', '.join(pythons)}; load {os.getloadavg()[0]:.1f}")
        order = list(pythons)
        for number in range(self._rounds):
            for name in order:
                if name not in self._skipped:
                    self._visit(name, pythons[name], number + 1)
            order = [*order[1:], *order[:1]]
        own = None
        if any(SYSTEMS[name].module == "ours" for name in self._visits):
            own = alone.measure(Path(sys.executable), self._scratch, self._scale)
        return Results(visits=self._visits, skipped=self._skipped, own=own)

    def _prepare(self, names: Sequence[str]) -> dict[str, Path]:
        """The interpreter of every system that takes part."""
        pythons = {}
        for name in names:
            entry = SYSTEMS[name]
            try:
                if self._as_is and entry.slow:
                    raise SystemFailed("takes long to start; --quick measures it only if named by --only")
                if self._as_is and not environments.is_installed(entry, self._directory):
                    raise SystemFailed("not installed yet; a run without --quick, or --only, installs it")
                pythons[name] = environments.python_of(entry, self._directory, self._say)
            except SystemFailed as error:
                self._skip(name, error)
        return pythons

    def _visit(self, name: str, python: Path, number: int) -> None:
        try:
            found = visit(name, SYSTEMS[name], python, self._scratch, seconds=self._seconds, sizes=self.sizes)
        except SystemFailed as error:
            self._skip(name, error)
            return
        self._visits.setdefault(name, []).append(found)
        pipeline = found.pipeline
        self._say(f"round {number}: {name}: {pipeline.rate:,.0f} rows/s, {pipeline.cost:,.1f} µs/row")

    def _skip(self, name: str, error: SystemFailed) -> None:
        self._skipped[name] = str(error)
        self._say(f"{name} is left out: {error}")
