"""The other sides of `train_from_queue.py`: a queue, a sampler and a scorer, in one process.

The task: say the digit of the prompt twice, then stop. A stage is data; here are three:

    sample   row by row: the policy in force completes a prompt
    score    group by group: the reward of each completion, and by how much it beats its group
    learn    the trainer's
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import torch
import trio
from safetensors.torch import load_file
from torch import Tensor, nn

from streamrl_queue import Admission, Flow, Stage, TransferQueue, open_broker

ROWS_PER_STEP, MEMBERS, LONGEST = 64, 8, 4
STOP, WORDS = 10, 11

FLOW = Flow(
    stages=(
        Stage(name="sample", reads=("prompt",), writes=("tokens", "mask", "logprobs"), admits=True),
        Stage(name="score", reads=("tokens",), writes=("reward", "advantage"), unit="group"),
        Stage(name="learn", reads=("tokens", "mask", "logprobs", "reward", "advantage"), seconds=None, trains=True),
    ),
    # No token is trained on more than one optimizer step after the one it was sampled under.
    admission=Admission(max_staleness=1, rows_per_step=ROWS_PER_STEP),
    waiting_rows=4 * ROWS_PER_STEP,
)


class Policy(nn.Module):
    """Logits of the next word: `[rows, positions]` → `[rows, positions, WORDS]`."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.context = nn.GRU(32, 64, batch_first=True)
        self.logits = nn.Linear(64, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.context(self.words(tokens))
        logits: Tensor = self.logits(states)
        return logits


def address(directory: Path) -> str:
    return f"ipc://{directory}/queue"


def reward(tokens: Sequence[int]) -> float:
    """The share of words that are right, of those said and of those that should be."""
    digit, *said = tokens
    wanted = (digit, digit, STOP)
    return sum(a == b for a, b in zip(said, wanted, strict=False)) / max(len(said), len(wanted))


@torch.no_grad()
def complete(policy: Policy, prompts: Sequence[int]) -> pa.RecordBatch:
    """The columns that the stage `sample` writes."""
    tokens, logprobs = torch.tensor(prompts)[:, None], torch.full((len(prompts), 1), float("nan"))
    for _ in range(LONGEST):
        scores = policy(tokens)[:, -1].log_softmax(-1)
        word = scores.exp().multinomial(1)
        tokens, logprobs = torch.cat([tokens, word], 1), torch.cat([logprobs, scores.gather(1, word)], 1)
    lengths = [line.index(STOP) + 1 if STOP in line else len(line) for line in tokens.tolist()]

    def lists(lines: Tensor, kind: pa.DataType) -> pa.Array:
        return pa.array([line[:n] for line, n in zip(lines.tolist(), lengths, strict=True)], pa.large_list(kind))

    mask = torch.ones_like(tokens)
    mask[:, 0] = 0
    columns = {
        "tokens": lists(tokens, pa.int32()),
        "mask": lists(mask, pa.uint8()),
        "logprobs": lists(logprobs, pa.float32()),
    }
    return pa.RecordBatch.from_pydict(columns)


async def ask(queue: TransferQueue) -> None:
    while True:
        await queue.put(pa.RecordBatch.from_pydict({"prompt": list(range(10))}), members=MEMBERS, wait=600)


async def sample(queue: TransferQueue, directory: Path) -> None:
    policy, loaded = Policy(), None
    while True:
        if not (lease := await queue.lease("sample", rows=32, wait=10)):
            continue
        assert lease.batch is not None
        if lease.version != loaded:
            policy.load_state_dict(load_file(directory / f"{lease.version}.safetensors"))
            loaded = lease.version
        said = complete(policy, lease.batch["prompt"].to_pylist())
        await queue.write(lease, said.append_column("row", lease.batch["row"]))


async def score(queue: TransferQueue) -> None:
    while True:
        if not (lease := await queue.lease("score", rows=32, wait=10)):
            continue
        assert lease.batch is not None
        # Whole groups come one after another.
        rewards = torch.tensor([reward(tokens) for tokens in lease.batch["tokens"].to_pylist()]).view(-1, MEMBERS)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 0.1)
        columns = {
            "row": lease.batch["row"],
            "reward": pa.array(rewards.flatten().tolist(), pa.float64()),
            "advantage": pa.array(advantages.flatten().tolist(), pa.float32()),
        }
        await queue.write(lease, pa.RecordBatch.from_pydict(columns))


async def main(directory: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    async with (
        open_broker(FLOW, directory / "journal", bind=address(directory)),
        TransferQueue.connect(address(directory)) as queue,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(ask, queue)
        nursery.start_soon(sample, queue, directory)
        nursery.start_soon(score, queue)


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]))
