"""An episode that fails is data; what is not its own failure is raised."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import trio
from agents_support import (
    Cut,
    Script,
    Turn,
    agent_of,
    call,
    ids_of,
    jumping,
    lookup,
    lookup_template,
    play,
    sampled,
    thinking,
    tiny,
)

from streamrl_agents.calling import Caller
from streamrl_agents.config import Limits
from streamrl_agents.episode import run_episode
from streamrl_queue.errors import ConfigError, EngineError, EnvironmentFailed, SchemaError
from streamrl_queue.schema import Span

TASK = {"keys": ["ab", "cd"], "value": 42}
RIGHT = (call("get", key="ab"), call("get", key="cd"), "Answer: 42")


class Bench:
    """Tools that misbehave in every way."""

    inline = True
    closed = 0

    def reset(self, task: dict[str, Any]) -> str:
        if "reset" in task:
            raise RuntimeError("no database")
        return "go"

    def fail(self) -> str:
        """Fail."""
        raise ValueError("broken")

    async def hang(self) -> None:
        """Hang."""
        await trio.sleep_forever()

    def add(self, amount: int) -> int:
        """Add."""
        return amount + 1

    def reward(self, messages: list[dict[str, Any]], answer: str) -> float:
        if answer == "boom":
            raise RuntimeError("cannot judge")
        return float(len(messages))

    def close(self) -> None:
        Bench.closed += 1


def test_a_whole_episode_is_one_exact_row() -> None:
    script = Script(lookup_template(), *RIGHT)
    trajectory = play(lookup(), task=TASK, template=lookup_template(), generate=script)
    assert (trajectory.status, trajectory.outcome, trajectory.turns) == ("completed", 1.0, 3)
    assert sampled(trajectory) == ids_of(script.turns)
    assert lookup_template().decode(trajectory.tokens.tolist()) == (
        "<|user|>Find the value of ab<|end|><|assistant|>"
        '<tool_call>{"name": "get", "arguments": {"key": "ab"}}</tool_call><|end|><|tool|>see cd<|end|><|assistant|>'
        '<tool_call>{"name": "get", "arguments": {"key": "cd"}}</tool_call><|end|><|tool|>value 42<|end|><|assistant|>'
        "Answer: 42<|end|>"
    )
    assert trajectory.metrics == {
        "turns": 3.0,
        "tool_calls": 2.0,
        "tool_errors": 0.0,
        "parse_errors": 0.0,
        "tool_texts_cut": 0.0,
        "tokens_sampled": float(len(sampled(trajectory))),
        "forks": 0.0,
    }
    assert trajectory.sampling == {"temperature": 1.0}


def test_every_prompt_is_the_ids_so_far() -> None:
    script = Script(lookup_template(), *RIGHT)
    trajectory = play(lookup(), task=TASK, template=lookup_template(), generate=script)
    for prompt in script.prompts:
        assert prompt == trajectory.tokens[: len(prompt)].tolist()


def test_a_tool_that_raises_is_read_by_the_model_and_counted() -> None:
    template = tiny()
    script = Script(template, call("fail"), "done")
    trajectory = play(Bench, generate=script, template=template)
    assert trajectory.status == "completed"
    assert "<|tool|>error: ValueError: broken<|end|>" in template.decode(trajectory.tokens.tolist())
    assert (trajectory.metrics["tool_errors"], trajectory.metrics["tool_calls"]) == (1.0, 1.0)
    assert trajectory.error == "tool fail: ValueError: broken"


def test_malformed_calls_are_answered_and_the_episode_lives() -> None:
    template = tiny()
    broken = '<tool_call>{"name": "add", "arguments": {"a": 1,,}}</tool_call>'
    array = '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'
    script = Script(template, broken, array, call("add", amount="x"), call("sub"), call("add", amount=1), "done")
    trajectory = play(Bench, generate=script, template=template)
    text = template.decode(trajectory.tokens.tolist())
    assert trajectory.status == "completed"
    assert "<|tool|>error: tool call not understood: not valid JSON" in text
    assert "<|tool|>error: tool call not understood: expected object, got array" in text
    assert "<|tool|>error: add: expected int, got str" in text
    assert "<|tool|>error: no tool named sub" in text
    assert "<|tool|>2<|end|>" in text
    assert (trajectory.metrics["parse_errors"], trajectory.metrics["tool_calls"]) == (4.0, 1.0)


def test_several_calls_in_a_turn_are_all_answered_in_order() -> None:
    template = tiny()
    script = Script(template, call("add", amount=1) + call("add", amount=5), "done")
    trajectory = play(Bench, generate=script, template=template)
    assert "<|tool|>2<|end|><|tool|>6<|end|><|assistant|>" in template.decode(trajectory.tokens.tolist())


def test_an_environment_that_raises_ends_its_row_as_error_env_with_the_traceback() -> None:
    before = Bench.closed
    trajectory = play(Bench, task={"reset": 1})
    assert (trajectory.status, trajectory.outcome) == ("error_env", None)
    assert "RuntimeError: no database" in str(trajectory.error)
    assert "in reset" in str(trajectory.error)
    assert Bench.closed == before + 1


def test_a_reward_that_raises_is_an_error_and_never_0() -> None:
    trajectory = play(Bench, "boom")
    assert (trajectory.status, trajectory.outcome) == ("error_env", None)
    assert "cannot judge" in str(trajectory.error)
    assert len(sampled(trajectory)) == 5


def test_a_truncated_turn_is_never_executed() -> None:
    template = tiny()
    script = Script(template, Cut(call("add", amount=1)))
    trajectory = play(Bench, generate=script, template=template)
    assert (trajectory.status, trajectory.outcome) == ("truncated_length", None)
    assert trajectory.metrics["tool_calls"] == 0.0
    assert sampled(trajectory) == script.turns[0].tokens.tolist()


def test_the_status_of_the_last_turn_wins() -> None:
    trajectory = play(Bench, call("add", amount=1), Cut("half an ans"))
    assert (trajectory.status, trajectory.turns) == ("truncated_length", 2)


def test_a_turn_beyond_its_token_limit_is_truncated_length_and_its_ids_are_not_edited() -> None:
    template = tiny()
    script = Script(template, "a longer answer")
    trajectory = play(Bench, generate=script, template=template, max_turn_tokens=4)
    assert trajectory.status == "truncated_length"
    assert sampled(trajectory) == template.encode("a longer answer")[:4]
    assert trajectory.tokens[-1] != template.stop_ids[0]


def test_a_row_never_holds_more_than_max_tokens() -> None:
    for max_tokens in range(1, 60):
        trajectory = play(Bench, call("add", amount=1), "done", max_tokens=max_tokens)
        assert len(trajectory.tokens) <= max_tokens
        assert trajectory.status in ("truncated_prompt", "truncated_length", "completed")


def test_a_first_prompt_that_does_not_fit_is_truncated_prompt() -> None:
    trajectory = play(Bench, max_tokens=4)
    assert (trajectory.status, len(trajectory.tokens), trajectory.turns) == ("truncated_prompt", 0, 0)


def test_a_tool_result_that_does_not_fit_is_truncated_length() -> None:
    class Long(Bench):
        def read(self) -> str:
            """Read."""
            return "x" * 1000

    trajectory = play(Long, call("read"), max_tokens=200)
    assert (trajectory.status, trajectory.turns) == ("truncated_length", 1)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("x" * 192 + "Result 9", "[180 characters cut]xxxxxxxxxxxxResult 9"),
        ("長" * 21 + "い", "[2 characters cut]" + "長" * 19 + "い"),
    ],
)
def test_a_tool_text_that_is_too_long_loses_its_beginning_and_says_so(text: str, kept: str) -> None:
    class Long(Bench):
        def read(self) -> str:
            """Read."""
            return text

    trajectory = play(Long, call("read"), "done", max_tool_characters=20)
    assert trajectory.status == "completed"
    assert f"<|tool|>{kept}<|end|>" in tiny().decode(trajectory.tokens.tolist())
    assert trajectory.metrics["tool_texts_cut"] == 1.0


class Spoken:
    """What was encoded, and in which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.template = tiny()
        self.texts: list[str] = []
        self.threads: set[threading.Thread] = set()
        encode = self.template.encode

        def spy(text: str) -> list[int]:
            self.texts.append(text)
            self.threads.add(threading.current_thread())
            return encode(text)

        monkeypatch.setattr(self.template, "encode", spy)


