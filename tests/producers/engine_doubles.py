"""Real HTTP servers in this process that speak as SGLang 0.5.23 and vLLM 0.32.0 were seen to speak, with a tiny model.

What an answer looks like is compared with recorded exchanges in `test_engines_doubles.py`; how a server behaves is
compared by running the conformance suite on both.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist

VOCAB, CONTEXT = 320, 256
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    # Heads of 32: the narrowest that vLLM has on a CPU.
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
GROUP_SECONDS = 30.0


class Refusal(Exception):
    """Answer with this status and JSON."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status)
        self.status, self.body = status, body


def wrong(message: str) -> Refusal:
    return Refusal(400, {"error": {"message": message}})


def unsuccessful(message: str) -> Refusal:
    return Refusal(400, {"success": False, "message": message})


class Request:
    """One generation at a double."""

    def __init__(self, id: str, ids: list[int], settings: Mapping[str, Any]) -> None:
        self.id, self.ids, self.settings = id, ids, settings
        self.sampled: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[str] = []
        self.aborted = False


class Double:
    """What both doubles share: a model, requests in flight, and one step at a time."""

    def __init__(self, model: Any, version: str = "default", scaled: bool = True) -> None:
        self.model, self.version, self.scaled = model, version, scaled
        self.requests: dict[str, Request] = {}
        self.asked: list[tuple[str, Any]] = []
        # A request that samples takes the second again and again: who only wants to look must not queue behind it.
        self.registry, self.stepping = threading.Lock(), threading.Lock()
        self.dead = False
        self.random = torch.Generator().manual_seed(0)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        raise NotImplementedError

    def run(self, request: Request, most: int, temperature: float, stops: set[int]) -> str:
        """Sample until an end; returns its kind."""
        while True:
            with self.stepping:
                if request.aborted:
                    return "abort"
                if len(request.sampled) == most:
                    return "length"
                self.step(request, temperature)
            if request.sampled[-1] in stops:
                return "stop"

    def step(self, request: Request, temperature: float) -> None:
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([request.ids + request.sampled])).logits[0, -1].float()
        raw = logits.log_softmax(-1)
        scaled = (logits / temperature).log_softmax(-1) if temperature else raw
        token = int(torch.multinomial(scaled.exp(), 1, generator=self.random) if temperature else raw.argmax())
        request.sampled.append(token)
        request.logprobs.append(float((scaled if self.scaled else raw)[token]))
        request.versions.append(self.version)

    def prompt_logprobs(self, ids: list[int]) -> list[float]:
        with torch.no_grad():
            logprobs = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        return [float(x) for x in logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]]

    def spans(self, request: Request) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for i, version in enumerate(request.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = i + 1
            else:
                spans.append({"version": version, "start": i, "end": i + 1})
        return spans

    def receive(self, group: Any, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        """Take one broadcast per tensor into the model."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        parameters = dict(self.model.named_parameters())
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast([tensor], options).wait()
            with self.stepping, torch.no_grad():
                parameters[name].copy_(tensor)

    def abort(self, prefix: str) -> None:
        """As SGLang does it: a live id, and every id that it is a prefix of."""
        with self.registry:
            for request in self.requests.values():
                request.aborted |= request.id.startswith(prefix)


def join(address: str, port: int, world: int, rank: int, prefixes: tuple[str, ...] = ()) -> Any:
    """A worker's side of the group through which weights come."""
    seconds = timedelta(seconds=GROUP_SECONDS)
    store: Any = dist.TCPStore(address, port, world, False, seconds)
    for prefix in prefixes:
        store = dist.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, rank, world, seconds)


class SGLangDouble(Double):
    """Speaks as SGLang 0.5.23."""

    server_version = "0.5.23"
    paths = (
        "/server_info /v1/models /v1/loads /ready /health /generate /abort_request /begin_weight_update "
        "/end_weight_update /init_weights_update_group /update_weights_from_distributed"
    )

    def __init__(self, model: Any, version: str = "default", scaled: bool = True) -> None:
        super().__init__(model, version, scaled)
        self.groups: dict[str, Any] = {}
        self.updating = False

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/openapi.json":
            return 200, {"paths": {path: {} for path in self.paths.split()}}
        if path not in self.paths.split():
            return 404, {"detail": "Not Found"}
        if method == "POST" and body is None:
            raise Refusal(400, {"object": "error", "message": "1 validation error", "type": "Bad Request", "code": 400})
        return 200, getattr(self, "_" + path.strip("/").replace("/", "_"))(body)

    def _server_info(self, body: Any) -> Any:
        return {"version": self.server_version, "tp_size": 1}

    def _v1_models(self, body: Any) -> Any:
        model = {"id": "m", "object": "model", "created": 0, "owned_by": "sglang", "root": "m", "parent": None}
        return {"object": "list", "data": [model | {"max_model_len": CONTEXT}]}

    def _v1_loads(self, body: Any) -> Any:
        with self.registry:
            tokens = sum(len(r.ids) + len(r.sampled) for r in self.requests.values())
            load = {"num_running_reqs": len(self.requests), "num_waiting_reqs": 0, "num_total_tokens": tokens}
        return {"version": self.server_version, "loads": [load]}

    def _ready(self, body: Any) -> Any:
        return None

    _health = _ready

    def _generate(self, body: Any) -> Any:
        settings, ids = body.get("sampling_params", {}), body.get("input_ids")
        if ids is None:
            raise wrong("Either text, input_ids or input_embeds should be provided.")
        if not isinstance(ids, list):
            message = "1 validation error"
            raise Refusal(
                400, {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
            )
        known = {"temperature", "top_p", "top_k", "max_new_tokens", "ignore_eos", "stop_token_ids"}
        if unknown := settings.keys() - known:
            raise Refusal(400, {"error": f"unknown field `{unknown.pop()}`, expected one of `max_new_tokens`"})
        temperature, most = settings.get("temperature", 1.0), settings.get("max_new_tokens", 128)
        if temperature < 0:
            raise wrong(f"temperature must be a non-negative finite number, got {temperature}.")
        if len(ids) > CONTEXT:
            raise wrong(f"The input ({len(ids)} tokens) is longer than the model's context length ({CONTEXT} tokens).")
        if len(ids) + most > CONTEXT:
            raise wrong(f"Requested token count exceeds the model's maximum context length of {CONTEXT} tokens.")
        if len(ids) > CONTEXT - 6:
            raise wrong(f"Input length ({len(ids)} tokens) exceeds the maximum allowed length ({CONTEXT - 6} tokens).")
        if any(not 0 <= id < VOCAB for id in ids):
            self.dead = True
            raise ConnectionAbortedError
        request = Request(body.get("rid") or uuid.uuid4().hex, ids, settings)
        with self.registry:
            if request.id in self.requests:
                raise wrong(f"Duplicate request ID detected: {request.id}")
            self.requests[request.id] = request
        stops = set() if settings.get("ignore_eos") else {*settings.get("stop_token_ids", ()), CONFIG["eos_token_id"]}
        try:
            kind = self.run(request, most, temperature, stops)
        finally:
            with self.registry:
                del self.requests[request.id]
        return self._answered(request, kind, body)

    def _answered(self, request: Request, kind: str, body: Any) -> Any:
        reason: dict[str, Any] = {"type": kind}
        match kind:
            case "length":
                reason["length"] = len(request.sampled)
            case "stop":
                reason["matched"] = request.sampled[-1]
            case "abort":
                reason |= {"message": "Aborted", "status_code": None, "err_type": None}
        meta = {
            "id": request.id,
            "finish_reason": reason,
            "prompt_tokens": len(request.ids),
            "weight_version": self.version,
            "num_retractions": 0,
            "completion_tokens": len(request.sampled),
            "cached_tokens": 0,
            "weight_versions": self.spans(request),
        }
        if body.get("return_logprob"):
            sampled = [[p, id, None] for p, id in zip(request.logprobs, request.sampled, strict=True)]
            prompt: list[Any] = []
            if body.get("logprob_start_len") == 0:
                told = [None, *self.prompt_logprobs(request.ids)]
                # The last id of the vocabulary is echoed as 0.
                echoed = [0 if id == VOCAB - 1 else id for id in request.ids]
                prompt = [[p, id, None] for p, id in zip(told, echoed, strict=True)]
            meta |= {"input_token_logprobs": prompt, "output_token_logprobs": sampled}
            meta["output_token_logprobs_length"] = len(sampled)
        return {"text": "", "output_ids": request.sampled, "meta_info": meta}

    def _abort_request(self, body: Any) -> Any:
        live = body.get("abort_all") or body.get("rid") in self.requests
        if live:
            self.abort("" if body.get("abort_all") else body["rid"])

    def _init_weights_update_group(self, body: Any) -> Any:
        name = body["group_name"]
        prefixes = (name, f"{name}/", "cpu/")
        address, port, world, rank = (body[k] for k in ("master_address", "master_port", "world_size", "rank_offset"))
        self.groups[name] = join(address, port, world, rank, prefixes)
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    def _begin_weight_update(self, body: Any) -> Any:
        if self.updating:
            raise unsuccessful("a weight-update session is already open; call end_weight_update() first")
        self.updating = True
        return {"success": True, "message": "Success"}

    def _end_weight_update(self, body: Any) -> Any:
        if not self.updating:
            raise unsuccessful("no weight-update session is open; call begin_weight_update() first")
        self.updating = False
        return {"success": True, "message": "Success"}

    def _update_weights_from_distributed(self, body: Any) -> Any:
        if not self.updating:
            place = "begin_weight_update() and end_weight_update()"
            raise unsuccessful(f"update_weights_from_distributed must run between {place}")
        if (group := self.groups.get(body.get("group_name", "weight_update_group"))) is None:
            raise unsuccessful("Failed to receive weights: Group not in []. Call `init_weights_update_group` first.")
        self.receive(group, body["names"], body["dtypes"], body["shapes"])
        if body.get("weight_version"):
            self.version = body["weight_version"]
        return {"success": True, "message": "Succeeded to update parameter online."}


class VLLMDouble(Double):
    """Speaks as vLLM 0.32.0 in development mode with --enable-scale-out and weights over Gloo."""

    server_version = "0.32.0"
    paths = (
        "/version /v1/models /health /inference/v1/generate /pause /resume /get_world_size "
        "/init_weight_transfer_engine /start_weight_update /update_weights /finish_weight_update"
    )

    def __init__(self, model: Any, version: str = "default", scaled: bool = True) -> None:
        super().__init__(model, version, scaled)
        self.group: Any = None
        self.going = threading.Event()
        self.going.set()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        path, _, query = path.partition("?")
        if path == "/openapi.json":
            return 200, {"paths": {path: {} for path in self.paths.split()}}
        match path if path in self.paths.split() else "":
            case "/version":
                return 200, {"version": self.server_version}
            case "/v1/models":
                return 200, {"object": "list", "data": [{"id": "m", "max_model_len": CONTEXT}]}
            case "/get_world_size":
                return 200, {"world_size": 1}
            case "/health" | "/start_weight_update":
                return 200, None
            case "/pause":
                self.going.clear()
                if "mode=abort" in query:
                    self.abort("")
                return 200, {"status": "paused"}
            case "/resume":
                self.going.set()
                return 200, {"status": "resumed"}
            case "/init_weight_transfer_engine":
                info = body["init_info"]
                self.group = join(info["master_address"], info["master_port"], info["world_size"], 1)
                return 200, {"message": "Weight transfer initialized"}
            case "/update_weights":
                info = body["update_info"]
                self.receive(self.group, info["names"], info["dtype_names"], info["shapes"])
                return 200, {"message": "Weights updated"}
            case "/finish_weight_update":
                self.version = body["weight_version"]
                return 200, None
            case "/inference/v1/generate":
                return 200, self._generate(body)
        return 404, {"detail": "Not Found"}

    def _generate(self, body: Any) -> Any:
        settings, ids = body["sampling_params"], body["token_ids"]
        if not 0 <= settings.get("temperature", 1.0) <= 2:
            raise wrong(f"temperature must be in [0, 2], got {settings['temperature']}.")
        request = Request(body.get("request_id") or uuid.uuid4().hex, ids, settings)
        with self.registry:
            self.requests[request.id] = request
        # A request that comes while the server is paused waits for its turn.
        self.going.wait(GROUP_SECONDS)
        stops = set(settings.get("stop_token_ids", ()))
        if not settings.get("ignore_eos"):
            stops.add(CONFIG["eos_token_id"])
        try:
            kind = self.run(request, settings.get("max_tokens", 16), settings.get("temperature", 1.0), stops)
        finally:
            with self.registry:
                del self.requests[request.id]
        sampled = zip(request.sampled, request.logprobs, strict=True)
        content = [{"token_id": token, "logprob": logprob} for token, logprob in sampled]
        choice = {"index": 0, "token_ids": request.sampled, "logprobs": {"content": content}, "finish_reason": kind}
        prompt = None
        if settings.get("prompt_logprobs") is not None:
            told = [{str(id): {"logprob": p}} for p, id in zip(self.prompt_logprobs(ids), ids[1:], strict=True)]
            prompt = [None, *told]
        choices = [choice | {"weight_versions": self.spans(request)}]
        return {"request_id": request.id, "choices": choices, "prompt_logprobs": prompt}


@contextmanager
def served(double: Double, port: int = 0) -> Iterator[str]:
    """The URL of a double that listens on this host, on a free port unless one is given."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Headers and body leave as two packets; the second must not wait for the first's receipt.
        disable_nagle_algorithm = True

        def _reply(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            double.asked.append((self.path, body))
            try:
                if double.dead:
                    raise ConnectionAbortedError
                status, answer = double.answer(self.command, self.path, body)
            except Refusal as refusal:
                status, answer = refusal.status, refusal.body
            except ConnectionAbortedError:
                self.close_connection = True
                return
            content = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            if content:
                self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _reply

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        double.abort("")
        server.shutdown()
        thread.join()
        server.server_close()
