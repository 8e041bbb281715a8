"""`python -m streamrl.runtime.role NAME --run DIR`: one process of a run, told by its name who it is.

Each function here only puts together what the parts provide. SIGTERM means: finish what cannot be given back,
give back the rest, end.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import logging
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

import msgspec
import trio

from streamrl_producers.config import EmbeddedEngine
from streamrl_queue.keys import find_key

from ..config import RunConfig, flow_of, load_file
from .failure import LastWords, first_error
from .lifeline import die_with_parent
from .rundir import Launch, RunDirectory

log = logging.getLogger("streamrl.role")

CONNECT_SECONDS: Final = 30.0
"""All roles start at once; the broker needs about half a second, on a crowded machine several."""

SHARED_MEMORY: Final = "/dev/shm" if os.path.isdir("/dev/shm") else None


def kind_of(name: str) -> str:
    """`engine` for `engine-0`."""
    return name.rpartition("-")[0] or name


@dataclass(frozen=True)
class Context:
    """What a role knows: its name, its run and how to reach the queue."""

    name: str
    run: RunDirectory
    config: RunConfig
    launch: Launch

    @property
    def kind(self) -> str:
        return kind_of(self.name)

    @property
    def number(self) -> int:
        return int(self.name.rpartition("-")[2])

    @property
    def key(self) -> bytes | None:
        """The queue's key, from its file."""
        return find_key(self.config.queue.key_file)

    def connect(self, endpoint: str | None = None) -> AbstractAsyncContextManager[Any]:
        """A session at the queue under this role's name."""
        from streamrl_queue import TransferQueue

        return TransferQueue.connect(
            self.launch.address,
            key=self.key,
            role=self.kind,
            name=self.name,
            endpoint=endpoint,
            deadline=CONNECT_SECONDS,
        )


async def _until_sigterm(body: Callable[[], Awaitable[None]]) -> None:
    """Run `body`; SIGTERM cancels it."""
    async with trio.open_nursery() as nursery:

        async def listen(task_status: trio.TaskStatus[None]) -> None:
            with trio.open_signal_receiver(signal.SIGTERM) as signals:
                task_status.started()
                async for _ in signals:
                    nursery.cancel_scope.cancel()

        await nursery.start(listen)
        await body()
        nursery.cancel_scope.cancel()


