"""Public methods become schemas; arguments are checked against them; errors go back to the model as text."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pytest
import trio
from agents_support import jumping

from streamrl_agents.calling import Caller
from streamrl_agents.docstrings import parse
from streamrl_agents.parsing import ToolCall
from streamrl_agents.tools import Tool, Toolbox, ToolResult, as_text, tools_of
from streamrl_queue.errors import ConfigError


class Unit(enum.Enum):
    metre = "m"
    foot = "ft"


@dataclass
class Point:
    x: float
    y: float = 0.0


def move(  # noqa: D417 (not every parameter needs words)
    to: Point,
    unit: Unit,
    how: Literal["fast", "slow"] = "fast",
    tags: list[str] | None = None,
    times: int = 1,
) -> str:
    """Move somewhere.

    It takes a while.

    Args:
        to: where to go,
            in the plane.
        unit (Unit): of length.
        times: how often.

    Returns:
        where it is.
    """
    return f"{to.x} {to.y} {unit.name} {how} {tags} {times}"


def run(tool: Any, arguments: dict[str, Any], *, seconds: float = 5.0, clock: Any = None) -> ToolResult:
    async def main() -> ToolResult:
        box = Toolbox.of(tool)
        return await box.call(ToolCall(tool.__name__, arguments), Caller(inline=True), seconds=seconds)

    return trio.run(main, clock=clock)


def test_the_schema_has_nested_types_defaults_enums_and_descriptions() -> None:
    schema = Tool(move).schema["function"]
    properties, definitions = schema["parameters"]["properties"], schema["parameters"]["$defs"]
    assert schema["description"] == "Move somewhere.\n\nIt takes a while."
    assert schema["parameters"]["required"] == ["to", "unit"]
    assert properties["to"] == {"$ref": "#/$defs/Point", "description": "where to go, in the plane."}
    assert definitions["Point"]["required"] == ["x"]
    assert definitions["Unit"]["enum"] == ["ft", "m"]
    assert properties["how"] == {"enum": ["fast", "slow"], "default": "fast"}
    assert properties["tags"]["anyOf"] == [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]
    assert properties["times"] == {"type": "integer", "default": 1, "description": "how often."}


def test_arguments_arrive_in_the_types_that_the_function_declares() -> None:
    result = run(move, {"to": {"x": 1}, "unit": "ft", "tags": ["a"]})
    assert result == ToolResult("1.0 0.0 foot fast ['a'] 1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"to": [1, 2], "unit": "m"}, "error: move: expected object, got array - at $.to"),
        ({"to": {"x": "1"}, "unit": "m"}, "error: move: expected float, got str - at $.to.x"),
        ({"to": {"x": 1}}, "error: move: object missing required field unit"),
        ({"to": {"x": 1}, "unit": "m", "spee": 1}, "error: move: object contains unknown field spee"),
        ({"to": {"x": 1}, "unit": "m", "how": "so"}, "error: move: invalid enum value 'so' - at $.how"),
    ],
)
def test_arguments_that_do_not_fit_go_back_to_the_model(arguments: dict[str, Any], text: str) -> None:
    assert run(move, arguments) == ToolResult(text, "bad_call")


def test_a_default_that_is_a_list_is_not_shared_between_calls() -> None:
    def collect(item: str, into: list[str] = []) -> list[str]:  # noqa: B006 (that is the case)
        """Collect."""
        into.append(item)
        return into

    tool = Tool(collect)
    for _ in range(2):
        assert tool.check({"item": "a"})["into"] == []
        tool.check({"item": "a"})["into"].append("x")


def test_an_exception_goes_back_to_the_model_as_text() -> None:
    def fail() -> None:
        """Fail."""
        raise KeyError("gone")

    assert run(fail, {}) == ToolResult("error: KeyError: 'gone'", "failed")


def test_an_asynchronous_tool_that_is_too_slow_is_stopped_and_says_so() -> None:
    async def wait() -> None:
        """Wait."""
        await trio.sleep_forever()

    result = run(wait, {}, seconds=30, clock=jumping())
    assert result == ToolResult("error: wait took longer than 30 s", "failed")


def test_an_unknown_tool_names_the_known_ones() -> None:
    async def main() -> ToolResult:
        return await Toolbox.of(move).call(ToolCall("mov"), Caller(), seconds=1)

    assert trio.run(main) == ToolResult("error: no tool named mov; the tools are: move", "bad_call")


def test_results_become_text() -> None:
    assert as_text("as it is") == "as it is"
    assert as_text(None) == "ok"
    assert as_text({"é": [1, 2.5, None]}) == '{"é": [1, 2.5, null]}'
    assert as_text(Point(1, 2)) == '{"x": 1, "y": 2}'


def test_the_tools_of_a_class_are_its_public_methods_in_order() -> None:
    class Base:
        def first(self) -> None:
            """First."""

    class Kind(Base):
        limit = 3

        def reset(self, task: dict[str, Any]) -> str:
            return ""

        def second(self) -> None:
            """Second."""

        @staticmethod
        def third(x: int) -> int:
            """Third."""
            return x

        @property
        def state(self) -> int:
            return 1

        def _hidden(self) -> None: ...

    box = tools_of(Kind, {"reset"})
    assert [schema["function"]["name"] for schema in box.schemas] == ["first", "second", "third"]

    async def main() -> ToolResult:
        return await box.call(ToolCall("third", {"x": 2}), Caller(inline=True), environment=Kind(), seconds=1)

    assert trio.run(main) == ToolResult("2")


def no_hint(x) -> None:  # type: ignore[no-untyped-def]
    """No hint."""


def no_docstring(x: int) -> None: ...


def stars(*x: int) -> None:
    """Stars."""


def misnamed(key: str) -> None:  # noqa: D417 (that is the case)
    """Misnamed.

    Args:
        kye: which.
    """


def unknown_type(x: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Unknown type."""


def no_schema(x: trio.Event) -> None:
    """No schema."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_hint, "tool no_hint: parameter x: expected a type hint"),
        (no_docstring, "tool no_docstring: expected a docstring"),
        (stars, "expected parameters with names"),
        (misnamed, "describes kye, which is no parameter; did you mean key?"),
        (unknown_type, "a type hint cannot be resolved"),
        (no_schema, "tool no_schema: a parameter has a type without a JSON schema"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_at_once(function: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _ = Tool(function).schema
    assert message in str(caught.value)


def test_docstrings_without_arguments_or_with_all_sections() -> None:
    assert parse(None) == ("", {})
    assert parse("One line.") == ("One line.", {})
    text = "Do it.\n\nArgs:\n    a: first:\n        still a.\n    **b (int, optional): second\n\nRaises:\n    E: never."
    assert parse(text) == ("Do it.", {"a": "first: still a.", "b": "second"})


def test_checked_arguments_are_of_the_declared_types() -> None:
    assert Tool(move).check({"to": {"x": 1}, "unit": "m"})["to"] == Point(1.0, 0.0)
    with pytest.raises(msgspec.ValidationError):
        Tool(move).check({})
