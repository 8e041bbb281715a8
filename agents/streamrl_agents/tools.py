"""Public methods -> tools: JSON schemas for the model, checked arguments, results as text.

A parameter may have any type that msgspec knows (numbers, strings, lists, dicts, Literal, Enum, Optional,
dataclasses, TypedDicts, Structs, nested as one likes). What the model sends is converted to exactly that type;
what cannot be converted goes back to it as the tool's answer.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

import msgspec
import trio

from streamrl_queue.errors import ConfigError, ToolFailed

from .calling import Caller
from .docstrings import parse
from .parsing import ToolCall, plain
from .template import ToolSchema

_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ToolResult(msgspec.Struct, frozen=True):
    """What goes back to the model. `kind`: the tool answered, the call was wrong, or the tool failed."""

    text: str
    kind: Literal["answered", "bad_call", "failed"] = "answered"


class Tool:
    """One function with its schema and the type of its arguments.

    Raises:
        ConfigError: when a parameter has no type hint, or the docstring is missing or names what does not exist.
    """

    def __init__(self, function: Callable[..., Any], *, method: bool = False, name: str | None = None) -> None:
        self.function = function
        self.name = name or function.__name__
        self.method = method
        self.description, self._notes = parse(function.__doc__)
        if not self.description:
            raise ConfigError(
                f"tool {self.name}: expected a docstring, which the model reads; got none "
                "(a method that is not a tool starts with an underscore)"
            )
        self._arguments = msgspec.defstruct(
            self.name, self._fields(), kw_only=True, forbid_unknown_fields=True, module=function.__module__
        )
        self._names = self._arguments.__struct_fields__
        self._check_notes()

    def __repr__(self) -> str:
        return f"<Tool {self.name}({', '.join(self._names)})>"

    @property
    def schema(self) -> ToolSchema:
        """The tool as OpenAI's `tools` and chat templates describe it."""
        function = {"name": self.name, "description": self.description, "parameters": self._parameters()}
        return {"type": "function", "function": function}

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments in the types that the function declares.

        Raises:
            msgspec.ValidationError: when they do not fit.
        """
        values = msgspec.convert(arguments, self._arguments)
        return {name: getattr(values, name) for name in self._names}

    def on(self, environment: object) -> Callable[..., Any]:
        """What to call: the method of this environment, or the function itself."""
        method: Callable[..., Any] = getattr(environment, self.name) if self.method else self.function
        return method

    def _fields(self) -> list[tuple[str, Any] | tuple[str, Any, Any]]:
        hints = _hints(self.function, self.name)
        parameters = list(inspect.signature(self.function).parameters.values())
        return [self._field(p, hints) for p in parameters[1 if self.method else 0 :]]

    def _field(self, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> tuple[str, Any] | tuple[str, Any, Any]:
        if parameter.kind not in _NAMED:
            raise ConfigError(f"tool {self.name}: {parameter}: expected parameters with names, which a model can fill")
        if parameter.name not in hints:
            raise ConfigError(f"tool {self.name}: parameter {parameter.name}: expected a type hint, got none")
        default = parameter.default
        if default is parameter.empty:
            return parameter.name, hints[parameter.name]
        if isinstance(default, list | dict | set):
            return parameter.name, hints[parameter.name], msgspec.field(default_factory=lambda: copy.deepcopy(default))
        return parameter.name, hints[parameter.name], default

    def _check_notes(self) -> None:
        for name in self._notes:
            if name not in self._names:
                close = difflib.get_close_matches(name, self._names, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ConfigError(f"tool {self.name}: its docstring describes {name}, which is no parameter{hint}")

    def _parameters(self) -> dict[str, Any]:
        try:
            (root,), components = msgspec.json.schema_components([self._arguments], ref_template="#/$defs/{name}")
        except (TypeError, NameError) as error:
            raise ConfigError(f"tool {self.name}: a parameter has a type without a JSON schema: {error}") from error
        parameters: dict[str, Any] = components.pop(root["$ref"].rpartition("/")[2])
        del parameters["title"]
        parameters.pop("additionalProperties", None)
        for name, text in self._notes.items():
            parameters["properties"][name].setdefault("description", text)
        return parameters | ({"$defs": components} if components else {})


class Toolbox:
    """Tools by name. `call` never raises for what the model or the tool did wrong."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.schemas = [tool.schema for tool in self._tools.values()]

    def __repr__(self) -> str:
        return f"<Toolbox {', '.join(self._tools) or 'empty'}>"

    @classmethod
    def of(cls, *functions: Callable[..., Any]) -> Toolbox:
        """Tools from plain functions."""
        return cls(Tool(function) for function in functions)

    async def call(self, call: ToolCall, caller: Caller, *, environment: object = None, seconds: float) -> ToolResult:
        """Execute one call and say what to tell the model.

        Raises:
            ToolFailed: when a synchronous tool outlasts `seconds`: its thread is still at work inside the
                environment, whose state nobody can know any more.
        """
        if call.error is not None:
            return ToolResult(call.error, "bad_call")
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return ToolResult(f"error: no tool named {call.name}; the tools are: {known}", "bad_call")
        try:
            arguments = tool.check(call.arguments)
        except msgspec.ValidationError as error:
            return ToolResult(f"error: {call.name}: {plain(error)}", "bad_call")
        return await _execute(tool, arguments, caller, environment, seconds)


async def _execute(
    tool: Tool, arguments: dict[str, Any], caller: Caller, environment: object, seconds: float
) -> ToolResult:
    function = tool.on(environment)
    with trio.move_on_after(seconds):
        try:
            return ToolResult(as_text(await caller.call(function, **arguments)))
        except Exception as error:  # supervision edge: the tool is the user's code, its failure is the model's to read
            return ToolResult(f"error: {type(error).__name__}: {error}", "failed")
    if caller.left_behind:
        raise ToolFailed(f"{tool.name} took longer than {seconds:g} s and its thread cannot be stopped")
    return ToolResult(f"error: {tool.name} took longer than {seconds:g} s", "failed")


def tools_of(kind: type, reserved: Iterable[str]) -> Toolbox:
    """The public methods of a class, in the order of their definition, base classes first."""
    found: dict[str, Tool] = {}
    for base in reversed(kind.__mro__[:-1]):
        for name, member in vars(base).items():
            if name.startswith("_") or name in reserved:
                continue
            if inspect.isfunction(member):
                found[name] = Tool(member, method=True)
            elif isinstance(member, staticmethod):
                found[name] = Tool(member.__func__, name=name)
    return Toolbox(found.values())


def as_text(value: object) -> str:
    """A result as the model reads it: text as it is, nothing as `ok`, anything else as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return "ok"
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=False)


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"tool {name}: a type hint cannot be resolved: {error}; define it at module level") from error
