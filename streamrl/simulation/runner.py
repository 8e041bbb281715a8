"""Runs of one seed or of many, in one process or in several, and what they say."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final

import msgspec

from streamrl_queue.errors import ConfigError

from .scenario import Scenario
from .world import Result, simulate

SECONDS_PER_HOUR: Final = 3600.0
# Failures that are told with their trace; of the others a line is enough.
MOST_TOLD: Final = 3


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line decides; the seed decides the rest."""

    engines: int = 2
    producers: int = 2
    hours: float = 0.05
    faults: str = "random"
    script: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("engines", "producers", "hours"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name}: expected more than 0, got {getattr(self, name)}")

    def scenario(self, seed: int) -> Scenario:
        """The scenario of a seed. Raises ConfigError for an unknown fault."""
        return Scenario.draw(
            seed,
            engines=self.engines,
            producers=self.producers,
            seconds=self.hours * SECONDS_PER_HOUR,
            faults=self.faults,
            script=self.script,
        )

    def command(self, seed: int) -> str:
        """What repeats the run of a seed."""
        script = "".join(f" --at {fault}" for fault in self.script)
        return (
            f"streamrl simulate --seed {seed} --engines {self.engines} --producers {self.producers} "
            f"--hours {self.hours:g} --faults {self.faults}{script}"
        )


def run_seed(options: Options, seed: int) -> Result:
    """One run."""
    return simulate(options.scenario(seed))


def run_seeds(options: Options, seeds: Sequence[int], jobs: int) -> Iterator[Result]:
    """The runs of all seeds, in `jobs` processes, in the order of the seeds."""
    if jobs == 1:
        yield from (run_seed(options, seed) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run_seed, [options] * len(seeds), seeds)


def report(options: Options, result: Result) -> str:
    """One run for people; after a failure with the trace and the command that repeats it."""
    line = (
        f"seed {result.seed}: {'FAILED' if result.failure else 'ok'}  digest {result.digest}  "
        f"{result.virtual_seconds / SECONDS_PER_HOUR:.3f} virtual hours in {result.seconds:.1f} s, "
        f"{result.events} events, {result.steps} steps, {result.versions} versions"
    )
    if not result.failure:
        return line
    trace = "\n".join(f"    {entry}" for entry in result.trace)
    return f"{line}\n  {result.failure}\n{trace}\n  again: {options.command(result.seed)}"


def details(result: Result) -> str:
    """How rows ended, which faults there were, what was refused."""
    parts = {
        "rows": result.counts,
        "faults": result.faults,
        "refused": {**result.refused, "late writes": result.late_writes},
    }
    return "\n".join(f"  {name}: {', '.join(f'{k} {n}' for k, n in counts.items())}" for name, counts in parts.items())


def run(options: Options, seeds: Sequence[int], jobs: int, say: Callable[[str], None]) -> bool:
    """Run all seeds and say how they went; whether all of them passed."""
    options.scenario(seeds[0])
    failed, virtual, seconds, events = 0, 0.0, 0.0, 0
    for result in run_seeds(options, seeds, jobs):
        failed += result.failure is not None
        virtual, seconds, events = virtual + result.virtual_seconds, seconds + result.seconds, events + result.events
        if len(seeds) == 1 or (result.failure and failed <= MOST_TOLD):
            say(report(options, result))
        elif result.failure:
            say(f"seed {result.seed}: FAILED  {result.failure}")
        if len(seeds) == 1:
            say(details(result))
    if len(seeds) > 1:
        hours = virtual / SECONDS_PER_HOUR
        say(
            f"{len(seeds) - failed} of {len(seeds)} seeds passed: {hours:.1f} virtual hours, {events} events; "
            f"{hours / seconds:.3f} hours and {events / seconds:.0f} events per second and process"
        )
    return failed == 0


def parse_seeds(text: str) -> range:
    """`7` is one seed, `0:1000` a thousand. Raises ConfigError otherwise."""
    first, colon, last = text.partition(":")
    try:
        seeds = range(int(first), int(last)) if colon else range(int(first), int(first) + 1)
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise ConfigError(f"--seed {text}: expected a number, or FIRST:END with FIRST below END")
    return seeds
