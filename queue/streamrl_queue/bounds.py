"""Numbers of a configuration lie between bounds that make sense of them. NaN lies nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .errors import ConfigError

Range = tuple[float, float]

# A deadline below this ends work that could not have begun; one above is meant as none.
SECONDS: Final[Range] = (0.1, 10_000_000)
# Steps, rows, bytes, …: as many as fit 32 bits with their sign.
COUNT: Final[Range] = (1, (1 << 31) - 1)
# Processes of one kind on one machine.
PROCESSES: Final[Range] = (1, 1024)


def check_bounds(settings: object, section: str, bounds: Mapping[str, Range]) -> None:
    """Each named field of `settings` is None or within its range, both ends included.

    Args:
        settings: what has the fields.
        section: what the fields are called in a configuration, in front of their own names; may be empty.
        bounds: field → least and greatest value.

    Raises:
        ConfigError: naming the field, its range and the value.
    """
    for field, (least, greatest) in bounds.items():
        value = getattr(settings, field)
        if value is not None and not least <= value <= greatest:
            name = f"{section}.{field}" if section else field
            raise ConfigError(f"{name}: expected {least} to {greatest}, got {value}")
