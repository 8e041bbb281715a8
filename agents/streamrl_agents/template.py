"""Messages -> text -> ids, exactly as the model's own chat template and tokenizer say.

The rendering follows `transformers.apply_chat_template` (same Jinja settings, same `tojson`), without importing
transformers: a producer needs neither it nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from streamrl_queue.errors import ConfigError, TemplateError

from .formats import AUTO, FORMATS
from .formats import tool_format as format_named
from .parsing import ToolFormat

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer

MessageDict = Mapping[str, Any]  # {"role": …, "content": …}, what chat templates read
ToolSchema = dict[str, Any]  # OpenAI style: {"type": "function", "function": {…}}

# From so many characters on (about 5 ms), a text is encoded without holding Python's lock. Whoever runs an event
# loop then encodes in a worker thread, and heartbeats and everything else go on meanwhile.
LONG_CHARACTERS: Final = 10_000

# Beside chat_template.jinja, a folder with those that have another name.
MORE_TEMPLATES: Final = "additional_chat_templates"

_SPECIAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
# What a loop's body may mention beside its own message and still depend on nothing before or after it.
_CONSTANTS: Final = frozenset({"tools", "raise_exception", *_SPECIAL})


class ChatTemplate:
    """A tokenizer with its chat template, the ids that end a turn, and the form of the model's tool calls.

    `local` is True when the template provably renders each message by itself: then a long history need not be
    rendered again to know what a further message adds. `tool_format` is None when it was to be read off the template
    (`auto`) and the template shows none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        *,
        stop_ids: Sequence[int],
        variables: Mapping[str, str] | None = None,
        tool_format: str = AUTO,
    ) -> None:
        if not stop_ids:
            raise ConfigError("stop_ids: expected at least one id that ends a turn, got none")
        environment = _environment()
        self.tokenizer = tokenizer
        self.source = source
        self.stop_ids = tuple(stop_ids)
        self.local = _is_local(environment, source)
        self.tool_format = format_named(tool_format, source)
        self._variables = dict(variables or {})
        self._compiled = environment.from_string(source)

    def __repr__(self) -> str:
        kind = "local" if self.local else "rendered in full"
        return f"<ChatTemplate {self.tokenizer.get_vocab_size()} ids, stops {self.stop_ids}, {kind}>"

    @classmethod
    def load(cls, model_dir: Path | str, *, tool_format: str = AUTO, tools: bool = False) -> ChatTemplate:
        """Read the files of a Hugging Face model directory: tokenizer, template, ids that end a turn.

        A model may have a template of its own for agents with `tools`, named tool_use.

        Raises:
            ConfigError: naming the file that is missing or what it lacks, or an unknown `tool_format`.
        """
        from tokenizers import Tokenizer

        folder = Path(model_dir)
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"{folder}: expected a model directory with tokenizer.json, found none")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = _json(folder / "tokenizer_config.json")
        variables = {name: text for name in _SPECIAL if (text := _content(settings.get(name)))}
        stops = _stop_ids(tokenizer, _json(folder / "generation_config.json"), variables)
        if not stops:
            raise ConfigError(
                f"{folder}: expected eos_token_id in generation_config.json or eos_token in tokenizer_config.json"
            )
        source = _source(folder, settings, tools)
        return cls(tokenizer, source, stop_ids=stops, variables=variables, tool_format=tool_format)

    @cached_property
    def longest_token(self) -> int:
        """Characters that one id can stand for at most; text longer than `n` times this needs more than `n` ids."""
        return max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def end_id(self) -> int:
        """The id with which the template itself ends the model's turns, or the first of `stop_ids` if it writes none.

        They differ where generation_config.json names the end of a document first, as for Llama 3 and Gemma.
        """
        text = "a turn"
        try:
            end = self.render([{"role": "user", "content": "go"}, {"role": "assistant", "content": text}])
        except TemplateError:
            return self.stop_ids[0]
        behind = end.rpartition(text)[2].lstrip()
        return next((i for i in self.stop_ids if behind.startswith(self.decode([i]))), self.stop_ids[0])

    @cached_property
    def _end(self) -> str:
        return self.decode([self.end_id])

    @cached_property
    def structured_calls(self) -> bool:
        """Whether the template wants a turn that calls tools as `tool_calls`, and refuses it as the text it was."""
        return not self._takes_text and self._takes_calls_as(_CALL)

    @cached_property
    def _takes_text(self) -> bool:
        return self._takes_calls_as({"content": "f()"})

    def _takes_calls_as(self, call: MessageDict) -> bool:
        """Whether the conversation can go on behind a turn of this form and the tool's answer to it."""
        system, user = {"role": "system", "content": "be"}, {"role": "user", "content": "go"}
        answer = {"role": "tool", "content": "x", "tool_call_id": _CALL_ID}
        turns = [user, {"role": "assistant", **call}, answer, {"role": "assistant", "content": "done"}, user]
        return self._accepts(turns) or self._accepts([system, *turns])

    def _accepts(self, messages: Sequence[MessageDict]) -> bool:
        try:
            self.render(messages, generate=True)
        except TemplateError:
            return False
        return True

    def render(self, messages: Sequence[MessageDict], tools: Sequence[ToolSchema] = (), generate: bool = False) -> str:
        """The text of a conversation; with `generate`, up to where the model's next turn begins.

        Raises:
            TemplateError: when the template refuses the messages.
        """
        import jinja2

        try:
            return self._compiled.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=generate,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise TemplateError(f"the chat template refuses messages of roles [{roles}]: {error}") from error

    def needed_tool_format(self, name: str) -> ToolFormat:
        """The form of tool calls, for the agent of that name, which calls tools.

        Raises:
            ConfigError: when it is not known, or the template has no place for the tools' answers.
        """
        if self.tool_format is None:
            raise ConfigError(
                f"tool_format: {name} has tools, but the chat template does not show how the model writes a call; "
                f"set tool_format to one of {', '.join(FORMATS)}"
            )
        if not (self._takes_text or self.structured_calls):
            raise ConfigError(
                f"model.path: {name} has tools, but the chat template refuses their answers (messages of role tool); "
                "use a model whose template takes them, or write a chat_template.jinja for it that does"
            )
        return self.tool_format

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text. Nothing is added: the template has written every special token itself."""
        if len(text) < LONG_CHARACTERS:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        else:  # of the encoding methods only those of batches release the lock
            ids = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_behind(self, text: str) -> list[int]:
        """The ids of text that stands behind the end of a turn.

        Many tokenizers put a space before the beginning of a text, which this is not.
        """
        ids = self.encode(self._end + text)
        return ids[1:] if ids[:1] == [self.end_id] else self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def structured(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call as chat templates read it in an assistant's `tool_calls`."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


_CALL_ID: Final = "000000001"
_CALL: Final = {"content": "", "tool_calls": [structured(_CALL_ID, "f", {})]}


def _environment() -> jinja2.Environment:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}` marks what a model wrote; it changes no text."""

        tags: set[str] = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _is_local(environment: jinja2.Environment, source: str) -> bool:
    """Whether a template is: a constant head, one loop over messages that sees only its message, a generation prompt.

    Then render(a + b) = head + body(a) + body(b) + prompt, whatever a and b are. Anything that could carry
    state from one message to the next (`loop`, namespaces, `break`, objects made in the head) says no.
    """
    from jinja2 import nodes

    body = environment.parse(source).body
    places = [i for i, node in enumerate(body) if "messages" in _names(node)]
    if len(places) != 1 or not isinstance(loop := body[places[0]], nodes.For):
        return False
    head, tail = body[: places[0]], body[places[0] + 1 :]
    plain_loop = isinstance(loop.iter, nodes.Name) and not (loop.test or loop.else_ or loop.recursive)
    if not plain_loop or any(node.find(nodes.NSRef) or node.find(nodes.Break) for node in body):
        return False
    own = {name.name for name in loop.find_all(nodes.Name) if name.ctx == "store"}
    seen = set().union(*(_names(node) for node in loop.body))
    constant_head = all("add_generation_prompt" not in _names(node) for node in head)
    return constant_head and seen <= own | _CONSTANTS and all(_is_prompt(node) for node in tail)


