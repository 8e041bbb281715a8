"""One seed is one run: in another process, with other hash seeds, whatever ran before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from streamrl.simulation.runner import Options, run_seed

COMMAND = "from streamrl.simulation.runner import Options, run_seed; print(run_seed(Options(hours=0.003), 12).digest)"


@pytest.mark.slow
def test_one_seed_is_one_run_in_every_process() -> None:
    """Two interpreters are started; each imports the package anew."""
    digests = [
        subprocess.run(
            [sys.executable, "-c", COMMAND],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
            timeout=100,
        ).stdout.strip()
        for hash_seed in ("1", "20")
    ]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 32


def test_one_seed_is_one_run_whatever_ran_before_and_another_seed_is_another_run() -> None:
    options = Options(hours=0.002)
    first, other, again = (run_seed(options, seed) for seed in (3, 4, 3))
    assert first.digest == again.digest
    assert (first.events, first.counts, first.faults) == (again.events, again.counts, again.faults)
    assert other.digest != first.digest
