"""The queue's own page: its code prints what stands there, and its table names the metrics that there are."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

import streamrl
from streamrl_queue import open_broker, work_flow
from streamrl_queue.metrics import PREFIX, Page

TOP = Path(streamrl.__file__).parents[1]
PAGE = (TOP / "docs" / "queue.md").read_text()
# A block of Python, and behind it what it prints, indented.
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n((?:    [^\n]+\n)+)", PAGE, re.S)
COMMAND = re.search(r"^    streamrl (queue --bind (\S+) --dir journal --stages .*)$", PAGE, re.M)


@contextmanager
def broker(directory: Path) -> Iterator[tuple[str, str]]:
    """The page's broker at a free port: the address that is printed there, and its own."""
    assert COMMAND is not None
    command = [sys.executable, "-m", "streamrl.cli", *COMMAND[1].replace(COMMAND[2], "tcp://127.0.0.1:0").split()]
    with subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield COMMAND[2], process.stdout.readline().split("queue at ")[1].split(",")[0]
        finally:
            process.send_signal(signal.SIGTERM)


def test_every_block_of_python_has_an_output_that_it_is_compared_with() -> None:
    assert len(EXAMPLES) == PAGE.count("```python\n") == 3


def run(code: str, directory: Path) -> str:
    """What the code prints, with the page's broker running."""
    with broker(directory) as (printed, address):
        script = re.sub(r"ipc:///tmp/\w+/", f"ipc://{directory}/", code.replace(printed, address))
        said = subprocess.run(
            [sys.executable, "-c", script], cwd=directory, capture_output=True, text=True, timeout=60, check=False
        )
    assert said.returncode == 0, said.stderr
    return said.stdout


@pytest.mark.parametrize(("code", "prints"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_its_code_prints_what_stands_there(code: str, prints: str, tmp_path: Path) -> None:
    assert run(code, tmp_path) == re.sub(r"^    ", "", prints, flags=re.M)


def test_the_readme_starts_the_same_broker_and_its_code_squares(tmp_path: Path) -> None:
    assert COMMAND is not None
    code = re.search(re.escape(COMMAND[0]) + r"\n\n```python\n(.*?)```", (TOP / "README.md").read_text(), re.S)
    assert code is not None
    assert run(code[1], tmp_path) == f"{[{'x': x, 'square': x * x} for x in (1, 2, 3, 4)]}\n"


def test_its_table_names_every_metric_with_its_labels(tmp_path: Path) -> None:
    async def page() -> str:
        async with open_broker(work_flow(), tmp_path / "journal", bind=f"ipc://{tmp_path}/q") as broker:
            return Page(broker).text().decode()

    told: dict[str, set[str]] = {}
    for line in re.findall(r"^\| (`[a-z_`, ]+) \| (.*?) \|", PAGE.partition("### Metrics")[2], re.M):
        told |= {name: set(re.findall(r"`(\w+)`", line[1])) for name in re.findall(r"`(\w+)`", line[0])}
    families = [
        family
        for family in text_string_to_metric_families(trio.run(page))
        if family.name.startswith(PREFIX) and not family.name.endswith("_created")
    ]
    names = {
        family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else ""): {
            label for sample in family.samples for label in sample.labels if label != "le"
        }
        for family in families
    }
    assert told.keys() == names.keys()
    assert {name: labels for name, labels in names.items() if labels} == {
        name: told[name] for name, labels in names.items() if labels
    }


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE))))
def test_its_links_lead_somewhere(target: str) -> None:
    assert (TOP / "docs" / target).exists()
