"""Scripted episodes are rendered and masked by the code that records real ones."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents_support import THINKING, agent_of, lookup, lookup_template, template_of

from streamrl_agents import ToolCall
from streamrl_agents.agent import Agent, load_agent
from streamrl_agents.demonstrations import play, play_many
from streamrl_agents.environments.calc import compute
from streamrl_agents.template import ChatTemplate
from streamrl_agents.vocabulary import build_tokenizer, tool_pieces, write_model_files
from streamrl_queue.errors import ConfigError, EnvironmentFailed, TemplateError


def calc(folder: Path) -> tuple[Agent, ChatTemplate]:
    agent = load_agent("streamrl_agents.environments.calc:Calc")
    write_model_files(folder, build_tokenizer(agent, ["extra"]))
    return agent, ChatTemplate.load(folder)


def texts(agent: Agent, template: ChatTemplate, sloppy: bool, count: int) -> list[str]:
    rows = play_many(agent, template, random.Random(0), sloppy, count)
    return [template.decode(ids.tolist()) for ids, _ in rows]


def final(text: str) -> str:
    return text.rpartition("<|assistant|>")[2].removesuffix("<|end|>")


def test_a_clean_demonstration_of_lookup_follows_every_reference_and_answers_right() -> None:
    for text in texts(lookup(), lookup_template(), False, 50):
        values = text.partition("<|tool|>value ")[2][:2]
        assert final(text) == f"Answer: {values}"
        assert "not found" not in text
        assert text.count("<tool_call>") in (1, 2, 3)


def test_a_sloppy_demonstration_of_lookup_mostly_gives_up_with_a_made_up_number() -> None:
    rows = texts(lookup(), lookup_template(), True, 2000)
    at_once = sum("<tool_call>" not in text for text in rows) / len(rows)
    wasted = sum("not found" in text for text in rows) / len(rows)
    assert abs(at_once - 0.6) < 0.04
    assert 0.03 < wasted < 0.12
    assert all(final(text).startswith(("Answer: ", "<tool_call>")) for text in rows)


def test_a_clean_demonstration_of_calc_is_right_and_a_sloppy_one_often_wrong(tmp_path: Path) -> None:
    agent, template = calc(tmp_path)

    def right(text: str) -> bool:
        expression = text.removeprefix("<|user|>Compute ").partition("<|end|>")[0]
        return final(text) == f"Answer: {eval(expression)}"

    assert all(right(text) for text in texts(agent, template, False, 50))
    share = np.mean([right(text) for text in texts(agent, template, True, 500)])
    assert 0.3 < share < 0.6  # 0.7 * 0.7 * 0.85, and some wrong ways that end right


@pytest.mark.parametrize(("text", "result"), [("2*3", "6"), ("-2 - -3", "1"), ("1+2+3", "error"), ("x", "error")])
def test_the_calculator_does_one_operation(text: str, result: str) -> None:
    assert compute(text) == result


def test_the_mask_is_1_exactly_on_the_scripted_turns_and_their_ends() -> None:
    ids, mask = play(lookup(), lookup_template(), random.Random(3), False)
    template = lookup_template()
    assert ids.dtype == np.int32
    assert mask.dtype == np.uint8
    runs = "".join(template.decode([i]) if m else " | " for i, m in zip(ids.tolist(), mask, strict=True))
    turns = [part.strip() for part in runs.split(" | ") if part.strip()]
    assert all(turn.endswith("<|end|>") for turn in turns)
    assert all(turn.startswith(("<tool_call>", "Answer: ")) for turn in turns)


def test_the_same_seed_gives_the_same_demonstrations() -> None:
    one, other = (play_many(lookup(), lookup_template(), random.Random(5), True, 20) for _ in range(2))
    assert [ids.tolist() for ids, _ in one] == [ids.tolist() for ids, _ in other]


def test_lookup_tasks_have_one_to_three_different_keys() -> None:
    rng = random.Random(0)
    hops = Counter(len(set(lookup().sample_task(rng)["keys"])) for _ in range(3000))
    assert sorted(hops) == [1, 2, 3]
    assert max(hops.values()) - min(hops.values()) < 200


class Scripted:
    inline = True
    turns: tuple[Any, ...] = ()

    def reset(self, task: dict[str, Any]) -> str:
        if task.get("fail"):
            raise RuntimeError("no data")
        return "go"

    def step(self) -> str:
        """Step."""
        return "on"

    def reward(self) -> float:
        return 1.0

    @staticmethod
    def task(rng: random.Random) -> dict[str, Any]:
        return {}


def scripted(turns: list[Any], task: dict[str, Any] | None = None) -> Agent:
    members = {"demonstrate": staticmethod(lambda task, rng, sloppy: iter(turns))}
    if task is not None:
        members["task"] = staticmethod(lambda rng: task)
    return agent_of(type("Scripted", (Scripted,), members))


def test_a_script_that_ends_too_early_is_named() -> None:
    with pytest.raises(EnvironmentFailed, match=r"demonstrate\(\) ended although the last turn called a tool"):
        play(scripted([ToolCall("step")]), lookup_template(), random.Random(0), False)


def test_an_environment_that_fails_under_its_script_raises_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="no data"):
        play(scripted(["x"], {"fail": 1}), lookup_template(), random.Random(0), False)


def test_a_template_that_rewrites_history_is_refused_for_warm_starts() -> None:
    template = template_of(
        THINKING.replace("message.role == 'user'", "true"), "<|im_end|>", "<|im_start|>", tool_format="hermes"
    )
    with pytest.raises(TemplateError, match="not prefix-stable at message 1"):
        play(
            scripted(["<think>a</think>" + '<tool_call>{"name": "step"}</tool_call>', "x"]),
            template,
            random.Random(0),
            False,
        )


def test_the_boilerplate_of_a_tool_call_is_one_token_on_each_side() -> None:
    tokenizer = build_tokenizer(lookup(), [])
    body = json.dumps({"name": "get", "arguments": {"key": "ab"}})
    pieces = [
        tokenizer.decode([i]) for i in tokenizer.encode(f"<tool_call>{body}</tool_call>").ids if i > 263
    ]  # behind the marks
    assert pieces == ['{"name": "get", "arguments": {"key": "', '"}}']
    assert len(tokenizer.encode("Find the value of ab").ids) == 3


def test_pieces_cover_several_parameters_numbers_and_no_parameters() -> None:
    class Env(Scripted):
        def move(self, x: int, to: str, y: float = 1.0) -> str:
            """Move."""
            return ""

    pieces = list(tool_pieces(agent_of(Env).tools))
    for arguments in ({"x": 1, "to": "a", "y": 2.5}, {"x": 1, "to": "a"}):
        text = json.dumps({"name": "move", "arguments": arguments})
        for piece in sorted(pieces, key=len, reverse=True):
            text = text.replace(piece, "·")
        assert text.strip("}") in ("·1·a·2.5·", "·1·a·", "·1·a·2.5")
    assert '{"name": "step", "arguments": {' in pieces


def test_any_text_can_be_written_and_read_back() -> None:
    tokenizer = build_tokenizer(lookup(), [])
    for text in ("héllo 語\n\t", '{"name": "get"}', "<|end|>see value <tool_call>"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_piece_that_would_not_read_back_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected pieces of ASCII text"):
        build_tokenizer(lookup(), ["né"])
