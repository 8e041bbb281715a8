"""Small faults planted in the core are found, by seeds that the unchanged core passes."""

from __future__ import annotations

import pytest
from simulation_mutants import MUTANTS, Mutant
from test_simulation_seeds import SECONDS

from streamrl.simulation.scenario import Scenario
from streamrl.simulation.world import simulate

SEEDS = range(60)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_planted_fault_is_caught_by_some_seed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first seed is one that caught it before, so that most need one run of half a second."""
    for target, attribute, replacement in mutant.patches:
        monkeypatch.setattr(target, attribute, replacement)
    seeds = [mutant.hint, *(seed for seed in SEEDS if seed != mutant.hint)]
    for seed in seeds:
        result = simulate(Scenario.draw(seed, seconds=SECONDS, faults=mutant.faults))
        if result.failure:
            assert mutant.crashes or not result.is_crash, result.failure
            return
    pytest.fail(f"no seed of {len(seeds)} caught it")


@pytest.mark.slow
@pytest.mark.parametrize(("faults", "seed"), sorted({(mutant.faults, mutant.hint) for mutant in MUTANTS}))
def test_the_unchanged_core_passes_the_seeds_that_catch_them(faults: str, seed: int) -> None:
    """One run for each fault mix and seed that the mutants name."""
    assert simulate(Scenario.draw(seed, seconds=SECONDS, faults=faults)).failure is None


def test_there_are_mutants_of_every_part_of_the_core() -> None:
    assert len(MUTANTS) >= 15
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
