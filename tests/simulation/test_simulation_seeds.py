"""A hundred seeds of the unchanged queue under every fault: no invariant breaks. `make simulate` runs thousands."""

from __future__ import annotations

import pytest

from streamrl.simulation.scenario import Scenario
from streamrl.simulation.world import simulate

SECONDS = 15.0
CHUNK = 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, CHUNK))
def test_no_invariant_breaks_under_any_fault(first: int) -> None:
    """Half a second for each seed, which is some forty virtual seconds of a whole run."""
    trained = 0
    for seed in range(first, first + CHUNK):
        result = simulate(Scenario.draw(seed, seconds=SECONDS))
        assert result.failure is None, f"seed {seed}: {result.failure}\n" + "\n".join(result.trace)
        trained += result.counts.get("trained", 0)
    assert trained > 20 * CHUNK