def test_a_prompt_that_can_never_fit_is_refused_without_encoding_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Huge(Bench):
        def reset(self, task: dict[str, Any]) -> str:
            return "x" * 5_000_000

    spoken = Spoken(monkeypatch)
    trajectory = play(Huge, template=spoken.template)
    assert (trajectory.status, len(trajectory.tokens)) == ("truncated_prompt", 0)
    assert "the prompt adds 5000" in str(trajectory.error)
    assert spoken.texts == []


def test_a_huge_tool_text_is_cut_before_anything_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Huge(Bench):
        def read(self) -> str:
            """Read."""
            return "x" * 5_000_000 + "Result 9"

    spoken = Spoken(monkeypatch)
    trajectory = play(Huge, call("read"), "done", template=spoken.template, max_tokens=20_000)
    assert trajectory.status == "completed"
    assert max(map(len, spoken.texts)) < 17_000
    assert "Result 9<|end|>" in tiny().decode(trajectory.tokens.tolist())


def test_long_texts_are_encoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Long(Bench):
        def reset(self, task: dict[str, Any]) -> str:
            return "x" * task["characters"]

    async def stop(tokens: Any, max_tokens: int) -> Turn:
        return Turn(np.asarray([spoken.template.stop_ids[0]], np.int32), np.zeros(1, np.float32))

    for characters, here in ((100, True), (20_000, False)):
        spoken = Spoken(monkeypatch)
        task = {"characters": characters}
        trajectory = play(Long, task=task, template=spoken.template, generate=stop, max_tokens=30_000)
        assert trajectory.status == "completed"
        assert (threading.main_thread() in spoken.threads) is here


