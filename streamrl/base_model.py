"""The files in `base/` that every role starts from: tokenizer, chat template, model configuration.

Written before any role starts, without torch. The weights come from the learner's warm start (a tiny model) or lie
there already (a Hugging Face model directory).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from streamrl_agents.agent import Agent
from streamrl_agents.template import MORE_TEMPLATES
from streamrl_agents.vocabulary import END, PAD, build_tokenizer, write_model_files
from streamrl_learners.config import HFModel
from streamrl_learners.tiny import config_json
from streamrl_queue.errors import ConfigError

from .config import RunConfig

WANTED = ("config.json", "tokenizer.json")


def write_base(config: RunConfig, agent: Agent, base: Path) -> None:
    """Write `base/`; what is there already stays, so that a resumed run starts from the same files.

    Raises:
        ConfigError: a Hugging Face model directory lacks a file.
    """
    if (base / "config.json").exists():
        return
    base.mkdir(parents=True, exist_ok=True)
    if isinstance(config.model, HFModel):
        copy_model(Path(config.model.path), base)
    else:
        tokenizer = build_tokenizer(agent)
        write_model_files(base, tokenizer)
        ids = tokenizer.get_vocab()
        architecture = config_json(config.model, vocab_size=len(ids), eos_token_id=ids[END], pad_token_id=ids[PAD])
        text = json.dumps(architecture, indent=2)
        # Last: its presence says that the others are there.
        (base / "config.json").write_text(text + "\n")


def model_weights(source: Path) -> list[Path]:
    """The safetensors of a Hugging Face model directory.

    Raises:
        ConfigError: there is no such directory, or it lacks a file.
    """
    if not source.is_dir():
        raise ConfigError(f"model.path: expected a model's directory on this machine, found none at {source.resolve()}")
    missing = [name for name in WANTED if not (source / name).is_file()]
    weights = sorted(source.glob("*.safetensors"))
    if missing or not weights:
        lacking = ", ".join(missing or ["*.safetensors"])
        raise ConfigError(f"model.path: {source} is no model directory with safetensors: it lacks {lacking}")
    return weights


def copy_model(source: Path, base: Path) -> None:
    """Take the files of a Hugging Face model directory; weights are linked, not copied."""
    weights = model_weights(source)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copyfile(file, base / file.name)
    if (source / MORE_TEMPLATES).is_dir():
        shutil.copytree(source / MORE_TEMPLATES, base / MORE_TEMPLATES, dirs_exist_ok=True)
    for file in weights:
        (base / file.name).symlink_to(file.resolve())
