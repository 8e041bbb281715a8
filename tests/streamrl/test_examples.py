"""The examples, started as a user starts them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import streamrl

EXAMPLES = Path(streamrl.__file__).parents[1] / "examples"


@pytest.mark.slow
def test_a_plain_loop_that_trains_from_the_queue_learns() -> None:
    """Slow: two processes with torch and a hundred optimizer steps, about 10 s; 0.08 → 0.9 was seen."""
    command = [sys.executable, str(EXAMPLES / "train_from_queue.py"), "--steps", "100"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert said.returncode == 0, said.stderr
    result = re.search(r"^reward (\S+) → (\S+)$", said.stdout, re.M)
    assert result is not None, said.stdout
    before, after = map(float, result.groups())
    assert before < 0.3
    assert after > before + 0.3
