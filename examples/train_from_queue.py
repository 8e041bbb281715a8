"""GRPO in a plain PyTorch loop that trains from a queue:

    python examples/train_from_queue.py --steps 100

Sampling and scoring run in a process of their own (`sample_and_score.py`), while this one trains on what is there.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import torch
from safetensors.torch import save_file
from torch import Tensor

from sample_and_score import ROWS_PER_STEP, Policy, address
from streamrl_queue import Batch, BlockingTransferQueue, StreamingBatches


def grpo_loss(policy: Policy, batch: Batch) -> Tensor:
    """The clipped objective, summed over sampled tokens; `[rows, positions]` tensors, padded with 0."""
    tokens, sampled = batch["tokens"], batch["mask"][:, 1:] == 1
    logprobs = policy(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    ratio = (logprobs - batch["logprobs"][:, 1:])[sampled].exp()
    advantage = batch["advantage"][:, None].expand_as(sampled)[sampled]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()


def publish(queue: BlockingTransferQueue, policy: Policy, directory: Path, step: int) -> None:
    """The weights after `step` steps become the version that rows are sampled under from here on."""
    version = queue.begin_version(step, parent=None)
    file = directory / f"{version}.safetensors"
    save_file(policy.state_dict(), file)
    queue.commit_version(version, hashlib.sha256(file.read_bytes()).hexdigest())


def train(queue: BlockingTransferQueue, policy: Policy, directory: Path, steps: int) -> Iterator[float]:
    """The mean reward of each step."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.005)
    reward = 0.0
    with StreamingBatches(queue, "learn", rows_per_step=ROWS_PER_STEP, rows_per_batch=16) as batches:
        for batch in batches:
            (grpo_loss(policy, batch) / ROWS_PER_STEP).backward()  # type: ignore[no-untyped-call]
            reward += batch["reward"].sum().item() / ROWS_PER_STEP
            if batch.ends_step:
                optimizer.step()
                optimizer.zero_grad()
                batches.commit(batch.step)
                publish(queue, policy, directory, batch.step)
                # What is published is on disk. A loop that resumes saves the optimizer too, before it says this.
                batches.checkpointed(batch.step)
                yield reward
                reward = 0.0
                if batch.step == steps:
                    return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy, rewards = Policy(), []
    with tempfile.TemporaryDirectory() as name:
        # Rows are sampled under version 0 until another one is committed.
        save_file(policy.state_dict(), Path(name) / "0.safetensors")
        sides = subprocess.Popen([sys.executable, Path(__file__).with_name("sample_and_score.py"), name])
        try:
            with BlockingTransferQueue.connect(address(Path(name)), deadline=60) as queue:
                for reward in train(queue, policy, Path(name), steps):
                    rewards.append(reward)
                    print(f"step {len(rewards)}  reward {reward:.3f}", flush=True)
        finally:
            sides.terminate()
            sides.wait()
    print(f"reward {mean(rewards[:5]):.3f} → {mean(rewards[-5:]):.3f}")


if __name__ == "__main__":
    main()
