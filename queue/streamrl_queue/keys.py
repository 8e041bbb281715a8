"""The queue's key: a file that only its owner can read. The key itself is in no configuration, log or command line."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from .errors import ConfigError

KEY_BYTES: Final = 32
KEY_FILE: Final = "STREAMRL_QUEUE_KEY_FILE"
"""Environment variable that names the key's file where nothing else does."""


def new_key() -> bytes:
    """A fresh random key."""
    return os.urandom(KEY_BYTES)


def write_key(path: Path) -> None:
    """A file with a fresh key in hexadecimal digits, readable by its owner alone.

    Raises:
        ConfigError: there is such a file already, or it cannot be written.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path}: is there already; a key that is in use must not be lost: name another file"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    with os.fdopen(file, "w") as out:
        out.write(new_key().hex() + "\n")


def read_key(path: Path) -> bytes:
    """The key in a file: 32 raw bytes, or 64 hexadecimal digits.

    Raises:
        ConfigError: the file cannot be read, can be read by others, or holds something else. Never says what it holds.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            # Nobody's key is longer than its digits and a line end.
            data = file.read(4 * KEY_BYTES)
    except OSError as error:
        raise ConfigError(f"key file {path}: cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"key file {path}: expected mode 600, got {mode:o}: others can use it; chmod 600 {path}")
    if len(data) != KEY_BYTES:
        try:
            data = bytes.fromhex(data.decode("ascii").strip())
        except ValueError:
            data = b""
    if len(data) != KEY_BYTES:
        raise ConfigError(
            f"key file {path}: expected {KEY_BYTES} bytes or {2 * KEY_BYTES} hexadecimal digits; "
            "`streamrl keygen FILE` makes one"
        )
    return data


def find_key(path: Path | str | None) -> bytes | None:
    """The key in the file that `path` names, or else the environment (`STREAMRL_QUEUE_KEY_FILE`); None: no key.

    Raises:
        ConfigError: see `read_key`.
    """
    named = path or os.environ.get(KEY_FILE)
    return read_key(Path(named)) if named else None


def check_key(key: bytes | None) -> None:
    """Raises ConfigError, without the key, unless it is one or there is none."""
    if key is not None and len(key) != KEY_BYTES:
        raise ConfigError(
            f"key: expected {KEY_BYTES} bytes, got {len(key)}; a file of `streamrl keygen` is read with keys.read_key"
        )
