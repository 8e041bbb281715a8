"""What a piece of an algorithm is. This module is all that a package which brings pieces of its own imports.

A piece is a struct: its fields are the options, its docstring says what it does, `source` where the equation is
from, and `function` names the pure function that computes it, which is imported when it is first used. So
configurations are read without torch. A package makes its pieces known by entry points of the group
`streamrl.algorithms`, `name = module:Struct`; the name is the struct's tag, by which a configuration chooses it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, Union

from msgspec import Meta, Struct

from streamrl_queue.errors import ConfigError

GROUP: Final = "streamrl.algorithms"

Proximal = Literal["current", "behaviour", "between"]


class Piece(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A part of an algorithm that others can stand in for."""

    source: ClassVar[str] = ""
    function: ClassVar[str] = ""


class Advantage(Piece, frozen=True, kw_only=True):
    """Rewards of one group -> advantages of its rows: `function(config, rewards)`, both `[rows]` float64."""

    # The function gives values that are then brought to mean 0 and deviation 1 over all sampled tokens of a step.
    # The learner then trains nothing before it holds all rows of the step.
    standardises: ClassVar[bool] = False

    bound: Annotated[float, Meta(gt=0)] = 10.0
    """Largest magnitude of an advantage; larger ones are clipped to it."""

    @property
    def compares(self) -> bool:
        """Whether a row is compared with the others of its group, so that groups of one teach nothing."""
        return True


class Loss(Piece, frozen=True, kw_only=True):
    """The objective of each sampled token: `function(config, log_ratio, sampled)` -> `losses.Gains`."""

    # The loss does something where the ratio leaves 1, and needs a correction that lets it.
    clips: ClassVar[bool] = True


class Correction(Piece, frozen=True, kw_only=True):
    """How stale tokens are corrected: `function(config, sampled)` -> `corrections.Corrected`."""

    # The policy that the loss's ratio is taken to. With `current` the ratio is 1, and carries the gradient.
    proximal: ClassVar[Proximal] = "current"
    # Whether tokens of an older policy are corrected for at all.
    corrects: ClassVar[bool] = True


class Rejection(Piece, frozen=True, kw_only=True):
    """Which rows are left out, above and below the line: `function(config, sampled)` -> `[n]` bool, True to keep."""


class Lag(Piece, frozen=True, kw_only=True):
    """What a token counts by its lag: `function(config, lags)` -> weights, both `[tokens]`; 0 is as if not sampled."""


class Length(Piece, frozen=True, kw_only=True):
    """What long rows lose: `function(config, tokens)` -> what is added to the rewards, both `[rows]`."""


P = TypeVar("P", bound=type[Piece])


def function_of(piece: Piece) -> Callable[..., Any]:
    """The function that computes `piece`.

    Raises:
        ConfigError: there is none under the name that the piece gives.
    """
    return _function(type(piece))


@cache
def _function(kind: type[Piece]) -> Callable[..., Any]:
    module, _, name = kind.function.partition(":")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__}.function: expected module:function, got {kind.function!r}: {error}"
        ) from error


def tag_of(kind: type[Piece]) -> str:
    """The name by which a configuration chooses the piece."""
    return str(kind.__struct_config__.tag)


@cache
def installed() -> tuple[type[Piece], ...]:
    """Pieces of other packages, by name.

    Raises:
        ConfigError: an entry point that cannot be loaded, or is no piece, or is not called like its tag.
    """
    return tuple(_load(point) for point in sorted(entry_points(group=GROUP), key=lambda point: point.name))


def _load(point: Any) -> type[Piece]:
    where = f"entry point {point.name} = {point.value} of the group {GROUP}"
    try:
        kind = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where} cannot be loaded: {error}; mend or uninstall its package") from error
    bases = (Advantage, Loss, Correction, Rejection, Lag, Length)
    if not (isinstance(kind, type) and issubclass(kind, bases)):
        names = ", ".join(base.__name__ for base in bases)
        raise ConfigError(f"{where}: expected a struct that extends one of {names}; got {kind!r}")
    if tag_of(kind) != point.name:
        raise ConfigError(f"{where}: expected its tag to be {point.name!r}, got {tag_of(kind)!r}")
    return kind


def union(base: type[Piece], own: Iterable[type[Piece]]) -> Any:
    """The pieces `own` of streamrl and the installed ones that extend `base`, as a type for a field.

    Raises:
        ConfigError: two pieces of one name.
    """
    by_tag: dict[str, type[Piece]] = {}
    for kind in (*own, *(kind for kind in installed() if issubclass(kind, base))):
        if (other := by_tag.setdefault(tag_of(kind), kind)) is not kind:
            raise ConfigError(
                f"{base.__name__.lower()} {tag_of(kind)}: expected one piece of that name, got "
                f"{other.__module__}.{other.__name__} and {kind.__module__}.{kind.__name__}; rename the second"
            )
    return Union[tuple(by_tag.values())]  # noqa: UP007 - the members are known at run time only
