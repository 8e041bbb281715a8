"""The doubles answer as the servers were recorded to answer, and old or wrong servers are told by name."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from engine_doubles import VOCAB, Double, Request, SGLangDouble, VLLMDouble, served
from engine_servers import make_model

from streamrl_producers.engines.adapter import Adapter, parse_label, parse_version, words
from streamrl_producers.engines.protocol import Sampling
from streamrl_producers.engines.sglang import SGLang
from streamrl_producers.engines.vllm import VLLM
from streamrl_queue.errors import EngineError

RECORDED = json.loads((Path(__file__).parent / "sglang_exchanges.json").read_text())["exchanges"]
PROMPT = np.array([3, 5, 8], np.int32)


def ask(url: str, request: Any) -> tuple[int, Any]:
    body = None if request["json"] is None else json.dumps(request["json"]).encode()
    asked = urllib.request.Request(
        url + request["path"], body, {"content-type": "application/json"}, method=request["method"]
    )
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            status, content = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, content = error.code, error.read()
    return status, json.loads(content) if content else {"__text__": ""}


def contradictions(recorded: Any, ours: Any, path: str = "") -> list[str]:
    """Where `ours` has another type or a key that was not recorded; lists are compared by their first entries."""
    if isinstance(recorded, dict) and isinstance(ours, dict):
        return [
            wrong
            for key, value in ours.items()
            for wrong in (
                [f"{path}.{key}"] if key not in recorded else contradictions(recorded[key], value, path + f".{key}")
            )
        ]
    if isinstance(recorded, list) and isinstance(ours, list):
        return contradictions(recorded[0], ours[0], path + "[0]") if recorded and ours else []
    numbers = isinstance(recorded, int | float) and isinstance(ours, int | float)
    return [] if numbers or type(recorded) is type(ours) else [f"{path}: {recorded!r} and {ours!r}"]


def test_the_double_answers_what_sglang_was_recorded_to_answer() -> None:
    with served(SGLangDouble(make_model(1), version="golden-0")) as url:
        for exchange in RECORDED:
            request = json.loads(json.dumps(exchange["request"]))
            if settings := (request["json"] or {}).get("sampling_params"):
                # The recorded server had a longer context, and told the best tokens as well.
                if settings.get("max_new_tokens") == 300:
                    settings["max_new_tokens"] = 200
                request["json"].pop("top_logprobs_num", None)
            status, ours = ask(url, request)
            recorded = exchange["response"]
            assert status == recorded["status"], exchange["name"]
            assert contradictions(recorded["json"], ours) == [], exchange["name"]


def test_the_double_dies_of_an_id_outside_the_vocabulary() -> None:
    with served(SGLangDouble(make_model(1))) as url:
        for _ in range(2):
            with pytest.raises((ConnectionError, urllib.error.URLError)):
                ask(url, {"method": "POST", "path": "/generate", "json": {"input_ids": [VOCAB]}})


def test_an_abort_matches_by_prefix_and_only_of_a_live_request() -> None:
    double = SGLangDouble(None)
    with served(double) as url:
        double.requests = {id: Request(id, [], {}) for id in ("p1", "p10")}
        ask(url, {"method": "POST", "path": "/abort_request", "json": {"rid": "p"}})
        assert not any(request.aborted for request in double.requests.values())
        ask(url, {"method": "POST", "path": "/abort_request", "json": {"rid": "p1"}})
        assert all(request.aborted for request in double.requests.values())


def checked(kind: type[Adapter], double: Double, sampling: Sampling | None = None) -> Any:
    """What an adapter's check, or one request, comes to."""

    async def main() -> Any:
        with trio.fail_after(30):
            async with kind(url, vocab_size=VOCAB) as adapter:
                info = await adapter.check()
                if sampling is None:
                    return info
                return await adapter.generate(PROMPT, sampling, session="a", seconds=20)

    with served(double) as url:
        return trio.run(main)


@pytest.mark.parametrize(
    ("kind", "double", "version", "oldest"),
    [(SGLang, SGLangDouble, "0.5.21.post1", "0.5.22"), (VLLM, VLLMDouble, "0.9.2", "0.32.0")],
)
def test_a_server_that_is_too_old_is_refused_with_the_version_that_is_needed(
    kind: type[Adapter], double: type[Double], version: str, oldest: str
) -> None:
    old = double(make_model(1))
    old.server_version = version  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=f"expected version {oldest} or later, got {version}"):
        checked(kind, old)


@pytest.mark.parametrize(
    ("kind", "double", "path", "helps"),
    [
        (SGLang, SGLangDouble, "/begin_weight_update", "router"),
        (VLLM, VLLMDouble, "/inference/v1/generate", "--enable-scale-out"),
    ],
)
def test_a_server_without_a_path_is_refused_with_the_path_and_what_helps(
    kind: type[Adapter], double: type[Double], path: str, helps: str
) -> None:
    poor = double(make_model(1))
    poor.paths = poor.paths.replace(path, "")  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=f"lacks {path}.*{helps}"):
        checked(kind, poor)


@pytest.mark.parametrize(
    ("kind", "double", "flag"),
    [
        (SGLang, SGLangDouble, "without SGLANG_RETURN_ORIGINAL_LOGPROB"),
        (VLLM, VLLMDouble, "--logprobs-mode processed_logprobs"),
    ],
)
def test_raw_log_probs_are_measured_and_refused_with_the_flag_that_helps(
    kind: type[Adapter], double: type[Double], flag: str
) -> None:
    with pytest.raises(EngineError, match=flag):
        checked(kind, double(make_model(1), scaled=False), Sampling(temperature=0.5))
    # At temperature 1 both are the same.
    assert len(checked(kind, double(make_model(1), scaled=False), Sampling(max_tokens=3)).tokens) == 3


def test_a_seeded_request_has_other_random_numbers_in_every_slice() -> None:
    double = VLLMDouble(make_model(1))
    for position in (0, 4):
        checked(VLLM, double, Sampling(max_tokens=1, seed=7, seed_position=position))
    seeds = [body["sampling_params"]["seed"] for path, body in double.asked if path.endswith("generate")]
    assert [seed for seed in seeds if seed is not None] == [7, 11]


def test_a_server_that_is_not_there_is_an_engine_error() -> None:
    async def main() -> None:
        async with SGLang("http://127.0.0.1:9", vocab_size=VOCAB) as adapter:
            assert not await adapter.ready()
            with pytest.raises(EngineError, match=r"GET http://127\.0\.0\.1:9/server_info"):
                await adapter.check()

    trio.run(main)


@pytest.mark.parametrize(
    ("text", "release"), [("0.5.23", (0, 5, 23)), ("0.5.12.post1", (0, 5, 12)), ("0.32.0+cpu", (0, 32, 0)), ("dev", ())]
)
def test_versions_are_compared_by_their_release_numbers(text: str, release: tuple[int, ...]) -> None:
    assert parse_version(text) == release


def test_only_numbers_are_versions_of_weights() -> None:
    assert [parse_label(label) for label in ("12", "default", "v3", "")] == [12, 0, 0, 0]


def test_an_error_is_told_in_the_servers_own_words() -> None:
    shapes = [b'{"error":{"message":"no"}}', b'{"error":"no"}', b'{"object":"error","message":"no"}', b"no"]
    assert [words(shape) for shape in shapes] == ["no"] * 4
