"""Configuration: what is refused, in which words, and that what is printed can be read back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streamrl import explain, settings
from streamrl.config import RunConfig, find_file, flow_of, load_file, resolve, to_yaml
from streamrl_queue.config import QueueConfig
from streamrl_queue.errors import ConfigError

ENV = {"env": "streamrl_agents.environments.lookup:Lookup"}


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(ENV, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("queue.max_stalness=3", "unknown key queue.max_stalness; did you mean queue.max_staleness?"),
        ("max_staleness=3", "unknown key max_staleness; did you mean queue.max_staleness?"),
        ("lerner.steps=3", "unknown key lerner; did you mean learner?"),
        ("learner.stesp=3", "unknown key learner.stesp; did you mean learner.steps?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(override: str, said: str) -> None:
    assert refusal(override) == said


def test_an_option_that_the_chosen_kind_would_ignore_is_refused_naming_its_keys() -> None:
    said = refusal("algorithm.loss={kind: cispo, dual_clip: 3.0}")
    assert "algorithm.loss.dual_clip: kind: cispo has no key dual_clip and would ignore it" in said
    assert "its keys are clip, clip_high;" in said
    assert "where a file sets it, write algorithm.loss={kind: cispo} to replace the whole block" in said
    file = {**ENV, "model": {"kind": "tiny", "max_positions": 128}}
    with pytest.raises(
        ConfigError, match=r"leave max_positions out; where a file sets it, write model=\{kind: hf, path: …"
    ):
        resolve(file, ["model.kind=hf"])
    assert "tracking[0].uri: kind: tensorboard has no key uri" in refusal("tracking=[{kind: tensorboard, uri: x}]")


@pytest.mark.parametrize(
    ("overrides", "both"),
    [
        (["algorithm.correction=none"], ("algorithm.correction", "queue.max_staleness")),
        (
            ["algorithm={loss: reinforce, correction: none}", "queue={max_staleness: 0, on_stale: keep}"],
            ("algorithm.correction", "queue.on_stale"),
        ),
        (["algorithm.correction=truncated_is"], ("algorithm.loss", "algorithm.correction")),
        (["algorithm.lag=mask", "queue.max_staleness=1"], ("algorithm.lag", "queue.max_staleness")),
        (["algorithm.length={kind: soft_overlong, max_tokens: 9999, buffer_tokens: 9}"], ("length", "rollout.max_to")),
        (["tasks.group_size=1"], ("algorithm.advantage", "tasks.group_size")),
        (["learner.rows_per_step=60"], ("learner.rows_per_step", "tasks.group_size")),
        (["queue.waiting_rows=8"], ("queue.waiting_rows", "learner.rows_per_step")),
        (["rollout.max_tokens=4096"], ("rollout.max_tokens", "engine.max_tokens")),
        (["learner.min_engines=2"], ("learner.min_engines", "engine.count")),
        (["engine.max_tokens=4096"], ("engine.max_tokens", "model.max_positions")),
        (["rollout.temperature=0"], ("rollout.temperature", "tasks.group_size")),
        (["learner.transfer=nccl"], ("learner.transfer", "learner.device")),
        (["learner.device=cuda"], ("learner.transfer", "engine.device")),
        (["engine={kind: vllm, device: cuda}", "learner.device=cuda"], ("learner.transfer", "engine.kind")),
        (["engine.kind=sglang", "rollout.top_p=0.9"], ("rollout.top_p", "engine.kind")),
    ],
)
def test_a_contradiction_names_both_keys(overrides: list[str], both: tuple[str, str]) -> None:
    # The defaults of model and engine differ in length; the case under test is the only contradiction.
    said = refusal("model.max_positions=2048", *overrides)
    assert all(key in said for key in both)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("queue.max_staleness=1000001", "queue.max_staleness: expected 0 to 1000000, got 1000001"),
        ("queue.max_staleness=100000000000000000000", "queue.max_staleness: expected a number of at most 64 bits"),
        ("tool_format=herms", "tool_format: expected one of auto, deepseek, hermes, json, llama3_json, mistral, pyth"),
        ("queue.session_seconds=.nan", "queue.session_seconds: expected a finite number, got nan"),
        ("queue.rollout_seconds=.nan", "queue.rollout_seconds: expected a finite number, got nan"),
        ("queue.scoring_seconds=1e-9", "queue.scoring_seconds: expected 0.1 to 10000000, got 1e-09"),
        ("queue.scoring_seconds=.inf", "queue.scoring_seconds: expected a finite number, got inf"),
        ("queue.max_deliveries=100000000000", "queue.max_deliveries: expected 1 to 1000000, got 100000000000"),
        ("queue.waiting_rows=100000000000", "queue.waiting_rows: expected 1 to 2147483647, got 100000000000"),
        ("queue.waiting_rows=100000000000000000000000", "queue.waiting_rows: expected a number of at most 64 bits"),
        ("queue.budget_mebibytes=0", "queue.budget_mebibytes: expected 1 to 1073741824, got 0"),
        ("queue.budget_mebibytes=-5", "queue.budget_mebibytes: expected 1 to 1073741824, got -5"),
        ("supervision.drain_seconds=.nan", "supervision.drain_seconds: expected a finite number, got nan"),
        ("supervision.drain_seconds=-1", "supervision.drain_seconds: expected 0 to 10000000, got -1.0"),
        ("supervision.max_lost_share=1.5", "supervision.max_lost_share: expected 0 to 1, got 1.5"),
        ("supervision.silent_seconds=0", "supervision.silent_seconds: expected 1 to 10000000, got 0.0"),
        ("supervision.start_seconds=-1", "supervision.start_seconds: expected 0.1 to 10000000, got -1.0"),
        ("tasks.group_size=70000", "tasks.group_size: expected 1 to 65535, got 70000"),
        ("producers=100000", "producers: expected 1 to 1024, got 100000"),
        ("engine.count=0", "engine.count: expected 1 to 1024, got 0"),
        ("engine.device=tpu", "engine.device: expected cpu, cuda or cuda:0, got 'tpu'"),
        ("rollout.turn_seconds=0", "rollout.turn_seconds: expected 0.001 to 10000000, got 0.0"),
        ("learner.betas=[1.5, 0.9]", "learner.betas[0]: expected `float` < 1.0"),
        ("learner.betas=[.nan, 0.9]", "learner.betas[0]: expected a finite number, got nan"),
        ("learner.learning_rate=.inf", "learner.learning_rate: expected a finite number, got inf"),
        ("learner.device=tpu", "learner.device: expected one of cpu, cuda; got 'tpu'"),
        ("learner.transfer=ncl", "learner.transfer: expected one of auto, gloo, nccl; got 'ncl'; did you mean nccl?"),
        ("learner.ranks=5000", "learner.ranks: expected `int` <= 1024"),
        ("reward.parts={}", "reward.parts: expected at least one reward function"),
        ("reward.parts={outcom: 1}", "reward.parts: expected outcome, module:name or path/file.py:name, got 'outcom'"),
        ("reward.parts={outcome: .nan}", "reward.parts.outcome: expected a finite number, got nan"),
        ("reward.rows=0", "reward.rows: expected 1 to 2147483647, got 0"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_with_its_key_and_the_bounds(override: str, said: str) -> None:
    assert refusal(override).startswith(said)


@pytest.mark.parametrize("field", ["session_seconds", "straggler_seconds", "max_staleness"])
def test_nan_is_within_no_bounds_where_no_file_is_read_either(field: str) -> None:
    with pytest.raises(ConfigError, match=f"queue.{field}: expected .* got nan"):
        QueueConfig(**{"partial_members": 2, "straggler_seconds": 1.0, field: float("nan")})


def test_asynchrony_without_a_correction_is_allowed_only_when_nothing_is_stale() -> None:
    fresh = ["model.max_positions=2048", "queue.max_staleness=0"]
    config = resolve(ENV, [*fresh, "algorithm.loss=reinforce", "algorithm.correction=none"])
    assert config.queue.max_staleness == 0


def test_a_row_alone_in_its_group_is_handed_on_where_nothing_is_compared() -> None:
    alone = ["model.max_positions=2048", "tasks.group_size=1", "algorithm.advantage=reinforce_plus_plus"]
    stages = {stage.name: stage for stage in flow_of(resolve(ENV, alone)).stages}
    assert stages["advantage"].min_members == 1
    stages = {stage.name: stage for stage in flow_of(resolve(ENV, alone[:1])).stages}
    assert stages["advantage"].min_members == 2


def test_a_piece_is_chosen_on_or_off() -> None:
    said = ["model.max_positions=2048", "algorithm.rejection={kind: geometric, high: 1.1}", "algorithm.lag=mask"]
    config = resolve(ENV, said)
    assert settings.plain(config)["algorithm"]["rejection"] == {"kind": "geometric", "low": 0.99, "high": 1.1}
    assert resolve(settings.plain(config), ["algorithm.rejection=null"]).algorithm.rejection is None


def test_a_value_of_the_wrong_type_is_refused_with_its_key() -> None:
    assert refusal("learner.steps=many") == "learner.steps: expected `int`, got `str`"


def test_an_unknown_kind_is_refused_with_the_kinds_there_are() -> None:
    assert "expected one of ppo_clip, reinforce, gspo, cispo" in refusal("algorithm.loss=ppo")


def test_scientific_notation_is_a_number() -> None:
    assert settings.parse_yaml("2e-3", "here") == 0.002
    assert settings.parse_yaml("1E5", "here") == 100000.0


def test_a_key_that_appears_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"file\.yaml: key 'steps' appears twice \(line 2\)"):
        settings.parse_yaml("steps: 1\nsteps: 2\n", "file.yaml")


@pytest.mark.parametrize("override", ["steps", "=3", "learner..steps=3"])
def test_an_override_that_is_none_is_refused_with_an_example(override: str) -> None:
    assert "expected key.sub=value" in refusal(override)


def test_an_override_through_a_plain_value_says_what_to_write() -> None:
    assert "write env={...}" in refusal("env.kind=x")


def test_a_plain_string_chooses_a_kind_with_its_defaults() -> None:
    said = ["model.max_positions=2048", "algorithm.loss=reinforce", "algorithm.correction=truncated_is"]
    corrected = settings.plain(resolve(ENV, said))["algorithm"]["correction"]
    assert corrected == {"kind": "truncated_is", "level": "token", "cap": 2.0}


@pytest.mark.parametrize("name", ["demo", "calc"])
def test_shipped_configurations_are_valid_and_survive_a_round_trip(name: str) -> None:
    config = load_file(find_file(name))
    assert config.name == name
    assert settings.build(RunConfig, settings.parse_yaml(to_yaml(config), "round trip")) == config


def test_without_a_name_the_demo_is_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_file(None).name == "demo.yaml"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").write_text("env: x:Y\n")
    assert find_file(None) == Path("configs/demo.yaml")


def test_a_missing_file_is_refused_with_the_names_of_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"no such file; shipped with streamrl: calc, demo"):
        find_file("nowhere.yaml")


def test_every_key_is_explained_once_for_each_kind_that_it_means_something_else_for() -> None:
    found = list(explain.keys(RunConfig))
    assert [key.path for key in found if not key.meaning] == []
    assert len({(key.path, key.kind) for key in found}) == len(found)
    kinds = {key.path: key.kind for key in found}
    assert kinds["algorithm.normalise"] == kinds["algorithm.advantage.bound"] == ""
    assert kinds["algorithm.loss.dual_clip"] == "kind: ppo_clip"
    assert kinds["tracking[].uri"] == "kind: mlflow"


def test_one_key_is_explained_with_its_value_in_the_file_when_that_is_not_the_default() -> None:
    values = settings.plain(resolve({**ENV, "learner": {"steps": 7}, "model": {"max_positions": 2048}}))
    told = explain.explanation(RunConfig, "learner.steps", values=values, source="my.yaml")
    assert told == "learner.steps: int (default 40, my.yaml: 7)\n    Optimiser steps of the run."
    told = explain.explanation(RunConfig, "model.layers", values=values)
    assert told.startswith("model.layers: int (default 2)  [kind: tiny]\n")
    with pytest.raises(ConfigError, match=r"there is no key learner\.stps; did you mean learner\.steps\?"):
        explain.explanation(RunConfig, "learner.stps")


def test_overrides_may_be_values_by_dotted_key() -> None:
    given = {"model.max_positions": 2048, "learner.steps": 7, "tracking": [{"kind": "tensorboard"}]}
    config = resolve(ENV, given)
    assert (config.learner.steps, len(config.tracking)) == (7, 1)
    assert resolve(settings.plain(config)) == config
    with pytest.raises(ConfigError, match=r"override env\.kind: env is .* and has no key kind"):
        resolve(ENV, {"env.kind": 1})
    with pytest.raises(ConfigError, match="overrides: expected a list of"):
        resolve(ENV, "learner.steps=3")


def test_the_differences_of_two_configurations_are_found_by_key() -> None:
    a = {"x": 1, "learner": {"steps": 3, "rate": 1}}
    b = {"x": 1, "learner": {"steps": 4, "rate": 2}}
    assert list(settings.differences(a, b)) == [("learner.steps", 3, 4), ("learner.rate", 1, 2)]
    assert list(settings.differences(a, dict(a))) == []
    assert list(settings.differences({}, {"only": 1})) == [("only", None, 1)]


def test_queue_and_configuration_import_without_torch() -> None:
    code = (
        "import sys, streamrl.config, streamrl_queue, streamrl_agents; "
        "print([m for m in ('torch', 'transformers', 'ray', 'vllm', 'tokenizers', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
