"""Configurations that cannot work are refused before anything starts, naming both fields."""

from __future__ import annotations

import ast
import inspect

import msgspec
import pytest

from streamrl_learners import config as learner_config
from streamrl_learners.algorithms import base, pieces
from streamrl_learners.algorithms.checks import reach
from streamrl_learners.algorithms.pieces import (
    Algorithm,
    Behaviour,
    Cispo,
    Decoupled,
    GeometricRejection,
    Grpo,
    Gspo,
    LagDecay,
    LagMask,
    MaskedIS,
    NoCorrection,
    PPOClip,
    Reinforce,
    ReinforcePlusPlus,
    SequenceRejection,
    SoftOverlong,
    TruncatedIS,
)
from streamrl_learners.config import LearnerConfig, TinyModel, check, problems
from streamrl_queue.errors import ConfigError

DEFAULTS = {"algorithm": Algorithm(), "learner": LearnerConfig(), "model": TinyModel()}


def found(max_staleness: int = 2, group_size: int = 8, **changes: Algorithm | LearnerConfig | TinyModel) -> str:
    return "\n".join(problems(**(DEFAULTS | changes), max_staleness=max_staleness, group_size=group_size))


def test_the_defaults_work():
    check(Algorithm(), LearnerConfig(), TinyModel(), max_staleness=2, group_size=8)
    assert found() == ""


def test_stale_rows_without_a_correction_are_refused():
    text = found(algorithm=Algorithm(loss=Reinforce(), correction=NoCorrection()), max_staleness=2)
    assert "algorithm.correction: none" in text
    assert "queue.max_staleness: 2" in text
    assert found(algorithm=Algorithm(loss=Reinforce(), correction=NoCorrection()), max_staleness=0) == ""
    assert found(algorithm=Algorithm(loss=Reinforce(), correction=TruncatedIS()), max_staleness=4) == ""


def test_a_group_baseline_needs_two_rows():
    assert "a group baseline needs group_size >= 2" in found(group_size=1)


def test_a_step_takes_whole_groups_worth_of_rows():
    text = found(learner=LearnerConfig(rows_per_step=60))
    assert "learner.rows_per_step: 60" in text
    assert "use 56 or 64" in text


def test_a_constant_length_is_given_exactly_when_it_is_used():
    assert "needs algorithm.normalise_length" in found(algorithm=Algorithm(normalise="constant"))
    assert "has no effect" in found(algorithm=Algorithm(normalise_length=64))
    assert found(algorithm=Algorithm(normalise="constant", normalise_length=64)) == ""


def test_a_run_shorter_than_the_default_warm_up_is_allowed():
    assert found(learner=LearnerConfig(steps=3)) == ""


def test_heads_must_fit_the_width():
    assert "model.hidden: 65" in found(model=TinyModel(hidden=65))
    assert "model.kv_heads: 3 must divide model.heads: 4" in found(model=TinyModel(kv_heads=3))


def test_all_contradictions_are_told_at_once():
    with pytest.raises(ConfigError, match=r"(?s)correction.*group baseline"):
        check(Algorithm(correction=NoCorrection()), LearnerConfig(), TinyModel(), max_staleness=1, group_size=1)


@pytest.mark.parametrize("loss", [PPOClip(), Gspo(), Cispo()])
@pytest.mark.parametrize("correction", [NoCorrection(), TruncatedIS(), MaskedIS()])
def test_a_clip_that_could_never_act_is_refused(loss: base.Loss, correction: base.Correction):
    text = found(algorithm=Algorithm(loss=loss, correction=correction), max_staleness=0)
    assert "always 1, and the clip would never act; use loss reinforce, or correction behaviour" in text
    for works in (Algorithm(loss=loss, correction=Behaviour()), Algorithm(loss=Reinforce(), correction=correction)):
        assert found(algorithm=works, max_staleness=0) == ""


