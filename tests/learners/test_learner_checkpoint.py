"""A checkpoint is there whole or not at all."""

from __future__ import annotations

import logging

import pytest
import torch
from learner_fakes import make_policy, write_model_dir

from streamrl_learners.checkpoint import MARKER, Checkpoints, complete_steps, export, read_marker
from streamrl_learners.fsdp import gather
from streamrl_learners.ranks import Ranks
from streamrl_queue.errors import ConfigError


@pytest.fixture
def policy():
    return make_policy()


@pytest.fixture
def adamw(policy):
    optimiser = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for p in policy.parameters():
        p.grad = torch.randn_like(p)
    optimiser.step()
    return optimiser


def make(tmp_path, keep: int = 2) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep, Ranks())


def test_weights_and_moments_come_back(tmp_path, policy, adamw):
    make(tmp_path).save(5, policy, adamw)
    other = make_policy(seed=9)
    moments = torch.optim.AdamW(other.parameters(), lr=1.0)
    make(tmp_path).load(5, other, moments)
    for a, b in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(adamw.state[a][name], moments.state[b][name])


def test_only_the_newest_are_kept(tmp_path, policy, adamw):
    checkpoints = make(tmp_path, keep=2)
    assert [checkpoints.save(step, policy, adamw) for step in (1, 2, 3)] == [1, 1, 2]
    assert complete_steps(checkpoints.directory) == [2, 3]
    assert checkpoints.newest() == 3


def test_nothing_to_resume_from(tmp_path):
    assert make(tmp_path).newest() is None


DAMAGES = {
    "no marker": "is not complete",
    "half a marker": "is not complete",
    "another's marker": "is not complete",
    "a file is short": "is not complete",
    "a file is missing": "is not complete",
    "a bit is flipped": "is damaged: __0_0.distcp is not what was written",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unsound_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, policy, adamw, damage, caplog):
    checkpoints = make(tmp_path)
    checkpoints.save(1, policy, adamw)
    checkpoints.save(2, policy, adamw)
    path = checkpoints.directory / "step-00000002"
    weights = next(path.glob("*.distcp"))
    if damage == "no marker":
        (path / MARKER).unlink()
    elif damage == "half a marker":
        (path / MARKER).write_bytes((path / MARKER).read_bytes()[:10])
    elif damage == "another's marker":
        (path / MARKER).write_bytes((path / MARKER).read_bytes().replace(b'"step":2', b'"step":3'))
    elif damage == "a bit is flipped":
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
    elif damage == "a file is short":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        weights.unlink()
    with caplog.at_level(logging.WARNING, "streamrl_learners.checkpoint"):
        assert checkpoints.newest() == 1
    assert f"{path} {DAMAGES[damage]}" in caplog.text
    checkpoints.save(2, policy, adamw)
    assert checkpoints.newest() == 2


@pytest.mark.parametrize("what", ["another model", "no metadata", "garbage"])
def test_a_checkpoint_that_torch_cannot_load_is_one_error_that_names_it(tmp_path, policy, adamw, what):
    checkpoints = make(tmp_path)
    checkpoints.save(4, policy, adamw)
    path = checkpoints.directory / "step-00000004"
    if what == "another model":
        policy = make_policy()
        policy.lm.model.norm.weight = torch.nn.Parameter(torch.ones(7))
        adamw = torch.optim.AdamW(policy.parameters())
    elif what == "no metadata":
        (path / ".metadata").unlink()
    else:
        weights = next(path.glob("*.distcp"))
        weights.write_bytes(bytes(len(weights.read_bytes())))
    with pytest.raises(ConfigError, match=r"checkpoints/step-00000004: expected a checkpoint of this model"):
        checkpoints.load(4, policy, adamw)


def test_a_kill_while_saving_leaves_the_older_checkpoint(tmp_path, policy, adamw, monkeypatch):
    checkpoints = make(tmp_path)
    checkpoints.save(1, policy, adamw)

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("streamrl_learners.checkpoint._complete", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, policy, adamw)
    assert checkpoints.newest() == 1
    assert list((checkpoints.directory / "step-00000002").iterdir())


def test_the_marker_is_written_last_and_names_every_file(tmp_path, policy, adamw, monkeypatch):
    from streamrl_learners import checkpoint

    synced = []
    real = checkpoint.sync
    monkeypatch.setattr(checkpoint, "sync", lambda path: (synced.append(path.name), real(path)))
    checkpoints = make(tmp_path)
    checkpoints.save(3, policy, adamw)
    marker = read_marker(checkpoints.directory / "step-00000003")
    assert marker is not None
    assert marker.step == 3
    assert set(marker.files) <= set(synced)
    assert ".metadata" in marker.files


def test_the_exported_model_is_read_by_transformers(tmp_path, policy):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

    source = write_model_dir(tmp_path / "base")
    (source / "model.safetensors").write_bytes(b"old")
    export(gather(policy.lm, keep=True), source, tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").exists()
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(model(input_ids=tokens).logits, policy.lm(input_ids=tokens).logits)
