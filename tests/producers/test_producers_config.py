"""Configuration says what is wrong before it costs anything, and is light to import."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from streamrl_producers.config import EmbeddedEngine, RolloutConfig
from streamrl_queue.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        (EmbeddedEngine, {"count": 0}, "engine.count"),
        (EmbeddedEngine, {"slots": 64, "step_tokens": 32}, "engine.step_tokens"),
        (RolloutConfig, {"concurrency": 0}, "rollout.concurrency"),
        (RolloutConfig, {"temperature": -1.0}, "rollout.temperature"),
        (RolloutConfig, {"top_p": 0.0}, "rollout.top_p"),
        (RolloutConfig, {"turn_seconds": 0.0}, "rollout.turn_seconds"),
        (RolloutConfig, {"max_turn_tokens": 100, "max_tokens": 50}, "rollout.max_turn_tokens"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(kind: type, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        kind(**change)


def test_unknown_keys_and_values_are_refused() -> None:
    for data in ({"kind": "embedded", "slotz": 4}, {"kind": "embedded", "kv_on_update": "drop"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(data, EmbeddedEngine)


def test_eval_rows_are_described_by_their_own_sampling() -> None:
    config = RolloutConfig(temperature=0.8, top_p=0.9, top_k=5)
    assert config.sampling("train") == {"temperature": 0.8, "top_p": 0.9, "top_k": 5.0}
    assert config.sampling("eval") == {"temperature": 0.0, "top_p": 1.0, "top_k": 0.0}


def test_producers_and_their_configuration_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, streamrl_producers.config, streamrl_producers.producer\n"
        "sys.exit(', '.join({'torch', 'transformers', 'tokenizers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
