"""Servers live in Python environments of their own: made once, below the user's cache directory, from pinned files.

Their dependencies contradict the learner's, so that nothing of them is ever imported here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from streamrl_queue.errors import ConfigError, EngineError

Kind = Literal["sglang", "vllm"]

HERE: Final = Path(__file__).parent
VERSIONS: Final[Mapping[Kind, str]] = {"sglang": "0.5.23", "vllm": "0.32.0"}
CPU_TORCH: Final = "torch==2.13.0+cpu"
CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
# Builds for CUDA that do not load beside a torch for the CPU; vLLM starts without them.
UNWANTED: Final = ("torchvision", "torchaudio", "torchcodec")
DONE: Final = "streamrl-installed"
"""A file in an environment that is complete."""


def cache_directory() -> Path:
    """Where environments of servers lie: `$XDG_CACHE_HOME/streamrl/engines`, below `~/.cache` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamrl" / "engines"


def environment(kind: Kind, *, cpu: bool) -> Path:
    """The directory of a server's environment, whether it exists or not."""
    return cache_directory() / f"{kind}-{VERSIONS[kind]}{'-cpu' if cpu else ''}"


def installed_python(kind: Kind, *, cpu: bool) -> Path:
    """The Python of an installed server.

    Raises:
        ConfigError: it is not installed; with the command that installs it.
    """
    directory = environment(kind, cpu=cpu)
    if not (directory / DONE).exists():
        command = f"streamrl engines install {kind}{' --cpu' if cpu else ''}"
        raise ConfigError(f"engine.kind: {kind} is not installed in {directory}; run {command}, or set engine.python")
    return directory / "bin" / "python"


def install(kind: Kind, *, cpu: bool, say: Callable[[str], None]) -> Path:
    """Make a server's environment, unless it is there; returns its Python. Takes minutes and about 4 GB.

    Raises:
        EngineError: pip failed, or the server does not import afterwards; nothing is left of the attempt.
    """
    directory = environment(kind, cpu=cpu)
    if (directory / DONE).exists():
        say(f"{directory}: there already")
        return directory / "bin" / "python"
    say(f"{directory}: installing {kind} {VERSIONS[kind]}; this takes minutes and about 4 GB")
    # What an interrupted attempt left is not worth more than what pip's own cache keeps.
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        _run([sys.executable, "-m", "venv", str(directory)])
        python = str(directory / "bin" / "python")
        if cpu:
            _install_torch(python, say)
        for arguments in pip_arguments(kind, cpu=cpu):
            say(f"pip {' '.join(arguments)}")
            _run([*_pip(python), *arguments])
        if kind == "vllm" and cpu:
            _name_vllm(directory)
        say("importing it")
        _run([python, "-c", f"import {kind}"], environment=server_environment(kind, cpu=cpu))
        (directory / DONE).touch()
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    say(f"{directory}: installed")
    return directory / "bin" / "python"


def _pip(python: str) -> list[str]:
    return [python, "-m", "pip", "--disable-pip-version-check"]


def _install_torch(python: str, say: Callable[[str], None]) -> None:
    """The torch without CUDA: from where pip is told to look, else from PyTorch's own index."""
    arguments = ["install", "--quiet", CPU_TORCH]
    say(f"pip {' '.join(arguments)}")
    try:
        _run([*_pip(python), *arguments])
    except EngineError:
        say(f"not there; from {CPU_INDEX}")
        _run([*_pip(python), *arguments, "--index-url", CPU_INDEX])


def pip_arguments(kind: Kind, *, cpu: bool) -> list[list[str]]:
    """What pip is called with, call by call."""
    name = f"{kind}{'-cpu' if cpu else ''}"
    requirements = HERE / "requirements"
    calls = [["install", "--quiet", "--requirement", str(requirements / f"{name}.txt")]]
    alone = requirements / f"{name}.alone.txt"
    if alone.exists():
        calls.append(["install", "--quiet", "--no-deps", "--requirement", str(alone)])
    if kind == "vllm" and cpu:
        calls.append(["uninstall", "--quiet", "--yes", *UNWANTED])
    return calls


def server_environment(kind: Kind, *, cpu: bool, threads: int = 1) -> dict[str, str]:
    """The environment variables of a server's processes."""
    unwanted = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in unwanted}
    # More threads than free cores make a server several times slower.
    variables |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    if kind == "sglang":
        # The positions that it keeps for itself lie behind those of the model; no token ever has one.
        variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        if cpu:
            variables |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(HERE / "shims" / "sglang_cpu")}
    else:
        variables |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if cpu:
            variables["PYTHONPATH"] = str(HERE / "shims" / "vllm_cpu")
            variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return variables


def _name_vllm(directory: Path) -> None:
    """`vllm serve` asks for the metadata of a distribution `vllm`; the CPU build's is called otherwise."""
    (packages,) = directory.glob("lib/python*/site-packages")
    metadata = packages / f"vllm-{VERSIONS['vllm']}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSIONS['vllm']}+cpu\n")


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise EngineError(f"{' '.join(command)} ended with exit code {done.returncode}:\n{tail}")