def test_the_error_of_a_tool_is_cut_in_its_row() -> None:
    class Loud(Bench):
        def shout(self) -> str:
            """Shout."""
            raise RuntimeError("x" * 100_000 + " the reason")

    trajectory = play(Loud, call("shout"), "done", max_tokens=30_000)
    assert len(str(trajectory.error)) < 4100
    assert str(trajectory.error).endswith("the reason")


def test_too_many_turns_are_truncated_turns_and_the_last_call_is_not_executed() -> None:
    trajectory = play(Bench, *[call("add", amount=1)] * 3, max_turns=3)
    assert (trajectory.status, trajectory.turns, trajectory.outcome) == ("truncated_turns", 3, None)
    assert trajectory.metrics["tool_calls"] == 2.0


def test_an_episode_past_its_deadline_is_error_timeout() -> None:
    trajectory = play(Bench, call("hang"), tool_seconds=100, episode_seconds=50, clock=jumping())
    assert trajectory.status == "error_timeout"
    assert "50 s (episode_seconds)" in str(trajectory.error)
    assert len(sampled(trajectory)) > 0


def test_a_slow_asynchronous_tool_is_stopped_and_the_episode_goes_on() -> None:
    trajectory = play(Bench, call("hang"), "done", tool_seconds=10, clock=jumping())
    assert (trajectory.status, trajectory.metrics["tool_errors"]) == ("completed", 1.0)


@pytest.mark.parametrize("method", ["__init__", "reset", "reward"])
def test_a_method_past_the_tool_deadline_is_error_timeout_and_is_named(method: str) -> None:
    class Slow:
        inline = True

        async def reset(self, task: dict[str, Any]) -> str:
            if method == "reset":
                await trio.sleep_forever()
            return "go"

        async def reward(self) -> float:
            return await trio.sleep_forever()

    async def build() -> None:
        await trio.sleep_forever()

    agent = agent_of(Slow)
    if method == "__init__":
        agent._kind = build  # type: ignore[attr-defined]
    trajectory = play(agent, "done", tool_seconds=3, episode_seconds=600, clock=jumping())
    assert (trajectory.status, trajectory.outcome) == ("error_timeout", None)
    assert trajectory.error == f"Slow.{method} took longer than 3 s (tool_seconds)"


