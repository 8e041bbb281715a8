"""What we write, transformers reads; what it renders, we render."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from agents_families import FAMILIES, family_template
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


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_template_of_a_family_renders_as_transformers_does(name: str, tmp_path: Path) -> None:
    family, ours = FAMILIES[name], family_template(name)
    ours.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(ours.source)
    marks = {"eos_token": family.end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(marks | family.variables))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ours.stop_ids)}))
    loaded, theirs = ChatTemplate.load(tmp_path), transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    messages = MESSAGES[:3] if "tool" not in family.roles else MESSAGES
    for tools in ([], lookup().tools):
        for generate in (False, True):
            options = {"tools": tools or None, "add_generation_prompt": generate}
            text = theirs.apply_chat_template(messages, tokenize=False, **options)
            assert ours.render(messages, tools, generate) == loaded.render(messages, tools, generate) == text
            ids = theirs.apply_chat_template(messages, return_dict=False, **options)
            assert ours.encode(text) == loaded.encode(text) == ids
    assert (loaded.stop_ids, loaded.end_id) == (ours.stop_ids, ours.end_id)


def test_an_agent_with_tools_gets_the_template_that_transformers_takes(tmp_path: Path) -> None:
    write_model_files(tmp_path, build_tokenizer(lookup(), []))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(CHATML)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for tools in ([], lookup().tools):
        ours = ChatTemplate.load(tmp_path, tools=bool(tools))
        assert ours.render(MESSAGES, tools) == theirs.apply_chat_template(MESSAGES, tokenize=False, tools=tools or None)
