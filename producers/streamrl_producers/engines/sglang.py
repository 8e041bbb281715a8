"""SGLang as an engine: its native `/generate`, and weights through a process group of its own.

Log-probs are those of the temperature-scaled distribution, before top-p and top-k; a greedy token's is that at
temperature 1. A server with SGLANG_RETURN_ORIGINAL_LOGPROB=1 gives others, which is measured.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

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

GRACE_SECONDS: Final = 5.0  # an aborted request answers with what it has; that answer may take so long
ABORT_SECONDS: Final = 0.1  # between two requests to end the same generation
RESERVED_TOKENS: Final = 5  # of a context that prompt and answer cannot have: a prompt of 6 below it is the longest
TOP_K_OFF: Final = -1


class _Version(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any] | None
    completion_tokens: int
    weight_versions: list[_Version]
    output_token_logprobs: list[tuple[float, int, Any]] = []


class _Answer(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


class SGLang(Adapter):
    """An SGLang server."""

    kind = "sglang"
    oldest = (0, 5, 22)
    paths: ClassVar = {
        "/generate": "sampling",
        "/ready": "health",
        "/abort_request": "ending requests",
        "/v1/loads": "load",
        "/init_weights_update_group": "weights",
        "/begin_weight_update": "weights",
        "/update_weights_from_distributed": "weights",
        "/end_weight_update": "weights",
    }
    helps = "it may stand behind a router: give the address of the server itself"

    def __init__(self, url: str, *, vocab_size: int) -> None:
        super().__init__(url, vocab_size=vocab_size)
        self._group: ServerGroup | None = None

    async def _version(self) -> str:
        return str((await self._get("/server_info")).get("version", "unknown"))

    async def _max_tokens(self) -> int:
        return int((await self._get("/v1/models"))["data"][0]["max_model_len"]) - RESERVED_TOKENS

    async def _check_meaning(self, sampling: Sampling) -> None:
        if sampling.temperature and (sampling.top_p < 1 or sampling.top_k):
            raise EngineError(
                f"sampling: top_p {sampling.top_p} and top_k {sampling.top_k}: SGLang gives log-probs before top-p and "
                "top-k, which are not those of what is sampled from; use top_p=1 and top_k=0"
            )
        if sampling.temperature not in (0, 1) and not await self.scales():
            raise EngineError(
                f"sampling: temperature {sampling.temperature}: this server's log-probs are not scaled by it; start it "
                "without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    async def ready(self) -> bool:
        try:
            await self._get("/ready")
        except StreamRLError:
            return False
        return True

    async def _generate(
        self, tokens: npt.NDArray[np.int32], sampling: Sampling, session: str, seconds: float
    ) -> Generated:
        # Aborts match by prefix: ids of one length are no prefix of each other.
        request = uuid.uuid4().hex
        body = {
            "rid": request,
            "input_ids": tokens.tolist(),
            "return_logprob": True,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p if sampling.temperature else 1.0,
                "top_k": (sampling.top_k if sampling.temperature else 0) or TOP_K_OFF,
                "max_new_tokens": sampling.max_tokens,
                # It would switch the stop ids off as well.
                "ignore_eos": not sampling.stop_ids,
                "stop_token_ids": list(sampling.stop_ids),
            },
        }
        async with open_nursery() as nursery:
            nursery.start_soon(self._end_after, seconds, request)
            answer = await self._post("/generate", body, seconds + GRACE_SECONDS)
            nursery.cancel_scope.cancel()
        return generated(msgspec.convert(answer, _Answer, strict=False), sampling)

    async def _end_after(self, seconds: float, request: str) -> None:
        """End the request after its time; again and again, because the server ignores ids that it does not know yet."""
        await trio.sleep(seconds)
        while True:
            await self._post("/abort_request", {"rid": request})
            await trio.sleep(ABORT_SECONDS)

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def running(self) -> int:
        """Requests that the server has, running or waiting."""
        loads = (await self._get("/v1/loads"))["loads"]
        return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)

    async def logprobs(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        body = {
            "input_ids": list(tokens),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True},
        }
        told = (await self._post("/generate", body))["meta_info"]["input_token_logprobs"]
        # It echoes the vocabulary's last id as 0, in the place of ids of images; the log-prob is the right one's.
        if [entry[1] for entry in told] != [0 if token == self.vocab_size - 1 else token for token in tokens]:
            raise EngineError(f"{self.url}: prompt log-probs belong to other ids than were sent")
        # The first token follows nothing.
        return np.array([entry[0] for entry in told[1:]], np.float32)

    async def update(self, tensors: Mapping[str, torch.Tensor], version: int, seconds: float) -> None:
        # Weights that the server made up may give every token the same probability.
        self._scales = None
        try:
            with trio.fail_after(seconds):
                group = self._group = self._group or await self._join(seconds)
                await self._post("/begin_weight_update", {"selector": "all"}, seconds)
                parts = list(buckets(tensors))
                for i, bucket in enumerate(parts):
                    last = i == len(parts) - 1
                    await self._send(group, bucket, str(version) if last else None, seconds)
                await self._post("/end_weight_update", {}, seconds)
        except (EngineError, DeadlineExceeded, RuntimeError, trio.TooSlowError) as error:
            self._group = None
            raise WeightError(f"{self.url}: version {version} was not taken: {error}") from error

    async def _join(self, seconds: float) -> ServerGroup:
        """A new process group of this process and the server's workers. Both sides wait for each other."""
        workers = int((await self._get("/server_info")).get("tp_size", 1))
        group = await trio.to_thread.run_sync(ServerGroup, workers + 1, seconds)
        async with open_nursery() as nursery:
            nursery.start_soon(self._invite, group, workers, seconds)
            # The prefixes under which `torch.distributed` keeps the Gloo half of a group of that name.
            prefixes = (group.name, f"{group.name}/", "cpu/")
            await trio.to_thread.run_sync(group.connect, prefixes, abandon_on_cancel=True)
        return group

    async def _invite(self, group: ServerGroup, workers: int, seconds: float) -> None:
        body = {
            "master_address": "127.0.0.1",
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": workers + 1,
            "group_name": group.name,
            "backend": "gloo",
        }
        await self._accepted("/init_weights_update_group", body, seconds)

    async def _send(
        self, group: ServerGroup, bucket: Mapping[str, torch.Tensor], version: str | None, seconds: float
    ) -> None:
        """Announce a bucket and broadcast it at the same time: each waits for the other."""
        body = {
            "names": list(bucket),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
            "shapes": [list(tensor.shape) for tensor in bucket.values()],
            "group_name": group.name,
            "flush_cache": True,
            "weight_version": version,
        }
        async with open_nursery() as nursery:
            nursery.start_soon(self._accepted, "/update_weights_from_distributed", body, seconds)
            await trio.to_thread.run_sync(group.broadcast, list(bucket.values()), abandon_on_cancel=True)

    async def _accepted(self, path: str, body: Any, seconds: float) -> None:
        answer = await self._post(path, body, seconds)
        if not answer["success"]:
            raise EngineError(f"{self.url}{path}: {answer['message']}")


def generated(answer: _Answer, sampling: Sampling) -> Generated:
    """What SGLang answered, in this project's terms.

    Raises:
        EngineError: its parts contradict each other.
    """
    meta, ids = answer.meta_info, answer.output_ids
    if [entry[1] for entry in meta.output_token_logprobs] != ids or meta.completion_tokens != len(ids):
        raise EngineError(
            f"SGLang answered {len(ids)} ids, counted {meta.completion_tokens} and gave log-probs of "
            f"{len(meta.output_token_logprobs)}, not all of the same tokens"
        )
    spans = tuple(Span(s.start, parse_label(s.version), parse_label(s.version)) for s in meta.weight_versions)
    return Generated(
        np.array(ids, np.int32),
        np.array([entry[0] for entry in meta.output_token_logprobs], np.float32),
        spans if ids else (),
        _reason(str((meta.finish_reason or {}).get("type")), ids, sampling),
    )


def _reason(told: str, ids: Sequence[int], sampling: Sampling) -> FinishReason:
    if told == "stop":
        # It also stops at the end-of-sequence ids of the model's own files; who did not ask for that goes on.
        return "stop" if ids and ids[-1] in sampling.stop_ids else "aborted"
    return "length" if told == "length" else "aborted"
