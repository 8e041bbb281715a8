"""Rows become micro-batches: the mask decides what is trained, and nothing else does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_fakes import make_batch, make_row

from streamrl_learners.algorithms.pieces import Algorithm, GeometricRejection, LagDecay, LagMask
from streamrl_learners.batches import aged, micro_batch, micro_batches, plan, row_weight, rows_of, temperature_of
from streamrl_queue.errors import SchemaError
from streamrl_queue.schema import Segment


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 512))
def test_every_row_is_planned_once_and_within_the_budget(lengths: list[int], budget: int):
    batches = plan(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[i] for i in batch)
        assert padded <= budget or len(batch) == 1


def test_rows_survive_the_way_through_arrow():
    rows = [make_row(i, temperature=0.5 + i) for i in range(5)]
    for got, sent in zip(rows_of(make_batch(rows)), rows, strict=True):
        for name, a, b in zip(sent._fields, got, sent, strict=True):
            if isinstance(b, np.ndarray):
                np.testing.assert_array_equal(a, b)
            else:
                assert a == pytest.approx(b) if name == "advantage" else a == b


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_sampled_token_without_a_finite_log_prob_is_an_error(bad: float):
    row = make_row(9)
    row.logprobs[-1] = bad
    with pytest.raises(SchemaError, match="row 9: logprobs: expected finite numbers for sampled tokens"):
        rows_of(make_batch([row]))


def test_only_sampled_tokens_are_trained():
    row = make_row(3)
    micro = micro_batch([row], Algorithm())
    at = np.flatnonzero(row.mask)
    assert micro.targets.tolist() == row.tokens[at].tolist()
    assert micro.places.tolist() == (at - 1).tolist()
    np.testing.assert_array_equal(micro.behaviour, row.logprobs[at])


def test_nan_where_nobody_sampled_stays_out():
    micro = micro_batch([make_row(i) for i in range(8)], Algorithm())
    assert all(bool(field.isfinite().all()) for field in micro)


def test_the_sampled_end_of_turn_is_trained_even_when_it_is_the_padding_id():
    row = make_row(1)
    row.tokens[-1] = 0
    assert micro_batch([row], Algorithm()).targets[-1] == 0


def test_segments_become_sequences_of_their_own():
    row = make_row(
        5,
        tokens=np.arange(10, dtype=np.int32),
        mask=np.array([0, 1, 0, 1, 0, 0, 1, 1, 0, 1], np.uint8),
        logprobs=np.zeros(10, np.float32),
        segments=(Segment(0, 4), Segment(4, 10)),
    )
    micro = micro_batch([row], Algorithm())
    assert micro.tokens.tolist() == [[0, 1, 2, 3, 0, 0], [4, 5, 6, 7, 8, 9]]
    assert micro.places.tolist() == [0, 2, 7, 8, 10]
    assert micro.targets.tolist() == [1, 3, 6, 7, 9]


def test_a_sampled_token_that_opens_a_segment_is_refused():
    row = make_row(5, mask=np.ones(3, np.uint8), tokens=np.ones(3, np.int32), segments=(Segment(0, 3),))
    with pytest.raises(SchemaError, match="row 5: token 0 was sampled but opens a segment"):
        micro_batch([row._replace(logprobs=np.zeros(3, np.float32))], Algorithm())


def test_rows_without_signal_are_left_out_and_still_weigh():
    silent = make_row(1, advantage=0.0)
    empty = make_row(2, mask=np.zeros(5, np.uint8), tokens=np.zeros(5, np.int32), segments=(Segment(0, 5),))
    assert list(micro_batches([silent, empty], 1000, Algorithm())) == []
    assert row_weight(silent, Algorithm()) == silent.sampled > 0
    assert row_weight(empty, Algorithm()) == 0
    assert row_weight(empty, Algorithm(normalise="sequence_mean")) == 0
    assert row_weight(silent, Algorithm(normalise="sequence_mean")) == 1
    assert row_weight(silent, Algorithm(normalise="constant", normalise_length=64)) == 64


def test_sequence_mean_weighs_each_row_alike():
    micro = micro_batch([make_row(i) for i in range(6)], Algorithm(normalise="sequence_mean"))
    assert float(micro.weights.sum()) == pytest.approx(6)


def test_tokens_that_are_too_old_are_as_if_nobody_had_sampled_them():
    row = make_row(4)
    at = np.flatnonzero(row.mask)
    lags = np.zeros(len(row.tokens), np.int64)
    lags[: at[2]] = 3
    young = aged(row, lags, LagMask(max_lag=2))
    assert young.sampled == row.sampled - 2
    micro = micro_batch([young], Algorithm(lag=LagMask(max_lag=2)))
    assert micro.targets.tolist() == row.tokens[at[2:]].tolist()
    assert row_weight(young, Algorithm()) == young.sampled
    assert not aged(row, lags + 3, LagMask(max_lag=2)).has_signal
    assert aged(row, lags, LagDecay()).sampled == row.sampled


def test_tokens_count_less_by_their_age_and_the_normaliser_does_not():
    row = make_row(4)
    old = aged(row, np.full(len(row.tokens), 4), LagDecay())
    micro = micro_batch([old], Algorithm(lag=LagDecay()))
    assert micro.weights.tolist() == [0.25] * row.sampled
    assert float(micro.shares.sum()) == row_weight(old, Algorithm(lag=LagDecay())) == row.sampled


@pytest.mark.parametrize("normalise", ["token_mean", "sequence_mean", "constant"])
def test_shares_of_tokens_add_up_to_the_weight_of_their_rows(normalise: str):
    algorithm = Algorithm(normalise=normalise, normalise_length=50)
    rows = [make_row(i) for i in range(5)]
    got = float(micro_batch(rows, algorithm).shares.sum())
    assert got == pytest.approx(sum(row_weight(row, algorithm) for row in rows))


def test_rows_are_numbered_without_gaps_over_all_their_segments():
    empty = make_row(2, mask=np.zeros(5, np.uint8), tokens=np.zeros(5, np.int32), segments=(Segment(0, 5),))
    split = make_row(
        5,
        tokens=np.arange(6, dtype=np.int32),
        mask=np.array([0, 1, 1, 0, 1, 0], np.uint8),
        logprobs=np.zeros(6, np.float32),
        segments=(Segment(0, 3), Segment(3, 6)),
    )
    assert micro_batch([empty, split, make_row(1)], Algorithm()).rows.unique().tolist() == [0, 1]
    assert micro_batch([empty, split], Algorithm()).rows.tolist() == [0, 0, 0]


@pytest.mark.parametrize("pieces", [{"entropy": 0.1}, {"rejection": GeometricRejection()}])
def test_rows_without_an_advantage_are_computed_where_they_matter(pieces: dict[str, Any]):
    silent = make_row(1, advantage=0.0)
    assert len(list(micro_batches([silent], 1000, Algorithm(**pieces)))) == 1


def test_no_rows_make_a_pass_that_teaches_nothing():
    micro = micro_batch([], Algorithm())
    assert micro.tokens.shape == (1, 1)
    assert len(micro.targets) == len(micro.weights) == 0


def test_greedy_rows_carry_log_probs_of_temperature_one():
    assert temperature_of(1, {"temperature": 0.0}) == 1.0
    assert temperature_of(1, {"temperature": 0.6, "top_p": 1.0, "top_k": 0.0}) == 0.6
    assert temperature_of(1, {}) == 1.0


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 20.0}])
def test_truncated_sampling_cannot_be_trained(sampling: dict[str, float]):
    with pytest.raises(SchemaError, match=r"row 7: sampling: expected top_p 1 and top_k 0"):
        temperature_of(7, sampling)


def test_demonstrations_need_no_behaviour():
    from streamrl_learners.warm_start import demonstrations

    micro = demonstrations([(np.arange(5, dtype=np.int32), np.array([0, 0, 1, 0, 1], np.uint8))])
    assert micro.targets.tolist() == [2, 4]
    assert all(math.isnan(x) for x in micro.behaviour.tolist())