def test_a_thread_that_hangs_in_reset_costs_only_its_episode() -> None:
    leave = threading.Event()

    class Stuck(Bench):
        inline = False

        def reset(self, task: dict[str, Any]) -> str:
            leave.wait()
            return "go"

    try:
        trajectory = play(Stuck, tool_seconds=0.05)
    finally:
        leave.set()
    assert (trajectory.status, trajectory.error) == (
        "error_timeout",
        "Stuck.reset took longer than 0.05 s (tool_seconds)",
    )


class Quits(Bench):
    """Raises in every method what would end a process."""

    def __init__(self, place: str = "", error: type[BaseException] = SystemExit) -> None:
        self.place, self.error = place, error

    def reset(self, task: dict[str, Any]) -> str:
        self.place = task["place"]
        self.error = {"exit": SystemExit, "interrupt": KeyboardInterrupt, "own": Stop}[task["error"]]
        return self._maybe("reset") or "go"

    def work(self) -> str:
        """Work."""
        return self._maybe("work") or "worked"

    def reward(self) -> float:  # type: ignore[override]
        self._maybe("reward")
        return 1.0

    def _maybe(self, place: str) -> None:
        if place == self.place:
            raise self.error(2)


class Stop(BaseException):
    pass


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(
    ("error", "text"),
    [("exit", "SystemExit(2)"), ("interrupt", "KeyboardInterrupt(2)"), ("own", "Stop(2)")],
)
def test_what_would_end_the_process_ends_its_episode_alone(error: str, text: str, inline: bool) -> None:
    class Here(Quits):
        pass

    Here.inline = inline
    for place in ("reset", "reward"):
        trajectory = play(Here, call("work"), "done", task={"place": place, "error": error})
        assert (trajectory.status, trajectory.outcome) == ("error_env", None)
        assert f"EnvironmentFailed: raised {text}" in str(trajectory.error)
    trajectory = play(Here, call("work"), "done", task={"place": "work", "error": error})
    assert (trajectory.status, trajectory.metrics["tool_errors"]) == ("completed", 1.0)
    assert f"error: EnvironmentFailed: raised {text}<|end|>" in tiny().decode(trajectory.tokens.tolist())


def test_an_agent_function_cannot_end_the_process() -> None:
    async def quits(task: dict[str, Any], chat: Any) -> float:
        raise SystemExit(3)

    trajectory = play(quits)
    assert trajectory.status == "error_env"
    assert "raised SystemExit(3)" in str(trajectory.error)


