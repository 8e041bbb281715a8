"""The chat template renders what transformers would; a local one is recognised, never guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agents_support import CHATML, THINKING, bpe, template_of, tiny

from streamrl_agents.template import ChatTemplate
from streamrl_agents.vocabulary import CHAT_TEMPLATE, END
from streamrl_queue.errors import ConfigError, TemplateError

USER = [{"role": "user", "content": "hi <b>"}]
LOOP = "{% for message in messages %}[{{ message.content }}]{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        CHAT_TEMPLATE,
        LOOP,
        "{{ bos_token }}" + LOOP,
        "{% for t in tools %}{{ t.name }}{% endfor %}" + LOOP + "{% if add_generation_prompt %}>{% endif %}",
        "{% for m in messages %}{% set c = m.content %}{% for x in m.calls %}{{ x }}{{ c }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_renders_each_message_by_itself_is_local(source: str) -> None:
    assert template_of(source, END).local


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        THINKING,
        "fixed",
        LOOP + LOOP,
        LOOP + "tail",
        LOOP + "{% if add_generation_prompt %}>{% else %}<{% endif %}",
        "{% if add_generation_prompt %}>{% endif %}" + LOOP,
        "{{ messages | length }}" + LOOP,
        "{% for message in messages[1:] %}{{ message.content }}{% endfor %}",
        "{% for message in messages if message.content %}{{ message.content }}{% endfor %}",
        "{% for message in messages %}{{ message.content }}{% else %}none{% endfor %}",
        "{% for message in messages %}{{ loop.index }}{% endfor %}",
        "{% for message in messages %}{{ messages[0].content }}{% endfor %}",
        "{% for message in messages %}{% if add_generation_prompt %}>{% endif %}{% endfor %}",
        "{% for message in messages %}{% if message.last %}{% break %}{% endif %}{{ message.content }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for message in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
        "{% set comma = joiner() %}{% for message in messages %}{{ comma() }}{{ message.content }}{% endfor %}",
    ],
)
def test_a_template_that_looks_beyond_its_message_is_not_local(source: str) -> None:
    assert not template_of(source, END).local


def test_text_is_not_escaped_and_json_is_written_as_transformers_writes_it() -> None:
    template = template_of("{{ messages[0].content }} {{ messages | tojson }}", END)
    assert template.render(USER) == 'hi <b> [{"role": "user", "content": "hi <b>"}]'


def test_generation_marks_change_no_text() -> None:
    template = template_of("{% generation %}{{ messages[0].content }}{% endgeneration %}", END)
    assert template.render(USER) == "hi <b>"


def test_messages_that_the_template_refuses_are_a_template_error() -> None:
    template = template_of("{{ raise_exception('roles must alternate') }}", END)
    with pytest.raises(TemplateError, match=r"refuses messages of roles \[user\]: roles must alternate"):
        template.render(USER)


def test_a_template_cannot_reach_python() -> None:
    template = template_of("{{ ''.__class__.__mro__ }}", END)
    with pytest.raises(TemplateError):
        template.render(USER)


def write(folder: Path, **files: object) -> None:
    bpe("<|im_end|>", "<|x|>").save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def test_stop_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    write(
        tmp_path,
        generation_config={"eos_token_id": [267, 266]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "chat_template": LOOP},
    )
    template = ChatTemplate.load(tmp_path)
    assert template.stop_ids == (267, 266)
    assert template.decode([266]) == "<|im_end|>"


def test_a_template_may_be_in_the_tokenizer_config_under_the_name_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "{{ eos_token }}D"}]
    write(tmp_path, tokenizer_config={"eos_token": "<|im_end|>", "chat_template": named})
    assert ChatTemplate.load(tmp_path).render(USER) == "<|im_end|>D"


def test_an_agent_with_tools_gets_the_template_that_is_named_so(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(tmp_path, tokenizer_config={"eos_token": "<|im_end|>", "chat_template": named})
    assert [ChatTemplate.load(tmp_path, tools=tools).source for tools in (True, False)] == ["T", "D"]
    (tmp_path / "chat_template.jinja").write_text("file")
    assert [ChatTemplate.load(tmp_path, tools=tools).source for tools in (True, False)] == ["file", "file"]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert [ChatTemplate.load(tmp_path, tools=tools).source for tools in (True, False)] == ["tools", "file"]


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"eos_token": "<|im_end|>", "chat_template": "config"})
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path).render(USER) == "file"


def test_what_a_model_directory_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a model directory with tokenizer\.json"):
        ChatTemplate.load(tmp_path)
    write(tmp_path, tokenizer_config={"chat_template": LOOP})
    with pytest.raises(ConfigError, match="expected eos_token_id"):
        ChatTemplate.load(tmp_path)
    write(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"})
    with pytest.raises(ConfigError, match=r"expected chat_template\.jinja"):
        ChatTemplate.load(tmp_path)


def test_a_long_text_has_the_ids_of_its_parts() -> None:
    template = tiny()
    parts = ["<|user|>", "word 長 123 " * 5_000, "<|end|>"]
    assert template.encode("".join(parts)) == [i for part in parts for i in template.tokenizer.encode(part).ids]
