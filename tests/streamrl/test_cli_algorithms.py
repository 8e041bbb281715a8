"""Pieces of algorithms are listed, chosen by configuration, and brought by other packages through entry points."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl import cli, explain
from streamrl.config import RunConfig, find_file, load_file, resolve
from streamrl.settings import parse_yaml, plain
from streamrl_learners.algorithms.pieces import Algorithm

# A package as pip would leave it: a light module with the structs, a heavy one with the functions, and its metadata.
PIECES = '''
from streamrl_learners.algorithms.base import Advantage, Loss

class Cube(Loss, frozen=True, kw_only=True, tag="cube"):
    """The ratio to some power, times the advantage."""
    source = "made up for a test"
    function = "heavy:cube"
    clips = False
    power: float = 3.0
    """To which power."""

class Best(Advantage, frozen=True, kw_only=True, tag="best"):
    """One for the best row of a group."""
    source = "made up for a test"
    function = "heavy:best"
'''
HEAVY = """
import numpy as np
import torch
from streamrl_learners.algorithms.losses import Gains

def cube(config, log_ratio, sampled):
    values = (config.power * log_ratio).exp() * sampled.advantages
    return Gains(values, torch.zeros_like(values, dtype=torch.bool))

def best(config, rewards):
    return (rewards == rewards.max()).astype(float)
"""


def install(site: Path, entry_points: str, **modules: str) -> None:
    info = site / "someones-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[streamrl.algorithms]\n{entry_points}\n")
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, *arguments], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path, "cube = light:Cube\nbest = light:Best", light=PIECES, heavy=HEAVY)
    return tmp_path


def test_every_piece_is_listed_with_what_it_does_and_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["algorithms"]) == 0
    out = capsys.readouterr().out
    for field in ("advantage", "loss", "correction", "rejection", "lag", "length"):
        assert f"algorithm.{field}:" in out
    assert "\n  gspo " in out
    assert "[GSPO, arXiv 2507.18071, eqs. 5 and 7]" in out
    assert "(holds a step until all its rows are in)" in " ".join(out.split())


def test_a_piece_of_another_package_is_listed_explained_and_chosen_like_one_of_ours(site: Path) -> None:
    listed = python(site, "-m", "streamrl.cli", "algorithms")
    assert "  cube                  The ratio to some power, times the advantage. (from light)" in listed.stdout
    explained = python(site, "-m", "streamrl.cli", "config", "--explain", "algorithm.loss.power")
    assert "algorithm.loss.power: float (default 3.0)  [kind: cube]" in explained.stdout
    chosen = python(site, "-m", "streamrl.cli", "config", "algorithm={loss: {kind: cube, power: 2.0}, advantage: best}")
    assert chosen.returncode == 0, chosen.stderr
    assert "kind: cube" in chosen.stdout
    refused = python(site, "-m", "streamrl.cli", "config", "algorithm={loss: cubes}")
    assert "expected one of ppo_clip, reinforce, gspo, cispo, cube; got 'cubes'; did you mean cube?" in refused.stderr


def test_a_piece_of_another_package_computes_the_loss(site: Path) -> None:
    """Imported by its own module first, as in its package's tests, it is the one that the configuration finds."""
    code = (
        "import light, torch\n"
        "from streamrl_learners.algorithms.advantages import group_advantages\n"
        "from streamrl_learners.algorithms.losses import gain\n"
        "from streamrl_learners.algorithms.pieces import Algorithm\n"
        "from streamrl_learners.algorithms.sampled import Sampled\n"
        "import msgspec\n"
        "algorithm = msgspec.convert({'loss': {'kind': 'cube'}, 'advantage': {'kind': 'best'}}, Algorithm)\n"
        "assert type(algorithm.loss) is light.Cube\n"
        "zero = torch.zeros(1)\n"
        "sampled = Sampled(zero, zero, torch.tensor([2.0]), zero.long(), zero.long())\n"
        "print(gain(algorithm.loss, torch.tensor([2.0]).log(), sampled).values.item())\n"
        "print(group_advantages(algorithm.advantage, [1.0, 3.0]).tolist())\n"
    )
    got = python(site, "-c", code)
    assert got.stdout.split("\n")[:2] == ["16.0", "[0.0, 1.0]"], got.stderr


@pytest.mark.parametrize(
    ("entry_point", "said"),
    [
        ("gone = light:Gone", "entry point gone = light:Gone of the group streamrl.algorithms cannot be loaded"),
        ("best = missing:Best", "cannot be loaded: No module named 'missing'; mend or uninstall its package"),
        ("other = light:Cube", "expected its tag to be 'other', got 'cube'"),
        ("path = pathlib:Path", "expected a struct that extends one of Advantage, Loss"),
        ("grpo = light:Grpo", "advantage grpo: expected one piece of that name, got streamrl_learners"),
    ],
)
def test_a_package_whose_piece_cannot_be_used_is_named(tmp_path: Path, entry_point: str, said: str) -> None:
    twin = PIECES + 'class Grpo(Advantage, frozen=True, kw_only=True, tag="grpo"):\n    """Twice."""\n'
    install(tmp_path, entry_point, light=twin, heavy=HEAVY)
    refused = python(tmp_path, "-m", "streamrl.cli", "algorithms")
    assert refused.returncode == 2
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_value_of_a_key_is_told_for_the_kind_that_the_file_chose_only() -> None:
    env = {"env": "streamrl_agents.environments.lookup:Lookup", "model": {"max_positions": 2048}}
    values = plain(resolve({**env, "algorithm": {"loss": {"kind": "gspo", "clip": 0.1}}}))
    told = explain.explanation(RunConfig, "algorithm.loss.clip", values=values, source="my.yaml")
    assert "algorithm.loss.clip: float (default 0.0003, my.yaml: 0.1)  [kind: gspo]" in told
    assert "algorithm.loss.clip: float (default 0.2)  [kind: ppo_clip]" in told


def test_an_algorithm_of_defaults_is_what_the_demo_names() -> None:
    assert load_file(find_file("demo")).algorithm == Algorithm()


DOCS = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
RECIPES = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)


@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
def test_every_recipe_in_the_documentation_is_a_valid_configuration(recipe: str) -> None:
    assert load_file(find_file("demo"), parse_yaml(recipe, "recipe")).algorithm != Algorithm()


def test_the_piece_in_the_documentation_can_be_installed(tmp_path: Path) -> None:
    light, heavy = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    (entry_point,) = re.findall(r"^squared = \"(.*)\"$", DOCS, re.MULTILINE)
    package = tmp_path / "mine"
    package.mkdir()
    (package / "pieces.py").write_text(light)
    (package / "losses.py").write_text(heavy)
    install(tmp_path, f"squared = {entry_point}")
    code = (
        "import msgspec, torch\n"
        "from streamrl_learners.algorithms.losses import gain\n"
        "from streamrl_learners.algorithms.pieces import Algorithm\n"
        "from streamrl_learners.algorithms.sampled import Sampled\n"
        "loss = msgspec.convert({'loss': {'kind': 'squared'}}, Algorithm).loss\n"
        "zero = torch.zeros(1)\n"
        "sampled = Sampled(zero, zero, torch.tensor([2.0]), zero.long(), zero.long())\n"
        "print(gain(loss, torch.tensor([3.0]).log(), sampled).values.item())\n"
    )
    got = python(tmp_path, "-c", code)
    assert float(got.stdout) == pytest.approx(3 * 2 - 0.5 * 4), got.stderr
