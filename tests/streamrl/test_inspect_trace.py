"""`streamrl trace`: one row's life, for people and for machines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from inspect_support import made, publish, roll_out, run_directory, tasks, trajectory, trouble, two_steps

from streamrl import cli
from streamrl.inspect.trace import coloured
from streamrl_agents.agent import load_agent
from streamrl_agents.template import ChatTemplate
from streamrl_agents.vocabulary import build_tokenizer, write_model_files
from streamrl_queue import Segment, Span, TransferQueue
from streamrl_queue.schema import Trajectory, reward_batch, trajectory_batch


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the output, with every run of blanks made one."""
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_the_life_of_a_trained_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, two_steps)
    run = run_directory(tmp_path)
    assert cli.main(["trace", str(run), "5"]) == 0
    lines = lines_of(capsys)
    assert lines[0] == "row 5 trained in step 2, lag 1"
    assert 'task {"i":1}' in lines
    assert "versions 1 (step 0) from token 2" in lines
    events = [line.split(" s ", 1)[1] for line in lines if " s " in line]
    assert [event.split(",")[0] for event in events] == [
        "born task tasks/0/1",
        "granted rollout attempt 1",
        "written rollout 6 tokens",
        "granted reward attempt 1",
        "written reward reward 1",
        "granted advantage attempt 1",
        "written advantage advantage 0.5",
        "granted learn attempt 1",
        "trained in step 2",
    ]
    assert "to worker-0." in events[1]
    assert events[1].endswith("version 2 (step 1)")
    assert events[2].startswith("written rollout 6 tokens, oldest version 1 (step 0), turns 1, status completed")


def test_an_evaluation_row_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def evaluated(queue: TransferQueue) -> None:
        await publish(queue)
        await queue.put(tasks(1), split="eval")
        await roll_out(queue, 1)
        lease = await queue.lease("reward", rows=1, wait=1)
        assert lease is not None
        await queue.write(lease, reward_batch(lease.ids, [1.0], [{}]))
        lease = await queue.lease("evaluate", rows=1, wait=1)
        assert lease is not None
        await queue.write(lease, pa.RecordBatch.from_arrays([pa.array(lease.ids, pa.uint64())], names=["row"]))

    made(tmp_path, evaluated)
    assert cli.main(["trace", str(run_directory(tmp_path)), "1"]) == 0
    assert any(line.endswith("written evaluate evaluated") for line in lines_of(capsys))


def test_why_a_row_died(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, trouble)
    run = run_directory(tmp_path, max_deliveries=2)
    assert cli.main(["trace", str(run), "1"]) == 0
    lines = lines_of(capsys)
    assert lines[0] == "row 1 dead: rollout: its process ended"
    ended = [line for line in lines if "lease ended" in line]
    assert len(ended) == 2
    assert "session: its process ended (attempt 2, worker-0." in ended[1]


def test_json_has_all_columns_and_null_for_what_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, two_steps)
    assert cli.main(["trace", str(run_directory(tmp_path)), "5", "--json"]) == 0
    life = json.loads(capsys.readouterr().out)
    assert life["columns"]["tokens"] == [0, 1, 2, 3, 4, 5]
    assert life["columns"]["logprobs"] == [None, None, -1.0, -1.0, -1.0, -1.0]
    assert (life["state"], life["step"], life["lag"]) == ("trained", 2, 1)
    assert [version["version"] for version in life["versions"]] == [1, 2]
    assert life["moments"][0]["since_birth"] == 0
    assert "stage" not in life["moments"][0]


def test_the_conversation_is_decoded_with_the_runs_own_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory(tmp_path)
    write_model_files(run / "base", build_tokenizer(load_agent("streamrl_agents.environments.lookup:Lookup")))
    template = ChatTemplate.load(run / "base")
    given, sampled = template.encode("<|user|>What is ü?<|end|><|assistant|>"), template.encode("Answer: 50<|end|>")

    async def play(queue: TransferQueue) -> None:
        await publish(queue)
        await queue.put(tasks(1))
        lease = await queue.lease("rollout", rows=1, wait=1)
        assert lease is not None
        await queue.write(lease, trajectory_batch(lease.ids, [told(given, sampled)]))

    made(tmp_path, play)
    assert cli.main(["trace", str(run), "1", "--text"]) == 0
    assert "<|user|>What is ü?<|end|><|assistant|>«Answer: 50<|end|>»" in capsys.readouterr().out
    assert cli.main(["trace", str(run), "1", "--text", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["conversation"] == [
        {"text": "<|user|>What is ü?<|end|><|assistant|>", "sampled": False},
        {"text": "Answer: 50<|end|>", "sampled": True},
    ]


def told(given: list[int], sampled: list[int]) -> Trajectory:
    n, m = len(given), len(sampled)
    return Trajectory(
        tokens=np.array(given + sampled, np.int32),
        mask=np.array([0] * n + [1] * m, np.uint8),
        logprobs=np.array([np.nan] * n + [-0.5] * m, np.float32),
        versions=(Span(n, 1, 1),),
        segments=(Segment(0, n + m),),
        turns=1,
        status="completed",
        sampling={},
    )


def test_sampled_text_has_another_colour_where_there_are_colours() -> None:
    text = coloured([("given", False), ("sampled", True)], marks=False)
    assert text.plain == "\ngivensampled"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("given", "dim"),
        ("sampled", "bold green"),
    ]


def test_a_row_that_never_was_and_text_that_is_not_there_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, trouble)
    run = run_directory(tmp_path)
    assert cli.main(["trace", str(run), "99"]) == 1
    assert "the journal has rows 1 to 3" in capsys.readouterr().err
    assert cli.main(["trace", str(run), "1", "--text"]) == 2
    assert "nothing was written to it" in capsys.readouterr().err
    assert trajectory().turns == 1
