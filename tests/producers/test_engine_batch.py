"""Requests come and go between steps; tokens, log-probs and versions always belong together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_support import VOCAB, batch, deviation, finish, model, prompt, reference, request, tensors

from streamrl_producers.engines.embedded.slots import SlotPool
from streamrl_producers.engines.protocol import Generated
from streamrl_queue.errors import EngineError, LimitReached, SchemaError
from streamrl_queue.schema import Span

TOLERANCE = 2e-4  # nats


def test_a_request_ends_with_its_stop_id_which_is_part_of_it() -> None:
    made = model()
    ready = batch(made)
    free = request(prompt(5), temperature=0, max_tokens=20)
    finish(ready, free)
    assert free.result is not None
    stop = int(free.result.tokens[3])
    first = free.result.tokens.tolist().index(stop)
    stopped = request(prompt(5), temperature=0, max_tokens=20, stop_ids=(stop,))
    finish(ready, stopped)
    assert stopped.result is not None
    assert stopped.result.finish_reason == "stop"
    assert stopped.result.tokens.tolist() == free.result.tokens[: first + 1].tolist()


def test_more_requests_than_slots_all_finish() -> None:
    ready = batch(model(), slots=3)
    requests = [request(prompt(1 + i % 7, i), max_tokens=1 + i % 5) for i in range(20)]
    finish(ready, *requests)
    assert [len(one.result.tokens) for one in requests if one.result] == [1 + i % 5 for i in range(20)]
    assert ready.running == ready.waiting == 0


def test_a_full_context_ends_a_request_as_length() -> None:
    ready = batch(model(), context=16)
    one = request(prompt(10), max_tokens=50)
    finish(ready, one)
    assert one.result is not None
    assert (len(one.result.tokens), one.result.finish_reason) == (6, "length")


@pytest.mark.parametrize(
    ("tokens", "kind", "said"),
    [
        ([], SchemaError, "empty"),
        ([0] * 96, LimitReached, "96"),
        ([VOCAB], SchemaError, "ids in"),
        ([-1], SchemaError, "ids"),
    ],
)
def test_a_request_that_can_never_run_is_refused(tokens: list[int], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        batch(model()).submit(request(tokens))


def test_a_seeded_request_is_the_same_alone_in_company_and_in_slices() -> None:
    made = model()
    alone = request(prompt(6), max_tokens=12, seed=5)
    finish(batch(made), alone)
    accompanied = request(prompt(6), max_tokens=12, seed=5)
    finish(batch(made), *(request(prompt(9, i), max_tokens=20) for i in range(3)), accompanied)
    ready, slices = batch(made), Generated.nothing()
    for had in (0, 5, 10):
        tokens = np.concatenate([prompt(6), slices.tokens])
        part = request(tokens, "s", max_tokens=min(5, 12 - had), seed=5, seed_position=had)
        finish(ready, part)
        assert part.result is not None
        slices = slices.then(part.result)
    assert alone.result is not None
    assert accompanied.result is not None
    assert alone.result.tokens.tolist() == accompanied.result.tokens.tolist() == slices.tokens.tolist()
    assert slices.spans == (Span(0, 1, 1),)


def test_an_aborted_request_keeps_the_tokens_it_had() -> None:
    ready = batch(model(), slots=1)
    running, waiting = request(prompt(4), max_tokens=50), request(prompt(4), max_tokens=50)
    ready.submit(running)
    ready.submit(waiting)
    for _ in range(3):
        ready.step()
    ready.abort(running)
    ready.abort(waiting)
    assert running.result is not None
    assert (len(running.result.tokens), running.result.finish_reason) == (3, "aborted")
    assert waiting.result is not None
    assert len(waiting.result.tokens) == 0
    ready.abort(running)
    assert ready.ended() == [running, waiting]


def test_after_an_update_with_recompute_old_and_new_requests_equal_a_cold_engine() -> None:
    made, other = model(), model(1)
    ready = batch(made)
    old = [request(prompt(3 + 5 * i, i), "kept", max_tokens=16) for i in range(2)]
    for one in old:
        ready.submit(one)
    for _ in range(6):
        ready.step()
    finished = request(prompt(8, 7), "idle", max_tokens=1)
    finish_now = ready.counters.sampled
    ready.submit(finished)
    ready.step()
    ready.reweigh(ready.decoder.build(tensors(other)), 2, recompute=True)
    fresh = request(prompt(8, 7), "idle", max_tokens=5)  # its old prefix must be forgotten
    finish(ready, fresh)
    assert finish_now == 12
    assert fresh.result is not None
    assert fresh.result.spans == (Span(0, 2, 2),)
    assert deviation(other, fresh) < TOLERANCE
    for one in old:
        assert one.result is not None
        assert one.result.spans == (Span(0, 1, 1), Span(7, 2, 2))
        whole = np.concatenate([one.tokens, one.result.tokens])
        n = len(one.tokens)
        cold_before, cold_after = reference(made, whole)[n - 1 :], reference(other, whole)[n - 1 :]
        assert np.abs(one.result.logprobs[:7] - cold_before[:7]).max() < TOLERANCE
        assert np.abs(one.result.logprobs[7:] - cold_after[7:]).max() < TOLERANCE


def test_kept_caches_are_recorded_as_context_version_and_idle_prefixes_are_forgotten() -> None:
    made, other = model(), model(1)
    ready = batch(made)
    idle = request(prompt(5), "idle", max_tokens=1)
    finish(ready, idle)
    running = request(prompt(6, 1), "run", max_tokens=6)
    ready.submit(running)
    ready.step()
    ready.reweigh(ready.decoder.build(tensors(other)), 2, recompute=False)
    again = request(prompt(5), "idle", max_tokens=2)
    finish(ready, again)
    assert running.result is not None
    assert running.result.spans == (Span(0, 1, 1), Span(1, 2, 1))
    assert again.result is not None
    assert again.result.spans == (Span(0, 2, 2),)
    following = request(np.concatenate([running.tokens, running.result.tokens]), "run", max_tokens=1)
    finish(ready, following)
    assert following.result is not None
    assert following.result.spans == (Span(0, 2, 1),)


def test_two_updates_before_the_next_token_leave_one_span() -> None:
    made = model()
    ready = batch(made)
    one = request(prompt(6), max_tokens=4)
    ready.submit(one)
    ready.step()
    weights = ready.decoder.build(tensors(made))
    ready.reweigh(weights, 2, recompute=True)
    ready.reweigh(weights, 3, recompute=True)
    finish(ready)
    assert one.result is not None
    assert one.result.spans == (Span(0, 1, 1), Span(1, 3, 3))


def test_logits_that_are_not_finite_are_an_error_of_the_request_and_leave_no_trace() -> None:
    made, broken = model(), model()
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan
    ready = batch(broken)
    bad = request(prompt(6), "s", max_tokens=4)
    finish(ready, bad)
    assert isinstance(bad.error, EngineError)
    assert bad.result is None
    ready.reweigh(ready.decoder.build(tensors(made)), 2, recompute=True)
    good = request(prompt(6), "s", max_tokens=4)
    finish(ready, good)
    assert deviation(made, good) < TOLERANCE


def test_the_slot_that_was_idle_the_longest_is_taken_first_and_sessions_find_their_own() -> None:
    pool = SlotPool(3)
    slots = {name: pool.take(name).slot for name in "abc"}
    for name in "bca":
        pool.keep(name, slots[name])
    assert pool.take("c") == (slots["c"], True)
    assert pool.take("d") == (slots["b"], False)
    pool.forget()
    assert pool.take("a") == (slots["a"], False)
    assert pool.available == 0


def test_a_session_that_ran_twice_keeps_its_later_slot_only() -> None:
    pool = SlotPool(2)
    first, second = pool.take("a"), pool.take("a")
    pool.keep("a", first.slot)
    pool.keep("a", second.slot)
    assert pool.available == 2
    assert pool.take("a") == (second.slot, True)
