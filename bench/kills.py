"""Does a run survive any kill? Kills one process at a random moment, again and again, resumes, and checks the journal.

    python bench/kills.py [--runs 50] [--seed 0] [--steps 12] [--out runs/kills]

Each run gets up to four kill -9s, of the coordinator, the learner or one of its ranks, the broker, an engine, a
producer or a scorer, at random moments from its start on. A run that ends by it is resumed. At the end the journal must
say that every step was trained with exactly its rows, that no row was trained twice in the surviving history, and that
no task was skipped or lost. Exits with 1 at the first run that breaks the law, and leaves that run's directory.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

# This folder holds a queue.py, which must not be found in place of the standard library's.
sys.path[0] = str(Path(__file__).parent.parent / "tests" / "streamrl")

from conservation import check_finished

ROLES = ("coordinator", "learner-0", "queue", "engine-0", "producer-0", "scorer-0")
# Every so many runs the learner has two ranks, which may die one by one.
TWO_RANKS_EVERY = 4
KILLS = 4
ROWS_PER_STEP = 32
RUN_SECONDS = 300.0
# A run without kills takes about ten seconds: most runs get all of their kills, at any moment from the start on.
LONGEST_WAIT_SECONDS = 5.0


def pid_of(run: Path, role: str, coordinator: subprocess.Popen[bytes]) -> int | None:
    """The process of a role of this run, if there is one right now."""
    if role == "coordinator":
        return coordinator.pid
    wanted = ["streamrl.runtime.role", role, "--run", str(run)]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if command[2:6] == wanted:
                return int(entry.name)
    return None


def survive(out: Path, number: int, steps: int, seed: int) -> Counter[str]:
    """One run to its end, through kills; returns what was killed. Raises AssertionError when the law is broken."""
    rng = random.Random(f"{seed}/{number}")
    name = f"kill-{number}"
    shutil.rmtree(out / name, ignore_errors=True)
    keys = [f"runs={out}", f"learner.steps={steps}", f"learner.rows_per_step={ROWS_PER_STEP}", "tasks.eval_rows=8"]
    keys += ["learner.checkpoint_every=3", "learner.warmup_steps=2", "model.warm_start.clean_steps=2"]
    keys += ["model.warm_start.sloppy_steps=0", "learner.no_signal_steps=1000000", f"seed={number}"]
    roles = ROLES
    if number % TWO_RANKS_EVERY == TWO_RANKS_EVERY - 1:
        keys += ["learner.ranks=2"]
        roles = (*ROLES, "learner-1")
    killed: Counter[str] = Counter()
    started = time.monotonic()
    finished = False
    while not finished:
        assert time.monotonic() - started < RUN_SECONDS, f"{name} did not end within {RUN_SECONDS:.0f} s"
        resume = ["--resume"] if (out / name / "config.yaml").exists() else []
        command = [sys.executable, "-m", "streamrl.cli", "launch", "--name", name, *resume, *keys]
        with (out / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None and killed.total() < KILLS:
            try:
                process.wait(rng.uniform(0.0, LONGEST_WAIT_SECONDS))
            except subprocess.TimeoutExpired:
                role = rng.choice(roles)
                pid = pid_of(out / name, role, process)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    killed[role] += 1
        finished = process.wait(RUN_SECONDS) == 0
    check_finished(out / name / "journal", steps=steps, rows_per_step=ROWS_PER_STEP)
    shutil.rmtree(out / name)
    return killed


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    total: Counter[str] = Counter()
    for number in range(options.runs):
        total += survive(options.out.resolve(), number, options.steps, options.seed)
        print(f"run {number + 1} of {options.runs}: the law holds; killed so far: {dict(total)}", flush=True)
    print(f"{options.runs} runs, {total.total()} kills: no row lost, none trained twice, no task skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