def test_an_advantage_that_compares_nothing_takes_groups_of_one():
    assert found(algorithm=Algorithm(advantage=ReinforcePlusPlus()), group_size=1) == ""
    assert "needs group_size >= 2" in found(
        algorithm=Algorithm(advantage=ReinforcePlusPlus(baseline="group")), group_size=1
    )


@pytest.mark.parametrize(
    ("key", "piece"),
    [
        ("correction", MaskedIS(low=1.5, high=2.0)),
        ("rejection", SequenceRejection(low=2.0)),
        ("rejection", GeometricRejection(low=0.5, high=0.9)),
    ],
)
def test_a_band_that_leaves_fresh_tokens_out_is_refused(key: str, piece: base.Piece):
    text = found(algorithm=Algorithm(loss=Reinforce(), **{key: piece}))
    assert f"algorithm.{key}.low" in text
    assert "expected 1 between them" in text


def test_a_length_penalty_starts_within_the_row():
    text = found(algorithm=Algorithm(length=SoftOverlong(max_tokens=10, buffer_tokens=11)))
    assert "algorithm.length.buffer_tokens: 11" in text


def test_pieces_that_the_bound_on_staleness_leaves_nothing_to_do_are_named():
    def said(max_lag: int, **chosen: base.Piece) -> str:
        return "\n".join(reach(Algorithm(**chosen), max_lag=max_lag))

    assert "every token would weigh 1" in said(2, lag=LagMask(max_lag=2))
    assert said(3, lag=LagMask(max_lag=2)) == ""
    assert "every token would weigh 1" in said(1, lag=LagDecay())
    assert said(2, lag=LagDecay()) == ""
    assert "use correction behaviour" in said(0, correction=Decoupled())
    assert said(1, correction=Decoupled()) == said(0, loss=Reinforce(), correction=Decoupled()) == said(0) == ""


def test_unknown_keys_are_refused():
    with pytest.raises(msgspec.ValidationError, match="unknown field `clipp`"):
        msgspec.convert({"loss": {"kind": "ppo_clip", "clipp": 0.1}}, Algorithm)


def test_kinds_choose_the_pieces():
    read = msgspec.convert(
        {
            "loss": {"kind": "reinforce"},
            "advantage": {"kind": "grpo", "scale": "std"},
            "correction": {"kind": "truncated_is"},
            "rejection": {"kind": "geometric", "high": 1.2},
        },
        Algorithm,
    )
    assert read == Algorithm(
        loss=Reinforce(),
        advantage=Grpo(scale="std"),
        correction=TruncatedIS(cap=2.0),
        rejection=GeometricRejection(high=1.2),
    )


OWN = [
    kind
    for kind in vars(pieces).values()
    if isinstance(kind, type) and issubclass(kind, base.Piece) and kind.__module__ == pieces.__name__
]


@pytest.mark.parametrize("kind", OWN, ids=base.tag_of)
def test_every_piece_has_a_function_with_its_equation_and_a_source(kind: type[base.Piece]):
    needed = {field: 10 for field in ("max_tokens", "buffer_tokens") if field in kind.__struct_fields__}
    function = base.function_of(kind(**needed))
    assert (inspect.getdoc(function) or "").strip()
    assert (inspect.getdoc(kind) or "").strip()
    assert kind.source


def test_a_function_that_is_not_there_is_told_with_its_piece():
    class Broken(base.Lag, frozen=True, kw_only=True, tag="broken"):
        function = "streamrl_learners.algorithms.lags:nothing"

    with pytest.raises(ConfigError, match=r"Broken\.function: expected module:function, got .*lags:nothing"):
        base.function_of(Broken())


def test_every_field_is_explained():
    for node in (n for module in (learner_config, pieces) for n in ast.parse(inspect.getsource(module)).body):
        if not isinstance(node, ast.ClassDef):
            continue
        for field, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert explained, f"{node.name}.{ast.unparse(field.target)}"
