"""An environment as users write it -> an Agent that plays one task.

    class Counter:                              # public methods are tools …
        def reset(self, task): ...              # … except these: the first user message (or a list of messages)
        def reward(self, answer): ...           # parameters out of answer, messages, task; a number or several by name
        def close(self): ...                    # optional
        @staticmethod
        def task(rng): ...                      # optional: samples one task
        @staticmethod
        def demonstrate(task, rng, sloppy): ... # optional: a scripted episode, turn by turn (str or ToolCall)

    async def my_agent(task, chat): ...         # or a function that drives the conversation and returns the reward

The class form is the function form, written once: `ClassAgent.play` is an ordinary function that drives a chat.

Optional class attributes: `inline = True` (methods only compute, see calling.py), `vocabulary` (pieces of text
for tiny models, see vocabulary.py). An environment that is over sets `self.done = True`: the tool's result is
then the last thing that happens, and the reward is asked for.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import random
import sys
import sysconfig
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import trio

from streamrl_queue.errors import ConfigError, EnvironmentFailed

from .calling import Caller
from .chat import Chat
from .parsing import ToolCall
from .template import ToolSchema
from .tools import Toolbox, tools_of

_RESERVED: Final = frozenset({"reset", "reward", "close", "task", "demonstrate"})
_REWARD_PARAMETERS: Final = ("answer", "messages", "task")
# `close` runs even when everything was cancelled, so it must not hold up the end of a run.
CLOSE_SECONDS: Final = 2.0

Demonstrate = Callable[[dict[str, Any], random.Random, bool], Iterator[str | ToolCall]]
Outcome = float | Mapping[str, float] | None


class Agent(ABC):
    """Plays tasks. Stateless between episodes: each `play` makes its own environment."""

    # Where a sampler would have been found, as an advice.
    _sampler_place = "write a static method task(rng) in the class"

    def __init__(self, name: str, source: object, toolbox: Toolbox) -> None:
        self.name = name
        self.tools: list[ToolSchema] = toolbox.schemas
        self.vocabulary: tuple[str, ...] = tuple(getattr(source, "vocabulary", ()))
        # demonstrate(task, rng, sloppy) -> the turns of a scripted episode; None when the environment has none.
        self.demonstrate: Demonstrate | None = getattr(source, "demonstrate", None)
        self._toolbox = toolbox
        self._sampler: Callable[[random.Random], dict[str, Any]] | None = getattr(source, "task", None)

    def __repr__(self) -> str:
        names = ", ".join(tool["function"]["name"] for tool in self.tools)
        return f"<{type(self).__name__} {self.name}, tools: {names or 'none'}>"

    @abstractmethod
    async def play(self, task: dict[str, Any], chat: Chat) -> Outcome:
        """Play one task and return its reward; None when the episode was cut before its end."""

    def sample_task(self, rng: random.Random) -> dict[str, Any]:
        """One task.

        Raises:
            ConfigError: when the agent has no `task` sampler, or it does not return a dict.
        """
        if self._sampler is None:
            raise ConfigError(
                f"{self.name}: expected a function task(rng) -> dict that samples tasks, found none; "
                f"{self._sampler_place}, or name one with tasks.sampler=file.py:function"
            )
        task = self._sampler(rng)
        if not isinstance(task, dict):
            raise ConfigError(f"{self.name}.task: expected a dict, got {type(task).__name__}")
        return task


class FunctionAgent(Agent):
    """`async def my_agent(task, chat) -> float`. Its module's `task` and `demonstrate` belong to it."""

    _sampler_place = "write task(rng) at module level beside it"

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(name, sys.modules.get(function.__module__), Toolbox())
        self._function = function

    async def play(self, task: dict[str, Any], chat: Chat) -> Outcome:
        outcome: Outcome = await Caller().call(self._function, task, chat)
        return outcome


