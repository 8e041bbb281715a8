"""Tokenizer and model files of a tiny self-made model: bytes, the marks of the chat format, an agent's boilerplate.

Every byte is a token, so any text can be written and read back. Text that an agent's episodes repeat (the JSON
around a tool call's arguments, the environment's fixed phrases) is one token each, which makes an episode three
to four times shorter. Built in code: nothing is trained or downloaded.

The chat format is one mark per role: `<|user|>…<|end|><|assistant|>…<|end|><|tool|>…<|end|><|assistant|>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from streamrl_queue.errors import ConfigError

from .template import ToolSchema

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from .agent import Agent

PAD: Final = "<|pad|>"
END: Final = "<|end|>"
SPECIAL_TOKENS: Final = (
    PAD,
    END,
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|system|>",
    "<tool_call>",
    "</tool_call>",
)
CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.content %}{{- message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": ' + (call.function or call).name | tojson }}
        {{- ', "arguments": ' + (call.function or call).arguments | tojson + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""


def build_tokenizer(agent: Agent, extra_pieces: Sequence[str] = ()) -> Tokenizer:
    """A byte-level tokenizer with the marks of the chat format and the pieces of one agent.

    The pieces are those of its tools, `Answer: `, the environment's own (its class attribute `vocabulary`), and
    `extra_pieces`. Ids: 256 bytes, then the marks, then the pieces.

    Raises:
        ConfigError: when a piece cannot be written and read back (it has characters beyond ASCII).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    pieces = dict.fromkeys([*tool_pieces(agent.tools), "Answer: ", *agent.vocabulary, *extra_pieces])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    for piece in pieces:
        _check(tokenizer, piece)
    return tokenizer


def tool_pieces(tools: Sequence[ToolSchema]) -> Iterator[str]:
    """The fixed text around the arguments of each tool's calls, as `json.dumps` writes it.

    For `get(key: str)`: `{"name": "get", "arguments": {"key": "` and `"}}`.
    """
    for tool in tools:
        function = tool["function"]
        before = f'{{"name": {json.dumps(function["name"])}, "arguments": {{'
        for name, schema in function["parameters"].get("properties", {}).items():
            quote = '"' if schema.get("type") == "string" else ""
            yield f"{before}{json.dumps(name)}: {quote}"
            before = f"{quote}, "
        if before.startswith("{"):  # no parameters
            yield before
    yield '"}}'
    yield "}}"


def write_model_files(directory: Path | str, tokenizer: Tokenizer) -> None:
    """Write the tokenizer, its config, chat_template.jinja and generation_config.json in Hugging Face's layout."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    marks = {"eos_token": END, "pad_token": PAD}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **marks}
    _write(folder / "tokenizer_config.json", settings)
    ids = {"eos_token_id": tokenizer.token_to_id(END), "pad_token_id": tokenizer.token_to_id(PAD)}
    _write(folder / "generation_config.json", ids)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _check(tokenizer: Tokenizer, piece: str) -> None:
    ids = tokenizer.encode(piece, add_special_tokens=False).ids
    if len(ids) != 1 or tokenizer.decode(ids, skip_special_tokens=False) != piece:
        raise ConfigError(f"vocabulary: expected pieces of ASCII text that read back as written, got {piece!r}")
