"""What an installed streamrl consists of."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import streamrl

TOP = Path(streamrl.__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=TOP, check=True, capture_output=True)
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_has_every_part_its_types_and_the_configurations(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package in ("streamrl", "streamrl_queue", "streamrl_agents", "streamrl_producers", "streamrl_learners"):
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= names
    assert {f"streamrl/configs/{path.name}" for path in (TOP / "configs").glob("*.yaml")} <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops & {"queue", "agents", "producers", "learners", "tests"} == set()


def test_the_wheel_says_what_it_may_be_used_for_and_how_it_is_called(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")
    assert b"streamrl = streamrl.cli:main" in wheel.read(f"{info}/entry_points.txt")


def test_the_constraints_pin_every_dependency_and_name_no_host() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (TOP / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train"], *extras["dev"]]
    names = {requirement.partition(">=")[0].lower().replace("_", "-") for requirement in wanted}
    assert names - pinned == set()
    assert "://" not in (TOP / "constraints.txt").read_text()


@pytest.mark.parametrize("script", sorted(path.name for path in (TOP / "bench").glob("*.py")))
def test_every_benchmark_starts_as_a_script_and_says_what_it_does(script: str) -> None:
    """As a script its folder comes first on the path, where no file may hide a module of the standard library."""
    command = [sys.executable, str(TOP / "bench" / script), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert f"bench/{script}" in shown.stdout
