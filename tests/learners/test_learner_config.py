"""Configurations that cannot work are refused before anything starts, naming both fields."""

from __future__ import annotations

import ast
import inspect

import msgspec
import pytest

from streamrl_learners import config as learner_config
from streamrl_learners.config import (
    Algorithm,
    AlgorithmConfig,
    Grpo,
    LearnerConfig,
    NoCorrection,
    PPOClip,
    Reinforce,
    TinyModel,
    TruncatedIS,
    check,
    problems,
)
from streamrl_queue.errors import ConfigError

DEFAULTS = {"algorithm": PPOClip(), "learner": LearnerConfig(), "model": TinyModel()}


def found(max_staleness: int = 2, group_size: int = 8, **changes: Algorithm | LearnerConfig | TinyModel) -> str:
    return "\n".join(problems(**(DEFAULTS | changes), max_staleness=max_staleness, group_size=group_size))


def test_the_defaults_work():
    check(PPOClip(), LearnerConfig(), TinyModel(), max_staleness=2, group_size=8)
    assert found() == ""


def test_stale_rows_without_a_correction_are_refused():
    text = found(algorithm=PPOClip(correction=NoCorrection()), max_staleness=2)
    assert "algorithm.correction: none" in text
    assert "queue.max_staleness: 2" in text
    assert found(algorithm=PPOClip(correction=NoCorrection()), max_staleness=0) == ""
    assert found(algorithm=PPOClip(correction=TruncatedIS()), max_staleness=4) == ""


def test_a_group_baseline_needs_two_rows():
    assert "a group baseline needs group_size >= 2" in found(group_size=1)


def test_a_step_takes_whole_groups_worth_of_rows():
    text = found(learner=LearnerConfig(rows_per_step=60))
    assert "learner.rows_per_step: 60" in text
    assert "use 56 or 64" in text


def test_a_constant_length_is_given_exactly_when_it_is_used():
    assert "needs algorithm.normalise_length" in found(algorithm=PPOClip(normalise="constant"))
    assert "has no effect" in found(algorithm=PPOClip(normalise_length=64))
    assert found(algorithm=PPOClip(normalise="constant", normalise_length=64)) == ""


def test_a_run_shorter_than_the_default_warm_up_is_allowed():
    assert found(learner=LearnerConfig(steps=3)) == ""


def test_heads_must_fit_the_width():
    assert "model.hidden: 65" in found(model=TinyModel(hidden=65))
    assert "model.kv_heads: 3 must divide model.heads: 4" in found(model=TinyModel(kv_heads=3))


def test_all_contradictions_are_told_at_once():
    with pytest.raises(ConfigError, match=r"(?s)correction.*group baseline"):
        check(PPOClip(correction=NoCorrection()), LearnerConfig(), TinyModel(), max_staleness=1, group_size=1)


def test_unknown_keys_are_refused():
    with pytest.raises(msgspec.ValidationError, match="unknown field `clipp`"):
        msgspec.convert({"loss": "ppo_clip", "clipp": 0.1}, AlgorithmConfig)


def test_tags_choose_the_variant():
    read = msgspec.convert(
        {"loss": "reinforce", "advantage": {"kind": "grpo", "scale": "std"}, "correction": {"kind": "truncated_is"}},
        AlgorithmConfig,
    )
    assert read == Reinforce(advantage=Grpo(scale="std"), correction=TruncatedIS(cap=2.0))


def test_every_field_is_explained():
    for node in ast.parse(inspect.getsource(learner_config)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert explained, f"{node.name}.{ast.unparse(field.target)}"
