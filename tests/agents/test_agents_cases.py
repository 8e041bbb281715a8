"""Masks, flags, units and texts that other systems got wrong; the cases that no other file of this folder covers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import trio
from agents_families import family_template
from agents_support import Cut, Script, Turn, agent_of, call, play, sampled, tiny

from streamrl_agents.config import Limits
from streamrl_agents.conversation import Conversation
from streamrl_agents.episode import run_episode
from streamrl_agents.formats import FORMATS
from streamrl_agents.parsing import ToolCall
from streamrl_queue.schema import Trajectory, trajectory_batch


class Echo:
    inline = True

    def reset(self, task: dict[str, Any]) -> str:
        return "go"

    def echo(self, text: str) -> str:
        """Say it again."""
        return text

    def reward(self, answer: str) -> float:
        return float(answer == "done")


def test_the_mask_comes_from_who_wrote_an_id_and_never_from_its_value() -> None:
    """The pad token in a prompt, in a turn and as the end of a turn: 1 exactly where it was sampled."""
    template = tiny()
    pad = template.stop_ids[0]  # as where pad_token is eos_token

    async def padded(tokens: Any, max_tokens: int) -> Turn:
        ids = [pad, *template.encode("done"), pad, pad]
        return Turn(np.asarray(ids, np.int32), np.full(len(ids), -1, np.float32), finish_reason="length")

    trajectory = play(Echo, generate=padded, template=template)
    prompt = template.encode("<|user|>go<|end|><|assistant|>")
    assert trajectory.tokens[: len(prompt)].tolist() == prompt
    assert trajectory.mask.tolist() == [0] * len(prompt) + [1] * (len(trajectory.tokens) - len(prompt))
    assert trajectory.tokens[trajectory.mask == 1].tolist() == [pad, *template.encode("done"), pad, pad]


def test_the_metrics_of_a_truncated_row_count_its_ids() -> None:
    template = tiny()
    trajectory = play(Echo, call("echo", text="x"), Cut("half an ans"), template=template)
    assert trajectory.status == "truncated_length"
    assert trajectory.metrics["tokens_sampled"] == len(sampled(trajectory)) == trajectory.mask.sum()
    assert trajectory.metrics["turns"] == trajectory.turns == 2


def test_flags_lie_on_their_row_whatever_happens_to_its_neighbours() -> None:
    template, agent = tiny(), agent_of(Echo)
    scripts = {0: ["done"], 1: [Cut("hal")], 2: [call("echo", text="x"), "done"], 3: ["wrong"], 4: [call("echo")] * 3}
    ended: dict[int, Trajectory] = {}

    async def one(row: int, texts: list[str]) -> None:
        limits = Limits(max_turns=2)
        generate = Script(template, *texts)
        ended[row] = await run_episode(agent, {}, generate=generate, template=template, limits=limits, sampling={})

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for row, texts in scripts.items():
                nursery.start_soon(one, row, texts)

    trio.run(main)
    batch = trajectory_batch(list(ended), list(ended.values())).to_pydict()
    rows = dict(zip(batch["row"], zip(batch["status"], batch["outcome"], batch["turns"], strict=True), strict=True))
    assert rows == {
        0: ("completed", 1.0, 1),
        1: ("truncated_length", None, 1),
        2: ("completed", 1.0, 2),
        3: ("completed", 0.0, 1),
        4: ("truncated_turns", None, 2),
    }
    for row, tokens, mask in zip(batch["row"], batch["tokens"], batch["mask"], strict=True):
        assert tokens == ended[row].tokens.tolist()
        assert mask == ended[row].mask.tolist()


def test_every_limit_names_its_unit() -> None:
    for field in Limits.__struct_fields__:
        assert re.search(r"_(turns|tokens|characters|seconds)$", field), field


@pytest.mark.parametrize("text", ["長" * 9, "é" * 9, "😀" * 9])
def test_a_limit_in_characters_counts_code_points_and_cuts_none_in_half(text: str) -> None:
    trajectory = play(Echo, call("echo", text=text), "done", max_tool_characters=4)
    assert f"<|tool|>[5 characters cut]{text[:4]}<|end|>" in tiny().decode(trajectory.tokens.tolist())


def test_half_a_character_in_the_text_of_a_tool_does_not_end_the_episode() -> None:
    class Names(Echo):
        def read(self) -> str:
            """Read."""
            return "caf\udce9.txt"  # as os.listdir gives a name that is no UTF-8

    trajectory = play(Names, call("read"), "done")
    assert (trajectory.status, trajectory.outcome) == ("completed", 1.0)
    assert "<|tool|>caf?.txt<|end|>" in tiny().decode(trajectory.tokens.tolist())


def test_half_a_character_in_an_argument_goes_back_to_the_model() -> None:
    broken = '<tool_call>{"name": "echo", "arguments": {"text": "\\ud83d"}}</tool_call>'
    trajectory = play(Echo, broken, "done")
    assert (trajectory.status, trajectory.metrics["parse_errors"]) == ("completed", 1.0)
    assert "half a character" in tiny().decode(trajectory.tokens.tolist())


@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "deepseek", "mistral"])
def test_arguments_that_are_no_object_are_answered_and_the_episode_lives(name: str) -> None:
    template = family_template(name)
    form = template.needed_tool_format("Echo")
    good = form.render(ToolCall("echo", {"text": "x"}))
    broken = [good.replace('{"text": "x"}', value) for value in ("[1]", "null", "3")]
    trajectory = play(Echo, *broken, good, "done", template=template)
    text = template.decode(trajectory.tokens.tolist())
    assert (trajectory.status, trajectory.outcome) == ("completed", 1.0)
    assert (trajectory.metrics["parse_errors"], trajectory.metrics["tool_calls"]) == (3.0, 1.0)
    for kind in ("array", "null", "int"):
        assert f"expected object, got {kind}" in text


def test_a_call_that_the_template_closes_is_not_executed_when_the_model_did_not() -> None:
    """The end of a turn that was cut would be added by the template; the call in it is still half a call."""
    template = family_template("qwen2.5")
    whole = FORMATS["hermes"].render(ToolCall("echo", {"text": "x"}))
    trajectory = play(Echo, Cut(whole), template=template)
    assert (trajectory.status, trajectory.metrics["tool_calls"]) == ("truncated_length", 0.0)
    assert sampled(trajectory) == template.encode(whole)


def test_a_new_conversation_has_nothing_of_the_one_before() -> None:
    template = family_template("mistral")
    for _ in range(2):
        conversation = Conversation(template)
        assert (len(conversation), conversation.turns, conversation.forks, conversation.messages) == (0, 0, 0, [])
        conversation.add({"role": "user", "content": "go"})
        conversation.prompt()
        conversation.sample(np.asarray([template.end_id], np.int32), np.zeros(1, np.float32))
        conversation.call([ToolCall("echo")])
        assert conversation.messages[-1]["tool_calls"][0]["id"] == "000000000"