def test_an_exit_during_cancellation_is_contained_and_the_cancellation_passes() -> None:
    async def untidy(task: dict[str, Any], chat: Any) -> float:
        async def child() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise SystemExit(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
            await trio.sleep_forever()
        return 1.0

    trajectory = play(untidy, episode_seconds=5, clock=jumping())
    assert trajectory.status == "error_env"
    assert "SystemExit(1)" in str(trajectory.error)

    async def stopped() -> bool:
        with pytest.raises(ExceptionGroup) as caught, trio.move_on_after(1) as scope:
            await Caller().call(untidy, {}, None)
        assert caught.group_contains(EnvironmentFailed, match=r"SystemExit\(1\)")
        return scope.cancelled_caught

    assert trio.run(stopped, clock=jumping())


def test_a_turn_that_never_comes_is_error_timeout_and_says_for_what_it_waited() -> None:
    async def never(tokens: Any, max_tokens: int) -> Turn:
        return await trio.sleep_forever()

    trajectory = play(Bench, generate=never, turn_seconds=7, clock=jumping())
    assert trajectory.status == "error_timeout"
    assert trajectory.error == "turn 1: waited 7 s for generate; nothing came (turn_seconds)"


def test_a_synchronous_tool_that_cannot_be_stopped_ends_the_episode_as_error_tool() -> None:
    release = threading.Event()

    class Stuck:
        def reset(self, task: dict[str, Any]) -> str:
            return "go"

        def wait(self) -> None:
            """Wait."""
            release.wait(20)

        def reward(self) -> float:
            return 1.0

    try:
        trajectory = play(Stuck, call("wait"), tool_seconds=0.05)
    finally:
        release.set()
    assert trajectory.status == "error_tool"
    assert "wait took longer than 0.05 s" in str(trajectory.error)


def test_synchronous_methods_run_beside_the_event_loop_unless_they_are_inline() -> None:
    class Where:
        def reset(self, task: dict[str, Any]) -> str:
            self.thread = threading.get_ident()
            return "go"

        def reward(self) -> float:
            return float(self.thread == threading.main_thread().ident)

    class Inline(Where):
        inline = True

    assert play(Where, "ok").outcome == 0.0
    assert play(Inline, "ok").outcome == 1.0


def test_an_error_of_the_engine_is_raised_and_never_blamed_on_the_environment() -> None:
    async def broken(tokens: Any, max_tokens: int) -> Turn:
        raise EngineError("engine-0 vanished")

    async def careless(task: dict[str, Any], chat: Any) -> float:
        try:
            await chat.say("go")
        except Exception as error:
            raise ValueError("hidden") from error
        return 1.0

    for agent in (Bench, careless):
        with pytest.raises(EngineError, match="engine-0 vanished"):
            play(agent, generate=broken)


def test_a_turn_that_contradicts_itself_is_the_engines_fault() -> None:
    async def uneven(tokens: Any, max_tokens: int) -> Turn:
        return Turn(np.asarray([1, 2], np.int32), np.zeros(1, np.float32))

    with pytest.raises(SchemaError, match="got 1 for 2"):
        play(Bench, generate=uneven)


def test_code_that_fails_while_its_deadline_stops_it_is_still_data() -> None:
    async def untidy(task: dict[str, Any], chat: Any) -> float:
        async def child() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("in the clean-up")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
            await trio.sleep_forever()
        return 1.0

    trajectory = play(untidy, episode_seconds=5, clock=jumping())
    assert (trajectory.status, trajectory.outcome) == ("error_env", None)
    assert "in the clean-up" in str(trajectory.error)


def test_cancellation_passes_through_and_the_environment_is_closed() -> None:
    template, before = tiny(), Bench.closed

    async def never(tokens: Any, max_tokens: int) -> Turn:
        return await trio.sleep_forever()

    async def main() -> bool:
        with trio.move_on_after(1) as scope:
            await run_episode(agent_of(Bench), {}, generate=never, template=template, limits=Limits(), sampling={})
        return scope.cancelled_caught

    assert trio.run(main, clock=jumping())
    assert Bench.closed == before + 1


def test_an_aborted_turn_keeps_its_tokens() -> None:
    async def aborted(tokens: Any, max_tokens: int) -> Turn:
        return Turn(np.asarray([1, 2], np.int32), np.zeros(2, np.float32), (Span(0, 3, 3),), "aborted")

    trajectory = play(Bench, generate=aborted)
    assert (trajectory.status, sampled(trajectory)) == ("aborted", [1, 2])


def test_an_attempt_owns_its_arrays_and_the_next_one_starts_empty() -> None:
    agent, template = agent_of(Bench), tiny()
    first = play(agent, Cut("half"), template=template)
    second = play(agent, "whole", template=template)
    assert template.decode(sampled(second)) == "whole<|end|>"
    assert not np.shares_memory(first.tokens, second.tokens)
    assert template.decode(sampled(first)) == "half"


def test_an_environment_that_is_done_asks_for_no_further_turn() -> None:
    wrong = [call("get", key="zz")] * 9
    trajectory = play(lookup(), *wrong, task=TASK, template=lookup_template(), max_turns=9)
    assert (trajectory.status, trajectory.turns, trajectory.outcome) == ("completed", 5, 0.0)


def test_an_agent_function_drives_the_conversation() -> None:
    async def guess(task: dict[str, Any], chat: Any) -> float:
        reply = await chat.say([{"role": "system", "content": "be brief"}, {"role": "user", "content": "guess"}])
        while reply.text != str(task["secret"]):
            reply = await chat.say("no")
        return 1.0 / reply.text.count("3")

    trajectory = play(guess, "1", "2", "3", task={"secret": 3})
    assert (trajectory.status, trajectory.outcome, trajectory.turns) == ("completed", 1.0, 3)


def test_an_agent_function_answers_tool_calls_itself() -> None:
    async def agent(task: dict[str, Any], chat: Any) -> float:
        reply = await chat.say("go")
        with pytest.raises(ValueError, match="expected 2, one for each tool call, got 1"):
            await chat.tool_results(["a"])
        assert [c.name for c in reply.tool_calls] == ["a", "b"]
        return float((await chat.tool_results(["x", "y"])).text)

    assert play(agent, call("a") + call("b"), "7").outcome == 7.0


def test_a_limit_cannot_be_hidden_by_catching_it() -> None:
    async def stubborn(task: dict[str, Any], chat: Any) -> float:
        for _ in range(5):
            try:
                await chat.say("again")
            except Exception:
                continue
        return 1.0

    trajectory = play(stubborn, "a", "b", max_turns=2)
    assert (trajectory.status, trajectory.turns) == ("truncated_turns", 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "RewardError: reward: expected a finite float, got nan"),
        (float("inf"), "RewardError: reward: expected a finite float, got inf"),
        ("1", "RewardError: reward: expected a finite float, got '1'"),
        (True, "RewardError: reward: expected a finite float, got True"),
        (np.True_, "RewardError: reward: expected a finite float, got np.True_"),
        (None, "expected a number, or numbers by name; got None"),
        (1e308, "RewardError: reward: expected a float from -1e+06 to 1e+06, got 1e+308"),
        (-(10**400), "RewardError: reward: expected a float from -1e+06 to 1e+06, got -1000"),
        ({"right": False}, "RewardError: reward right: expected a finite float, got False"),
        ({"a": 1e6, "b": 1e6}, "RewardError: reward, the sum of its parts: expected a float from -1e+06 to 1e+06"),
    ],
)
def test_a_reward_that_nothing_could_be_learned_from_is_error_env(value: Any, text: str) -> None:
    class Bad(Bench):
        def reward(self) -> Any:  # type: ignore[override]
            return value

    trajectory = play(Bad, "ok")
    assert (trajectory.status, trajectory.outcome) == ("error_env", None)
    assert text in str(trajectory.error)


