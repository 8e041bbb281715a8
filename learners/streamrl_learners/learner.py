"""One rank of the learner, from configuration to exported model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import trio

from .algorithms.metrics import Tally
from .algorithms.pieces import Algorithm
from .checkpoint import Checkpoints, export
from .config import LearnerConfig, ModelConfig, TinyModel
from .fsdp import device_of, gather, shard
from .ledger import Ledger
from .loop import Training, train
from .model import WEIGHTS, Policy, build, load_weights, save_weights
from .objective import Objective
from .optimise import Optimiser, Progress
from .publisher import Publisher
from .ranks import Ranks
from .report import Emit, Reporter
from .stream import Stream
from .warm_start import Demonstrate, warm_start

if TYPE_CHECKING:
    from streamrl_queue import BlockingTransferQueue

log = logging.getLogger(__name__)

# How often a learner that has nothing left to train looks whether it may go.
LOOK_SECONDS = 0.2


def run_learner(
    queue: BlockingTransferQueue,
    *,
    rank: int = 0,
    world: int = 1,
    store: str | None = None,
    config: LearnerConfig,
    algorithm: Algorithm,
    model: ModelConfig,
    model_dir: Path,
    run_dir: Path,
    demonstrations: Demonstrate | None = None,
    seed: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    emit: Emit = lambda metrics: None,
    resume: bool = False,
    serve_after: bool = False,
    host: str = "127.0.0.1",
    key: bytes | None = None,
    budget_bytes: int | None = None,
) -> None:
    """Train `config.steps` steps, or until `should_stop`.

    Args:
        queue: the connection of this rank; the leader (rank 0) leases, commits and publishes through it.
        rank: number of this rank, below `world`.
        world: number of learner processes.
        store: `host:port` at which rank 0 hosts the ranks' rendezvous; needed when `world` > 1.
        config: optimiser, step size, deadlines.
        algorithm: the pieces, and how they are combined.
        model: what is trained.
        model_dir: holds `config.json` and the tokenizer; a warm start leaves `model.safetensors` there.
        run_dir: gets `checkpoints/`, and `model/` when all steps are done.
        demonstrations: one scripted episode each, for the warm start; None trains from the weights as they are.
        seed: of fresh weights and of the warm start.
        should_stop: asked between micro-batches; a partial step is given back, the last whole one checkpointed.
        emit: gets one dict per step, on the leader.
        resume: go on from the newest sound checkpoint of `run_dir`.
        serve_after: after the last step, keep bringing the last version to joining engines until `should_stop`.
        host: address under which engines reach the leader for a transfer.
        key: key of the engines' RPC.
        budget_bytes: what rows may take in the journal. When trained rows take it up, so that no others come, they go
            with a checkpoint ahead of its time; None: the run waits for one that is due.

    Raises:
        StreamRLError: whatever ended the training; it names the step or the engine.
    """
    torch.set_num_threads(config.threads)
    torch.set_flush_denormal(True)
    ranks = Ranks.join(rank, world, store, config.device)
    policy = _policy(queue, ranks, config, model, model_dir, demonstrations, seed, should_stop)
    if policy is None:
        return ranks.leave()
    policy = shard(policy, ranks, config.device)
    publisher = Publisher(queue, config, ranks, should_stop=should_stop, host=host, key=key)
    run = _training(queue, ranks, policy, publisher, config, algorithm, run_dir, should_stop, emit, budget_bytes)
    if resume:
        queue.report("loads the checkpoint")
    reached = run.ledger.resume() if resume else 0
    queue.report("waits for engines")
    publisher.publish(policy, reached)
    publisher.finish()  # there are no rows before engines have a version
    reached = train(run, reached + 1, config.steps)
    run.ledger.checkpoint(reached)
    publisher.finish()
    if not run.stream.stopped:
        tensors = gather(policy.lm, keep=ranks.leads)
        if ranks.leads:
            export(tensors, model_dir, run_dir / "model")
        if ranks.leads and serve_after:
            _serve(queue, should_stop)
    return ranks.leave()


def _policy(
    queue: BlockingTransferQueue,
    ranks: Ranks,
    config: LearnerConfig,
    model: ModelConfig,
    model_dir: Path,
    demonstrations: Demonstrate | None,
    seed: int,
    should_stop: Callable[[], bool],
) -> Policy | None:
    """The policy at step 0, warm-started by the leader unless it was before; None after a stop request. Collective."""
    queue.report("makes the model" if isinstance(model, TinyModel) else "loads the model")
    policy = build(model, model_dir, seed, config)
    weights = model_dir / WEIGHTS
    stopped = False
    if ranks.leads and isinstance(model, TinyModel) and not weights.exists():
        if demonstrations:
            losses = warm_start(policy, demonstrations, model.warm_start, seed, queue.report, should_stop)
            log.info("warm start: %d steps, last loss %.3f nats", len(losses), losses[-1] if losses else 0.0)
            stopped = should_stop()
        if not stopped:
            save_weights(policy.lm, weights)
    if ranks.share([int(stopped)] if ranks.leads else None)[0]:
        return None
    if ranks.world > 1 and isinstance(model, TinyModel):
        load_weights(policy.lm, weights)
    return policy


def _training(
    queue: BlockingTransferQueue,
    ranks: Ranks,
    policy: Policy,
    publisher: Publisher,
    config: LearnerConfig,
    algorithm: Algorithm,
    run_dir: Path,
    should_stop: Callable[[], bool],
    emit: Emit,
    budget_bytes: int | None,
) -> Training:
    tally = Tally()
    optimiser = Optimiser(policy, config, tally, ranks)
    checkpoints = Checkpoints(run_dir / "checkpoints", config.keep_checkpoints, ranks)
    ledger = Ledger(queue, checkpoints, policy, optimiser.adamw, ranks, every=config.checkpoint_every)
    stream = Stream(
        queue,
        config,
        algorithm,
        tally,
        ranks=ranks,
        device=device_of(policy),
        should_stop=should_stop,
        budget_bytes=budget_bytes,
        make_room=ledger.make_room,
    )
    return Training(
        policy=policy,
        stream=stream,
        objective=Objective(algorithm, tally),
        optimiser=optimiser,
        ledger=ledger,
        publisher=publisher,
        reporter=Reporter(queue, publisher, emit, ranks),
        progress=Progress(config.no_signal_steps),
    )


def _serve(queue: BlockingTransferQueue, should_stop: Callable[[], bool]) -> None:
    """Wait for the stop request; the publisher goes on in the queue's thread, and its error ends the wait."""
    queue.report("done; keeps engines at the last version")
    while not should_stop():
        queue.portal.call(trio.sleep, LOOK_SECONDS)
