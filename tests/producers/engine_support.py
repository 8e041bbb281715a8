"""Small models and batches that the engine's tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from streamrl_producers.engines.embedded.architecture import Architecture
from streamrl_producers.engines.embedded.batch import Batch, Request
from streamrl_producers.engines.embedded.decoder import Decoder
from streamrl_producers.engines.protocol import Sampling

VOCAB = 61


def model(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    """A random tiny Qwen2 in float32, with biases and norms that are not trivial."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    } | changes
    return randomised(Qwen2ForCausalLM(Qwen2Config(**settings)), seed)


def llama(seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    return randomised(LlamaForCausalLM(config), seed)


def randomised(made: Any, seed: int) -> Any:
    made.config.architectures = [type(made).__name__]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1) * 0.5)
    return made.eval()


def architecture(made: Any) -> Architecture:
    return Architecture.parse(made.config.to_dict(), "test")


def tensors(made: Any) -> dict[str, torch.Tensor]:
    """Every parameter once, as a learner sends them: a tied head is not among them."""
    return {name: parameter.detach().clone() for name, parameter in made.named_parameters()}


def batch(made: Any, *, slots: int = 4, context: int = 96, step_tokens: int = 64, version: int = 1) -> Batch:
    """A batch that samples from `made`."""
    decoder = Decoder(architecture(made), slots=slots, context=context)
    ready = Batch(decoder, step_tokens=step_tokens, entropy=1)
    ready.reweigh(decoder.build(tensors(made)), version, recompute=True)
    return ready


def request(tokens: Any, session: str = "", **sampling: Any) -> Request:
    return Request(np.asarray(tokens, np.int32), Sampling(**sampling), session)


def prompt(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, n).astype(np.int32)


def finish(ready: Batch, *requests: Request) -> None:
    """Submit and step until all have ended."""
    for one in requests:
        ready.submit(one)
    while ready.has_work:
        ready.step()
    ready.ended()


def reference(made: Any, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of tokens[1:] by transformers, without any cache."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = (made(ids).logits[0, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()


def deviation(made: Any, one: Request, temperature: float = 1.0) -> float:
    """Largest difference in nats between the log-probs of a finished request and those of transformers."""
    assert one.result is not None, one.error
    whole = np.concatenate([one.tokens, one.result.tokens])
    expected = reference(made, whole, temperature)[len(one.tokens) - 1 :]
    return float(np.abs(expected - one.result.logprobs).max())
