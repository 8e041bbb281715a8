"""A double as a process of its own, started with the command line of the server that it doubles."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from engine_doubles import SGLangDouble, served
from engine_servers import make_model


def executable(path: Path) -> Path:
    """A file to be used as `engine.python`, that starts a double instead of a server."""
    script = path / "python"
    search = ":".join(filter(None, sys.path))
    script.write_text(f'#!/bin/sh\nPYTHONPATH={search} exec {sys.executable} {__file__} "$@"\n')
    script.chmod(0o755)
    return script


if __name__ == "__main__":
    with served(SGLangDouble(make_model(9), version="0"), int(sys.argv[sys.argv.index("--port") + 1])) as url:
        sys.stdout.write(f"serves {url}\n")
        sys.stdout.flush()
        signal.pause()
