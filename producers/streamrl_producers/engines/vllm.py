"""vLLM as an engine: its token-level `/inference/v1/generate`.

Log-probs are raw (temperature 1) unless the server runs with `--logprobs-mode processed_logprobs`; then they are those
of what is sampled from, temperature, top-p and top-k included. Which of the two a server gives is measured. Weights are
not published to it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl_queue.errors import EngineError, StreamRLError, WeightError
from streamrl_queue.schema import Span

from .adapter import Adapter, parse_label
from .protocol import FinishReason, Generated, Sampling

if TYPE_CHECKING:
    import torch


class _Version(msgspec.Struct):
    version: str
    start: int
    end: int


class _Sampled(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Sampled]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Version]
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class VLLM(Adapter):
    """A vLLM server."""

    kind = "vllm"
    oldest = (0, 32, 0)
    paths: ClassVar = {
        "/inference/v1/generate": "sampling",
        "/pause": "ending requests",
        "/resume": "ending requests",
    }
    helps = "start it with --enable-scale-out and VLLM_SERVER_DEV_MODE=1"

    async def _version(self) -> str:
        return str((await self._get("/version"))["version"])

    async def _max_tokens(self) -> int:
        return int((await self._get("/v1/models"))["data"][0]["max_model_len"])

    async def _check_meaning(self, sampling: Sampling) -> None:
        plain = sampling.temperature in (0, 1) and sampling.top_p == 1 and not sampling.top_k
        if not plain and not await self.scales():
            raise EngineError(
                f"sampling: temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}: this "
                "server's log-probs are raw, not those of what is sampled from; start it with "
                "--logprobs-mode processed_logprobs, or use temperature=1, top_p=1 and top_k=0"
            )

    async def ready(self) -> bool:
        try:
            await self._get("/health")
        except StreamRLError:
            return False
        return True

    async def _generate(
        self, tokens: npt.NDArray[np.int32], sampling: Sampling, session: str, seconds: float
    ) -> Generated:
        # A request that is cut off by its deadline is lost: without streaming there is no partial answer.
        body = {
            "request_id": uuid.uuid4().hex,
            "token_ids": tokens.tolist(),
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p if sampling.temperature else 1.0,
                "top_k": sampling.top_k if sampling.temperature else 0,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": True,
                "logprobs": 0,
                # The same seed for another slice would repeat its random numbers.
                "seed": None if sampling.seed is None else (sampling.seed + sampling.seed_position) % 2**63,
            },
        }
        answer = msgspec.convert(await self._post("/inference/v1/generate", body, seconds), _Answer, strict=False)
        return generated(answer.choices[0], sampling)

    async def abort_all(self) -> None:
        await self._post("/pause?mode=abort&clear_cache=true", {})
        await self._post("/resume", {})

    async def logprobs(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        raise WeightError(f"{self.url}: weights cannot be proved on vLLM; use engine.kind: sglang or embedded")

    async def update(self, tensors: Mapping[str, torch.Tensor], version: int, seconds: float) -> None:
        raise WeightError(f"{self.url}: weights cannot be published to vLLM; use engine.kind: sglang or embedded")


def generated(choice: _Choice, sampling: Sampling) -> Generated:
    """What vLLM answered, in this project's terms.

    Raises:
        EngineError: its parts contradict each other.
    """
    ids, told = choice.token_ids, choice.logprobs.content
    if [entry.token_id for entry in told] != ids:
        raise EngineError(f"vLLM answered {len(ids)} ids and log-probs of {len(told)}, not all of the same tokens")
    spans = tuple(Span(s.start, parse_label(s.version), parse_label(s.version)) for s in choice.weight_versions)
    return Generated(
        np.array(ids, np.int32),
        np.array([entry.logprob for entry in told], np.float32),
        spans if ids else (),
        _reason(choice.finish_reason, ids, sampling),
    )


def _reason(told: str | None, ids: Sequence[int], sampling: Sampling) -> FinishReason:
    if told == "stop":
        return "stop" if ids and ids[-1] in sampling.stop_ids else "aborted"
    return "length" if told == "length" else "aborted"