def test_a_reward_may_be_a_number_of_numpy() -> None:
    class Numpy(Bench):
        def reward(self) -> Any:  # type: ignore[override]
            return np.float32(0.5)

    assert play(Numpy, "ok").outcome == 0.5


def test_named_rewards_are_summed_and_kept_apart() -> None:
    class Parts(Bench):
        def reward(self) -> dict[str, float]:  # type: ignore[override]
            return {"right": 1.0, "short": 0.25}

    trajectory = play(Parts, "ok")
    assert trajectory.outcome == 1.25
    assert (trajectory.metrics["reward/right"], trajectory.metrics["reward/short"]) == (1.0, 0.25)


def test_a_rewritten_history_forks_the_row_and_is_counted() -> None:
    async def two(task: dict[str, Any], chat: Any) -> float:
        await chat.say("one")
        await chat.say("two")
        return 0.0

    trajectory = play(two, "<think>a</think>b", "c", template=thinking())
    assert (len(trajectory.segments), trajectory.metrics["forks"], trajectory.status) == (2, 1.0, "completed")


def test_a_traceback_is_cut_at_its_beginning() -> None:
    class Loud(Bench):
        def reset(self, task: dict[str, Any]) -> str:
            raise RuntimeError("x" * 9000 + " the reason")

    error = str(play(Loud).error)
    assert len(error) < 4100
    assert error.startswith("[…]")
    assert error.rstrip().endswith("the reason")


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_turns: expected a number above 0, got 0"):
        Limits(max_turns=0)


def test_an_episode_tells_which_tool_or_method_of_its_environment_runs() -> None:
    told: list[str] = []

    async def main() -> None:
        await run_episode(
            lookup(),
            TASK,
            generate=Script(lookup_template(), *RIGHT),
            template=lookup_template(),
            limits=Limits(),
            sampling={"temperature": 1.0},
            doing=told.append,
        )

    trio.run(main)
    assert told == ["Lookup.__init__", "Lookup.reset", "tool `get`", "tool `get`", "Lookup.reward"]