def _is_prompt(node: jinja2.nodes.Node) -> bool:
    from jinja2 import nodes

    condition = isinstance(node, nodes.If) and isinstance(node.test, nodes.Name) and node.test.name
    return condition == "add_generation_prompt" and not (node.elif_ or node.else_)  # type: ignore[attr-defined]


def _names(node: jinja2.nodes.Node) -> set[str]:
    from jinja2 import nodes

    found: Iterable[nodes.Name] = node.find_all(nodes.Name)
    return {name.name for name in found} | ({node.name} if isinstance(node, nodes.Name) else set())


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return value


def _content(token: object) -> str | None:
    """A special token is written as its text, or as an object with its text in `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _stop_ids(tokenizer: Tokenizer, generation: dict[str, Any], variables: dict[str, str]) -> list[int]:
    """Ids that end a turn, those of generation_config.json first: its first one is how a turn is meant to end."""
    declared = generation.get("eos_token_id", [])
    ids = list(declared) if isinstance(declared, list) else [declared]
    ids.append(tokenizer.token_to_id(variables.get("eos_token", "")))
    return list(dict.fromkeys(i for i in ids if i is not None))


def _source(folder: Path, settings: dict[str, Any], tools: bool) -> str:
    declared = settings.get("chat_template")
    if isinstance(declared, list):  # several named ones: the layout of some tool-calling models
        sources: dict[str, str] = {entry["name"]: entry["template"] for entry in declared}
    else:
        sources = {"default": declared} if isinstance(declared, str) else {}
    if (file := folder / "chat_template.jinja").is_file():
        others = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
        sources = {"default": file.read_text("utf-8")} | {other.stem: other.read_text("utf-8") for other in others}
    for name in ["tool_use"] * tools + ["default"]:
        if name in sources:
            return sources[name]
    raise ConfigError(
        f"{folder}: expected chat_template.jinja, or chat_template in tokenizer_config.json; found neither"
    )