class ClassAgent(Agent):
    """A class whose public methods are tools."""

    def __init__(self, kind: type, name: str) -> None:
        super().__init__(name, kind, tools_of(kind, _RESERVED))
        self._kind = kind
        self._inline = bool(getattr(kind, "inline", False))
        _check_method(kind, name, "reset", ("task",))
        self._wanted = _check_method(kind, name, "reward", _REWARD_PARAMETERS)

    async def play(self, task: dict[str, Any], chat: Chat) -> Outcome:
        caller = Caller(inline=self._inline)
        environment = await self._call(chat, caller, "__init__", self._kind)
        try:
            reply = await chat.say(await self._call(chat, caller, "reset", environment.reset, task))
            while reply.tool_calls and not getattr(environment, "done", False):
                results = await chat.run_tools(reply.tool_calls, self._toolbox, caller, environment)
                if not getattr(environment, "done", False):
                    reply = await chat.tool_results(results)
            if reply.finish_reason != "stop":
                return None
            return await self._reward(environment, caller, task, chat)
        finally:
            await self._close(environment, caller)

    async def _reward(self, environment: Any, caller: Caller, task: dict[str, Any], chat: Chat) -> Outcome:
        known = {"answer": chat.answer, "messages": chat.messages, "task": task}
        wanted = {name: known[name] for name in self._wanted}
        outcome: Outcome = await self._call(chat, caller, "reward", environment.reward, **wanted)
        if outcome is None:
            raise EnvironmentFailed(f"{self.name}.reward: expected a number, or numbers by name; got None")
        return outcome

    async def _call(
        self, chat: Chat, caller: Caller, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The result of a method that is not a tool, within the deadline of one; past it the episode ends."""
        seconds = chat.limits.tool_seconds
        chat.doing(f"{self.name}.{name}")
        with trio.move_on_after(seconds):
            return await caller.call(function, *args, **kwargs)
        raise chat.end("error_timeout", f"{self.name}.{name} took longer than {seconds:g} s (tool_seconds)")

    async def _close(self, environment: Any, caller: Caller) -> None:
        if hasattr(environment, "close"):
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_SECONDS):
                await caller.call(environment.close)


def load_agent(spec: str) -> Agent:
    """The agent that `module:Name` or `path/to/file.py:Name` names.

    Raises:
        ConfigError: when there is no such module, file or name, or when it cannot be an agent.
    """
    target = load_object(spec)
    name = spec.rpartition(":")[2]
    if inspect.isclass(target):
        return ClassAgent(target, name)
    if inspect.iscoroutinefunction(target):
        return FunctionAgent(target, name)
    raise ConfigError(f"{spec}: expected a class or an async function(task, chat), got {type(target).__name__}")


def load_object(spec: str) -> Any:
    """What `module:Name` or `path/to/file.py:Name` names.

    Raises:
        ConfigError: when there is no such module, file or name, or when importing it fails.
    """
    place, colon, name = spec.rpartition(":")
    if not (colon and place and name):
        raise ConfigError(f"{spec!r}: expected module:Name or path/to/file.py:Name")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        close = difflib.get_close_matches(name, public, 1)
        raise ConfigError(f"{place}: has no {name}" + (f"; did you mean {close[0]}?" if close else ""))
    return getattr(module, name)


def _load_module(name: str) -> ModuleType:
    with _imported(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise  # the module is there, but something that it imports is not: that is its own error
            raise ConfigError(f"{name}: no such module; for a file, write path/to/file.py:Name") from error


@contextmanager
def _imported(place: str) -> Iterator[None]:
    """What the user's code raises while it is imported becomes a ConfigError with file, line and the error."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # supervision edge: the module is the user's code
        raise ConfigError(f"{place} cannot be imported: {place_of(error)}") from error


def place_of(error: BaseException) -> str:
    """`file:line: Error: message`, for the innermost line that is neither Python's own nor an installed package's."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    foreign = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<frozen", __file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(foreign)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"


def _load_file(path: Path) -> ModuleType:
    """Load a file once per process, under a name that is its own."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (from {Path.cwd()})")
    digest = hashlib.blake2s(str(path.resolve()).encode(), digest_size=4).hexdigest()
    name = f"streamrl_user_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # type hints are resolved through it
    try:
        with _imported(str(path)):
            specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_method(kind: type, name: str, method: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The parameters of a method that the class must have."""
    function = getattr(kind, method, None)
    if not callable(function):
        raise ConfigError(f"{name}: expected a method {method}({', '.join(('self', *allowed))}), found none")
    parameters = tuple(inspect.signature(function).parameters)[1:]
    for parameter in parameters:
        if parameter not in allowed:
            raise ConfigError(f"{name}.{method}: expected parameters out of {', '.join(allowed)}; got {parameter}")
    return parameters
