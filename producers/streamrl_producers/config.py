"""What can be configured about rollouts and engines. Light: imports no torch."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from streamrl_queue.bounds import COUNT, PROCESSES, SECONDS, Range, check_bounds
from streamrl_queue.errors import ConfigError


def _require(holds: bool, field: str, expected: str, got: object) -> None:
    if not holds:
        raise ConfigError(f"{field}: expected {expected}, got {got!r}")


_ENGINE_BOUNDS: Final[dict[str, Range]] = {
    "count": PROCESSES,
    "slots": COUNT,
    "max_tokens": COUNT,
    "threads": PROCESSES,
}
_ROLLOUT_BOUNDS: Final[dict[str, Range]] = {
    **dict.fromkeys(
        ("concurrency", "max_turns", "max_turn_tokens", "max_tokens", "max_tool_characters", "slice_tokens"), COUNT
    ),
    **dict.fromkeys(("turn_seconds", "tool_seconds", "episode_seconds"), (0.001, SECONDS[1])),
    **dict.fromkeys(("temperature", "eval_temperature"), (0, 1_000)),
    "top_k": (0, COUNT[1]),
}


class _Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    count: int = 1
    """Engine processes."""
    slots: int = 128
    """Requests decoded at the same time by one engine; what is in a slot's KV cache serves the next turn of a session
    as well."""
    max_tokens: int = 2048
    """Context length of one request, in tokens (prompt and answer together)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and KV cache. Log-probabilities are always computed in float32."""
    threads: int = 1
    """CPU threads of one engine. Two threads on two shared cores are slower than one."""
    device: str = "cpu"
    """Where an engine computes: `cpu`, `cuda` or `cuda:0`."""

    def __post_init__(self) -> None:
        check_bounds(self, "engine", _ENGINE_BOUNDS)
        known = re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None
        _require(known, "engine.device", "cpu, cuda or cuda:0", self.device)


class EmbeddedEngine(_Engine, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="embedded"):
    """streamrl's own sampler on torch: Qwen2 and Llama architectures, one process per engine."""

    step_tokens: int = 2048
    """Most tokens forwarded in one step; longer prompts are read in several. At least `slots`."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What running requests do when weights change: `recompute` their KV cache, or `keep` the one of the older
    weights and record it as `context_version`. Prefixes of sessions between two turns are forgotten either way."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "engine", {"step_tokens": COUNT})
        _require(
            self.step_tokens >= self.slots,
            "engine.step_tokens",
            f"at least engine.slots ({self.slots}), one token for each running request",
            self.step_tokens,
        )


class _ServerEngine(_Engine, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    python: str | None = None
    """Python of the environment that the server is started in. Without it, the one that `streamrl engines install`
    made."""
    urls: tuple[str, ...] = ()
    """Addresses of servers that run already, one for each engine, as in `http://127.0.0.1:30000`; none is started."""
    arguments: tuple[str, ...] = ()
    """More arguments of the server's command line."""
    start_seconds: float = 600.0
    """Within this time a server must be ready. On a crowded machine without a GPU it takes minutes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "engine", {"start_seconds": SECONDS})
        for url in self.urls:
            _require(url.startswith(("http://", "https://")), "engine.urls", "http://HOST:PORT each", url)
        if self.urls:
            _require(
                self.count == len(self.urls), "engine.count", f"{len(self.urls)}, one for each of urls", self.count
            )
            ignored = [name for name in ("python", "arguments") if getattr(self, name)]
            _require(
                not ignored, "engine.urls", f"no engine.{' and engine.'.join(ignored)}: nothing is started", self.urls
            )


class SGLangEngine(
    _ServerEngine, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="sglang"
):
    """SGLang, as a server in a Python environment of its own."""

    @property
    def kind(self) -> Literal["sglang"]:
        return "sglang"


class VLLMEngine(_ServerEngine, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="vllm"):
    """vLLM, as a server in a Python environment of its own."""

    @property
    def kind(self) -> Literal["vllm"]:
        return "vllm"


ServerEngine = SGLangEngine | VLLMEngine
EngineConfig = EmbeddedEngine | SGLangEngine | VLLMEngine


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How episodes are played: limits, sampling, concurrency."""

    concurrency: int = 64
    """Episodes played at the same time by one producer."""
    temperature: float = 1.0
    """Sampling temperature of training episodes; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus: sample from the smallest set of tokens with at least this probability. 1 is off."""
    top_k: int = 0
    """Sample from the `top_k` most probable tokens. 0 is off."""
    eval_temperature: float = 0.0
    """Sampling temperature of evaluation episodes (split `eval`), which use neither `top_p` nor `top_k`."""
    max_turns: int = 8
    """Most assistant turns of one episode."""
    max_turn_tokens: int = 256
    """Most tokens sampled in one assistant turn."""
    max_tokens: int = 2048
    """Most tokens of one row: prompt, tool texts and answers together."""
    max_tool_characters: int = 16384
    """Most characters of one tool's text. A longer one loses its beginning; a marker says how much, and the row's
    metric `tool_texts_cut` counts."""
    turn_seconds: float = 120.0
    """Deadline of one assistant turn, in seconds. Waiting for an engine counts."""
    tool_seconds: float = 30.0
    """Deadline of one call into the environment (constructor, reset, tool, reward), in seconds."""
    episode_seconds: float = 600.0
    """Deadline of one episode, in seconds; also how long a rollout lease is worked on."""
    slice_tokens: int = 512
    """Most tokens asked from an engine in one request. A longer turn is sampled in slices, so that a dying engine
    costs at most one slice; the engine keeps the session's KV cache between them."""

    def __post_init__(self) -> None:
        check_bounds(self, "rollout", _ROLLOUT_BOUNDS)
        _require(0 < self.top_p <= 1, "rollout.top_p", "more than 0 and at most 1", self.top_p)
        _require(
            self.max_turn_tokens <= self.max_tokens,
            "rollout.max_turn_tokens",
            f"at most rollout.max_tokens ({self.max_tokens})",
            self.max_turn_tokens,
        )

    def sampling(self, split: str) -> dict[str, float]:
        """What the log-probs of a row of `split` mean: recorded in its `sampling` column."""
        if split == "eval":
            return {"temperature": self.eval_temperature, "top_p": 1.0, "top_k": 0.0}
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": float(self.top_k)}
