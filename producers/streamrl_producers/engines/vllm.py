"""vLLM as an engine: its token-level `/inference/v1/generate`.

Log-probs are raw (temperature 1) unless the server runs with `--logprobs-mode processed_logprobs`; then they are those
of what is sampled from, temperature, top-p and top-k included. Which of the two a server gives is measured.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
import trio

from streamrl_queue.errors import DeadlineExceeded, EngineError, StreamRLError, WeightError
from streamrl_queue.nursery import open_nursery
from streamrl_queue.schema import Span

from .adapter import Adapter, parse_label
from .protocol import FinishReason, Generated, Sampling
from .transfer import ServerGroup, buckets

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
        "/init_weight_transfer_engine": "weights",
        "/start_weight_update": "weights",
        "/update_weights": "weights",
        "/finish_weight_update": "weights",
        "/get_world_size": "weights",
    }
    helps = "start it with --enable-scale-out and VLLM_SERVER_DEV_MODE=1"

    def __init__(self, url: str, *, vocab_size: int) -> None:
        super().__init__(url, vocab_size=vocab_size)
        self._group: ServerGroup | None = None

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
        body = {
            "token_ids": list(tokens),
            "sampling_params": {"temperature": 1.0, "max_tokens": 1, "ignore_eos": True, "prompt_logprobs": 0},
        }
        told = (await self._post("/inference/v1/generate", body))["prompt_logprobs"]
        # Each place tells its own token and, beside it, better ones; the first token follows nothing.
        pairs = zip(told[1:], tokens[1:], strict=True)
        return np.array([place[str(token)]["logprob"] for place, token in pairs], np.float32)

    async def update(self, tensors: Mapping[str, torch.Tensor], version: int, seconds: float) -> None:
        # Weights that the server made up may give every token the same probability.
        self._scales = None
        try:
            with trio.fail_after(seconds):
                group = self._group = self._group or await self._join(seconds)
                await self._post("/pause?mode=abort&clear_cache=true", {}, seconds)
                await self._post("/start_weight_update", {}, seconds)
                for bucket in buckets(tensors):
                    await self._send(group, bucket, seconds)
                await self._post("/finish_weight_update", {"weight_version": str(version)}, seconds)
                # After a failure it must not go on: the model is in parts.
                await self._post("/resume", {}, seconds)
        except (EngineError, DeadlineExceeded, RuntimeError, trio.TooSlowError) as error:
            self._group = None
            raise WeightError(f"{self.url}: version {version} was not taken: {error}") from error

    async def _join(self, seconds: float) -> ServerGroup:
        """A new process group of this process and the server's workers. Both sides wait for each other."""
        workers = int((await self._get("/get_world_size"))["world_size"])
        group = await trio.to_thread.run_sync(ServerGroup, workers + 1, seconds)
        info = {
            "master_address": "127.0.0.1",
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.world,
        }
        async with open_nursery() as nursery:
            nursery.start_soon(self._post, "/init_weight_transfer_engine", {"init_info": info}, seconds)
            await trio.to_thread.run_sync(group.connect, abandon_on_cancel=True)
        return group

    async def _send(self, group: ServerGroup, bucket: Mapping[str, torch.Tensor], seconds: float) -> None:
        """Announce a bucket and broadcast it at the same time: each waits for the other."""
        info = {
            "names": list(bucket),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
            "shapes": [list(tensor.shape) for tensor in bucket.values()],
        }
        async with open_nursery() as nursery:
            nursery.start_soon(self._post, "/update_weights", {"update_info": info}, seconds)
            await trio.to_thread.run_sync(group.broadcast, list(bucket.values()), abandon_on_cancel=True)


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
