"""Chat templates of model families (templates/*.jinja) with small tokenizers of the same kind as theirs."""

from __future__ import annotations

import string
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
from agents_support import bpe
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from streamrl_agents.template import ChatTemplate

FOLDER = Path(__file__).parent / "templates"


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What one family's directory of a model would hold.

    `marks` are the special tokens. `stops` are in the order of generation_config.json, which need not begin with the
    mark that the template writes: that one is `end`. `roles` are the ones that the template takes between turns.
    """

    file: str
    marks: tuple[str, ...]
    stops: tuple[str, ...]
    end: str
    tool_format: str | None
    roles: tuple[str, ...] = ("user", "tool")
    system: bool = True
    tokenizer: Literal["bytes", "metaspace", "metaspace_first"] = "bytes"
    variables: dict[str, str] = {}


IM = {"marks": ("<|im_start|>", "<|im_end|>"), "stops": ("<|im_end|>",), "end": "<|im_end|>"}
QWEN = IM | {"marks": ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")}
LLAMA_STOPS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
TOOL_MARKS = tuple(
    f"<｜tool▁{name}｜>"
    for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end",
                 "output▁begin", "output▁end")
)  # fmt: skip
DEEPSEEK = {
    "marks": ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", *TOOL_MARKS),
    "stops": ("<｜end▁of▁sentence｜>",),
    "end": "<｜end▁of▁sentence｜>",
    "variables": {"bos_token": "<｜begin▁of▁sentence｜>"},
}
MISTRAL_MARKS = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
                 "[/TOOL_RESULTS]")  # fmt: skip

FAMILIES = {
    "chatml": Family(file="chatml", tool_format=None, **IM),
    "smollm2": Family(file="smollm2", tool_format=None, **IM),
    "zephyr": Family(
        file="zephyr",
        marks=("<s>",),
        stops=("</s>",),
        end="</s>",
        tool_format=None,
        tokenizer="metaspace_first",
        variables={"eos_token": "</s>"},
    ),
    "qwen2.5": Family(file="qwen2_5", tool_format="hermes", **QWEN),
    "qwen3": Family(file="qwen3", tool_format="hermes", **QWEN),
    "llama3": Family(
        file="llama3_1",
        marks=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        stops=LLAMA_STOPS,
        end="<|eot_id|>",
        tool_format="llama3_json",
        variables={"bos_token": "<|begin_of_text|>"},
    ),
    "mistral": Family(
        file="mistral_v3",
        marks=("<s>", *MISTRAL_MARKS),
        stops=("</s>",),
        end="</s>",
        tool_format="mistral",
        roles=("user",),
        tokenizer="metaspace_first",
        variables={"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "gemma": Family(
        file="gemma3",
        marks=("<bos>", "<start_of_turn>", "<start_of_image>", "<image_soft_token>"),
        stops=("<eos>", "<end_of_turn>"),
        end="<end_of_turn>",
        tool_format=None,
        roles=("user",),
        tokenizer="metaspace",
        variables={"bos_token": "<bos>"},
    ),
    "deepseek": Family(file="deepseek_v3", tool_format="deepseek", **DEEPSEEK),
    "deepseek-r1": Family(file="deepseek_r1", tool_format=None, **DEEPSEEK),
}


@cache
def family_template(name: str, tool_format: str = "auto") -> ChatTemplate:
    family = FAMILIES[name]
    special = (*family.stops, *(mark for mark in family.marks if mark not in family.stops))
    made = bpe(*special) if family.tokenizer == "bytes" else metaspace(family.tokenizer, *special)
    stops = [made.token_to_id(stop) for stop in family.stops]
    source = (FOLDER / f"{family.file}.jinja").read_text("utf-8")
    return ChatTemplate(made, source, stop_ids=stops, variables=family.variables, tool_format=tool_format)


def metaspace(kind: str, *special: str) -> Tokenizer:
    """A tokenizer that writes spaces as ▁ and unknown characters as bytes. `metaspace_first` puts one before a text."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("▁", "hello"), ("▁", "▁"), ("1", "2")]
    words = ["<unk>", *pieces, "▁", "\n", *string.ascii_letters, *string.digits, *string.punctuation, "é"]
    words += ["".join(pair) for pair in merges]
    made = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    readable = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "metaspace_first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        readable.append(decoders.Strip(" ", 1, 0))
    else:
        made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(readable)
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in special])
    return made