@contextmanager
def journal_directory(config: RunConfig, run: RunDirectory) -> Iterator[Path]:
    """Where the journal lies: in the run, or for durability `memory` in shared memory until the broker ends."""
    if config.queue.durability != "memory":
        yield run.journal
        return
    with tempfile.TemporaryDirectory(prefix="streamrl-", dir=SHARED_MEMORY, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def broker(context: Context) -> None:
    """The TransferQueue's broker on this run's journal."""
    from streamrl_queue import open_broker
    from streamrl_queue.metrics import serve_metrics

    config = context.config
    flow = flow_of(config)

    async def body() -> None:
        with journal_directory(config, context.run) as directory:
            opened = open_broker(
                flow,
                directory,
                bind=context.launch.address,
                durability=config.queue.durability,
                segment_bytes=config.queue.segment_mebibytes << 20,
                recovery=config.queue.recovery,
                key=context.key,
            )
            async with opened as broker, serve_metrics(broker, config.queue.metrics):
                await trio.sleep_forever()

    trio.run(_until_sigterm, body)


def engine(context: Context) -> None:
    """One engine. Its endpoint is another one after a restart, so that nobody talks to a dead socket."""
    config = context.config.engine

    def bind(life: int = 0) -> str:
        return f"ipc://{context.launch.sockets}/{context.name}-{os.getpid()}-{life}"

    if isinstance(config, EmbeddedEngine):
        from streamrl_producers.engines.embedded.server import run_engine

        made = partial(
            run_engine, context.connect, model_dir=context.run.base, config=config, bind=bind(), key=context.key
        )
    else:
        from streamrl_producers.engines.server import run_server_engine

        made = partial(
            run_server_engine,
            context.connect,
            model_dir=context.run.base,
            config=config,
            number=context.number,
            bind=bind,
            log_file=context.run.logs / f"{context.name}.server.log",
            restarts=context.config.supervision.restarts,
            window=context.config.supervision.window_seconds,
            key=context.key,
        )
    trio.run(_until_sigterm, made)


def producer(context: Context) -> None:
    """Plays episodes: leases rollout rows, writes trajectories."""
    from streamrl_agents.agent import load_agent
    from streamrl_agents.template import ChatTemplate
    from streamrl_producers.producer import run_producer

    agent = load_agent(context.config.env)
    template = ChatTemplate.load(context.run.base, tool_format=context.config.tool_format, tools=bool(agent.tools))

    async def body() -> None:
        async with context.connect() as queue:
            config = context.config.rollout
            await run_producer(queue, agent=agent, template=template, config=config, key=context.key)

    trio.run(_until_sigterm, body)


def scorer(context: Context) -> None:
    """Scores rows and computes advantages, side by side."""
    from streamrl_agents.rewards import Scorer, run_reward_worker
    from streamrl_agents.template import ChatTemplate
    from streamrl_learners.advantage_worker import run_advantage_worker

    config = context.config
    functions = Scorer(config.reward.parts, template=ChatTemplate.load(context.run.base))

    async def body() -> None:
        async with context.connect() as queue, trio.open_nursery() as nursery:
            nursery.start_soon(run_reward_worker, queue, functions, config.reward)
            nursery.start_soon(run_advantage_worker, queue, config.algorithm.advantage, config.algorithm.length)

    trio.run(_until_sigterm, body)


def learner(context: Context) -> None:
    """One learner rank. SIGTERM lets it give the step back, checkpoint and end."""
    stop = threading.Event()
    # Not under trio: the loop asks `should_stop` between micro-batches.
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    from streamrl_queue import BlockingTransferQueue

    connection = BlockingTransferQueue.connect(
        context.launch.address, key=context.key, role="learner", name=context.name, deadline=CONNECT_SECONDS
    )
    with connection as queue:
        queue.report("imports torch")
        from streamrl_learners.learner import run_learner

        config, run = context.config, context.run
        with run.metrics.open("ab") as metrics:
            run_learner(
                queue,
                rank=context.number,
                world=config.learner.ranks,
                store=context.launch.ranks,
                config=config.learner,
                algorithm=config.algorithm,
                model=config.model,
                model_dir=run.base,
                run_dir=run.path,
                demonstrations=_demonstrations(context),
                seed=config.seed,
                should_stop=stop.is_set,
                emit=partial(_write_line, metrics),
                resume=context.launch.resume,
                serve_after=True,
                key=context.key,
                budget_bytes=config.queue.budget_mebibytes << 20,
            )


def _demonstrations(context: Context) -> Callable[[random.Random, bool], Any] | None:
    """Scripted episodes of the environment, when it has them."""
    from streamrl_agents.agent import load_agent
    from streamrl_agents.demonstrations import play
    from streamrl_agents.template import ChatTemplate

    agent = load_agent(context.config.env)
    if agent.demonstrate is None:
        return None
    form = context.config.tool_format
    return partial(play, agent, ChatTemplate.load(context.run.base, tool_format=form, tools=bool(agent.tools)))


def _write_line(file: BinaryIO, entry: dict[str, Any]) -> None:
    # One unbuffered append: the coordinator writes its evaluations to the same file.
    file.write(msgspec.json.encode(entry) + b"\n")
    file.flush()


HEAVY: Final = ("learner", "engine")
"""Kinds of roles that import torch: an interpreter that has it takes more than a second to take itself apart."""


def leave(kind: str, code: int) -> NoReturn:
    """End this process; one that closed everything and only has memory to give back does so at once."""
    if kind in HEAVY:
        atexit._run_exitfuncs()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


ROLES: Final[dict[str, Callable[[Context], None]]] = {
    "queue": broker,
    "engine": engine,
    "producer": producer,
    "scorer": scorer,
    "learner": learner,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point of every role; the exit code is 0 for a drained role and 1 for one that raised."""
    parser = argparse.ArgumentParser(prog="streamrl.runtime.role")
    parser.add_argument("name")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--lifeline", type=int, help="read end of the death pipe")
    options = parser.parse_args(arguments)
    # A crash in native code leaves the stacks in the log.
    faulthandler.enable()
    run = RunDirectory(options.run)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {options.name} %(levelname)s %(name)s: %(message)s"
    )
    launch = run.read_launch()
    if options.lifeline is not None:
        die_with_parent(options.lifeline, remove=[Path(launch.sockets)] if options.name == "queue" else [])
    context = Context(options.name, run, load_file(run.config), launch)
    log.info("pid %d starts", os.getpid())
    return _supervised(context)


def _supervised(context: Context) -> int:
    # The supervision edge of this process: whatever went wrong ends here, in its log, with the error's name last.
    try:
        ROLES[context.kind](context)
    except Exception as error:
        log.exception("%s failed", context.name)
        words = LastWords.of(first_error(error))
        words.write(context.run.logs / f"{context.name}.error")
        log.error("%s: %s", words.error, words.message)
        return 1
    log.info("ended in order")
    return 0


if __name__ == "__main__":
    leave(kind_of(sys.argv[1]), main())
