"""What we write, transformers reads; what it renders, we render."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from agents_support import CHATML, bpe, lookup

from streamrl_agents.demonstrations import play_many
from streamrl_agents.template import ChatTemplate
from streamrl_agents.vocabulary import build_tokenizer, write_model_files

transformers = pytest.importorskip("transformers")

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "Find the value of ab"},
    {"role": "assistant", "content": '<tool_call>{"name": "get", "arguments": {"key": "ab"}}</tool_call>'},
    {"role": "tool", "content": "see cd"},
    {"role": "tool", "content": "<é> & 語"},
]


def test_a_tiny_model_directory_loads_with_the_same_ids(tmp_path: Path) -> None:
    write_model_files(tmp_path, build_tokenizer(lookup(), ["more"]))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = ChatTemplate.load(tmp_path)
    for generate in (False, True):
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=generate, return_dict=False)
        assert ours.encode(ours.render(MESSAGES, generate=generate)) == expected
    assert (theirs.eos_token_id,) == ours.stop_ids
    assert theirs.pad_token == "<|pad|>"
    generation = transformers.GenerationConfig.from_pretrained(str(tmp_path))
    assert generation.eos_token_id == theirs.eos_token_id


def test_tool_calls_in_a_message_are_written_as_the_model_writes_them(tmp_path: Path) -> None:
    write_model_files(tmp_path, build_tokenizer(lookup(), []))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    function = {"name": "get", "arguments": {"key": "ab"}}
    structured = [MESSAGES[1], {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]
    plain = [MESSAGES[1], MESSAGES[2]]
    expected = theirs.apply_chat_template(plain, tokenize=False)
    assert theirs.apply_chat_template(structured, tokenize=False) == expected
    assert ChatTemplate.load(tmp_path).render(structured) == expected


def test_recorded_episodes_equal_the_rendering_of_their_messages(tmp_path: Path) -> None:
    write_model_files(tmp_path, build_tokenizer(lookup(), []))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for ids, _ in play_many(lookup(), ChatTemplate.load(tmp_path), random.Random(0), True, 20):
        text = theirs.decode(ids.tolist())
        assert theirs.encode(text, add_special_tokens=False) == ids.tolist()


def test_a_chatml_template_with_tools_renders_as_transformers_does(tmp_path: Path) -> None:
    write_model_files(tmp_path, bpe("<|end|>", "<|pad|>", "<|im_end|>", "<|im_start|>"))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = ChatTemplate.load(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, tools=lookup().tools, add_generation_prompt=True, return_dict=False)
    assert ours.encode(ours.render(MESSAGES, lookup().tools, generate=True)) == expected
