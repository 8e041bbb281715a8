"""What the coordinator of a run does: feed tasks, evaluate, watch, drain. `launcher.py` starts and ends it.

      launch ──► Coordinator ── starts and watches ──► queue, learner-r, engine-i, producer-i, scorer-i
                     │ put tasks, evaluate, statistics      │ logs/<role>.log
                     ▼                                      ▼
                TransferQueue ◄─────────── rows ───────── every role
                     │
                     ▼
        panel, metrics.jsonl, summary.json, reward.png

Everything runs below one nursery; the first error ends the run, and no process outlives it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from streamrl_agents.agent import load_agent, load_object
from streamrl_learners.config import TinyModel
from streamrl_queue import Member, Statistics, TransferQueue
from streamrl_queue.errors import DeadlineExceeded, NoProgress, QueueFull, UnknownName
from streamrl_queue.waits import Wait

from ..config import RunConfig, flow_of, plain
from ..tracking import Sink
from . import plan, summary
from .chain import LEADER, SILENT, Link, chain, told
from .counts import CallErrors, call_errors, totals
from .evaluation import evaluate
from .facts import facts_of
from .losses import calls_in, lives_in, losses_in, losses_of
from .panel import Panel, RoleView, Snapshot
from .rundir import RunDirectory
from .supervisor import Supervisor, log_tail
from .tasks import TaskSource

WEIGHTS: Final = "model.safetensors"
"""What a warm start leaves in `base/`."""
WATCH_SECONDS: Final = 0.5
"""Heartbeats come once a second; looking twice as often shows each of them."""
LOST_STEPS: Final = 2
"""Rows of so many steps must be lost before their share says anything."""
QUIET_SECONDS: Final = 5.0
"""Before that long without a step nobody asks who waits for whom."""
LEAVING_SECONDS: Final = 2.0
"""A role that has left the queue ends, or is ended, within this time."""
EVALUATE: Final = "evaluate"
"""The stage that evaluation rows reach last."""
FEED_SECONDS: Final = 0.1
"""Steps of the demo take about 0.4 s: the look-ahead is filled several times in each."""


class Coordinator:
    """State of one run as its coordinator sees it."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        queue: TransferQueue,
        roles: Supervisor,
        panel: Panel,
        wait: Wait,
    ) -> None:
        """`wait`: where it says what the whole run waits for."""
        self.config = config
        self.run = run
        self.queue = queue
        self.roles = roles
        self.panel = panel
        self.phase = "starting"
        # What the phase cannot go on without.
        self.waits = ""
        self.members: dict[str, Member] = {}
        self.statistics: Statistics | None = None
        self.sinks: Sequence[Sink] = ()
        self._metrics = MetricsTail(run.metrics)
        self._busy: list[float] = []
        # Gauges of every producer session of this launch, those of killed ones too.
        self._played: dict[str, Mapping[str, float]] = {}
        # Role → its process when it was last seen at the queue, and when that was.
        self._present: dict[str, tuple[int | None, float]] = {}
        self._earlier = 0
        self._wait = wait
        # Role → what tells that it is silent, for as long as it is.
        self._silent: dict[str, ExitStack] = {}
        self._quiet = Quiet(trio.current_time())
        # Who waited for whom when the run last stood still.
        self.links: tuple[Link, ...] = ()

    def __repr__(self) -> str:
        return f"<Coordinator {self.run.path.name} {self.phase}>"

    async def train(self) -> None:
        """The whole of a run: evaluate, train to the last step, evaluate again."""
        # A resumed journal has versions that no engine of this launch holds. The learner needs seconds to import
        # torch before it could commit another.
        self._earlier = (await self.queue.statistics()).version
        # Rows of an evaluation that was interrupted; another one puts its own.
        await self.queue.end_rows("its evaluation was interrupted", split="eval")
        await self.roles_report_in()
        self.enter("warm start" if self._warm_starts() else "waits for weights", "waits for learner-0", LEADER)
        await self.version_of(0, self.config.supervision.warm_start_seconds)
        if not self._metrics.evaluations:
            await self.evaluate()
        self.enter("training", f"waits for step {self.config.learner.steps} of learner-0", LEADER)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.feed)
            # The learner has a deadline for its rows and for each publish; it is the one to say who was late.
            await self.version_of(self.config.learner.steps, math.inf)
            nursery.cancel_scope.cancel()
        await self.evaluate()

    def enter(self, phase: str, waits: str, on: str) -> None:
        """The run does something else from now on, for which it waits for somebody else: a process, a role, a stage."""
        if (phase, waits) != (self.phase, self.waits):
            self._wait.at(f"{phase}: {waits}", on)
        self.phase, self.waits = phase, waits
        self.queue.report(f"{phase}: {waits}")

    def _warm_starts(self) -> bool:
        """Whether the learner must make the weights before it can publish them."""
        fresh = isinstance(self.config.model, TinyModel) and not (self.run.base / WEIGHTS).exists()
        return fresh and load_agent(self.config.env).demonstrate is not None

    async def roles_report_in(self) -> None:
        """Wait until every role is a member of the queue.

        Raises:
            DeadlineExceeded: naming the roles that did not report, with the end of the first one's log.
        """
        seconds = self.config.supervision.start_seconds
        wanted = self.names
        with trio.move_on_after(seconds):
            while absent := [name for name in wanted if name not in self.members]:
                self.enter("starting", f"waits for {', '.join(absent)}", absent[0])
                await trio.sleep(FEED_SECONDS)
            return
        error = DeadlineExceeded.waiting("a sign of life", ", ".join(absent), seconds)
        log = self.roles.roles[absent[0]].spec.log
        raise DeadlineExceeded(f"{error}; the end of {log}:\n{log_tail(log)}")

    async def version_of(self, step: int, seconds: float) -> None:
        """Wait until this launch has committed weights of at least `step` steps.

        Raises:
            DeadlineExceeded: after `seconds`.
        """
        with trio.move_on_after(seconds):
            while not ((now := self.statistics) and now.version > self._earlier and now.version_step >= step):
                await trio.sleep(FEED_SECONDS)
            return
        raise DeadlineExceeded.waiting(f"committed weights of step {step}", "learner-0", seconds)

    async def evaluate(self) -> None:
        """Play the evaluation tasks with the committed weights and note the result in `metrics.jsonl`."""
        if not self.config.tasks.eval_rows:
            return
        rows: list[int] = []
        self.enter("evaluating", f"waits for {self.config.tasks.eval_rows} rows of producers and scorers", EVALUATE)
        number = len(self._metrics.evaluations)
        result = await evaluate(
            self.queue,
            task_source(self.config, "eval", source=f"eval-{os.getpid()}-{number}"),
            rows=self.config.tasks.eval_rows,
            seconds=self.config.supervision.eval_seconds,
            put=rows.extend,
        )
        entry = {"event": "eval", **plain(result)}
        self._note(entry)
        self._metrics.evaluations.append(result)
        why = await self._why(rows) if result.failed else ""
        self.panel.note(f"greedy evaluation at step {result.step}: {result}{why}")

    async def _why(self, rows: Sequence[int]) -> str:
        """Why evaluation rows were lost, as the journal tells."""
        lives = await trio.to_thread.run_sync(lives_in, self.run.journal, flow_of(self.config))
        losses = losses_in(lives, split="eval", rows=rows) if lives else None
        return f" ({losses.named()}){losses.errors_told()}" if losses and losses.lost else ""

    def calls(self) -> CallErrors:
        """The calls that failed in this launch, as the producers told last."""
        calls = call_errors(self._played.values())
        lives = lives_in(self.run.journal, flow_of(self.config)) if calls.tool_errors else None
        last = calls_in(lives).last_tool_error if lives else None
        return msgspec.structs.replace(calls, last_tool_error=last)

    async def feed(self) -> None:
        """Consumes task numbers, produces rows of stage `rollout`.

        Waits for the look-ahead to shrink; unblocked by producers that lease. As many rows are fed as the steps
        will train; a row that was dropped or died is replaced.

        Raises:
            NoProgress: too large a share of the rows is lost; why is told once nothing moves any more.
        """
        group, rows = self.config.tasks.group_size, self.config.learner.rows_per_step
        tasks = task_source(self.config, "train")
        # Rows wait until admission lets them out, a step's worth at a time: two steps' worth are never played
        # between two looks of this loop.
        ahead = min(self.config.queue.waiting_rows, 2 * rows + group)
        while True:
            counts = await self.queue.statistics()
            lost, ended = losses_of(counts)
            if lost >= LOST_STEPS * rows and lost > self.config.supervision.max_lost_share * ended:
                raise NoProgress(f"{lost} of the {ended} training rows that have ended were lost")
            train = counts.by_split.get("train", {})
            alive = sum(n for state, n in train.items() if state not in ("dropped", "dead"))
            missing = self.config.learner.steps * rows - alive
            groups = min(math.ceil(missing / group), (ahead - train.get("waiting", 0)) // group)
            if groups > 0:
                start = counts.sources.get(tasks.source, 0)
                try:
                    with self.queue.waiting(f"waits for room for {groups} tasks", on=plan.QUEUE):
                        await self.queue.put(list(tasks.take(start, groups)), members=group, split="train")
                except QueueFull as error:
                    # Back-pressure: the learner has the deadline, and says what it waits for.
                    self.panel.note(f"tasks wait: {error}; rows leave when a checkpoint covers them")
            await trio.sleep(FEED_SECONDS)

    async def watch(self) -> None:
        """Consumes memberships, statistics and metrics, produces what the panel and the trackers show.

        Waits for the next heartbeat; unblocked by a change of membership or after `WATCH_SECONDS`.
        """
        epoch = -1
        while True:
            membership = await self.queue.members(after=epoch, wait=WATCH_SECONDS)
            epoch = membership.epoch
            self.members = {member.name: member for member in membership.members}
            self._kill_silent()
            self._played |= {m.session: m.gauges for m in membership.members if m.role == "producer"}
            if self.phase == "training":
                self._busy += [m.gauges["busy_share"] for m in membership.members if "busy_share" in m.gauges]
            self.statistics = await self.queue.statistics()
            entries = self._metrics.read()
            if entries and self.sinks:
                # Trackers write files and talk to servers.
                await trio.to_thread.run_sync(self._track, entries)
            self.panel.update(self.snapshot())
            await self._look_for_stall()

    def _kill_silent(self) -> None:
        """Kill processes that run and have lost their session: they hang, and nobody else would notice."""
        now, limit = trio.current_time(), self.config.supervision.silent_seconds
        for name, role in self.roles.roles.items():
            if name in self.members:
                self._present[name] = (role.pid, now)
                self._silent.pop(name, ExitStack()).close()
            elif name in self._present and name not in self._silent and not role.stopping:
                stack = self._silent[name] = ExitStack()
                stack.enter_context(self.queue.waiting(SILENT, on=name))
            pid, last = self._present.get(name, (None, now))
            # A process that has not reported yet has the start's deadline; one that ends by itself needs no help.
            if pid == role.pid and role.running and not role.stopping and now - last > limit:
                reason = f"it was silent for {now - last:.0f} s"
                self.panel.note(f"{name} (pid {pid}) is killed: {reason}")
                role.kill_for(reason)

    async def _look_for_stall(self) -> None:
        """Follow who waits for whom while nothing moves; say it aloud, and in the end give up.

        Raises:
            DeadlineExceeded: no step was committed for `stall_seconds`.
        """
        assert self.statistics is not None
        limits = self.config.supervision
        step = self.statistics.step
        quiet = self._quiet.seconds(trio.current_time(), (self.phase, step))
        if quiet < QUIET_SECONDS:
            self.links = ()
            return
        # Of a role that ends with an error the last word is not that it is gone.
        if not any(0 < trio.current_time() - last < LEAVING_SECONDS for last in self._gone()):
            self.links = chain(await facts_of(self.queue, self.names))
        if self.phase != "training":
            return
        if quiet > limits.stall_seconds:
            what = f"no step was committed for {quiet:.0f} s, which is more than supervision.stall_seconds"
            raise DeadlineExceeded(f"step {step + 1}: {what}")
        if self._quiet.alarm(quiet, limits.stall_alarm_seconds):
            self.panel.note(f"stall: no step was committed for {quiet:.0f} s; {told(self.links)}")
            self._note({"event": "stall", "step": step, "seconds": quiet, "chain": self.links})

    def _gone(self) -> list[float]:
        """When roles that are no members any more were last seen."""
        return [last for name, (_, last) in self._present.items() if name not in self.members]

    def _note(self, entry: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`."""
        with self.run.metrics.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")

    @property
    def names(self) -> list[str]:
        """All processes of the run that are members of the queue while they live."""
        return [name for name in self.roles.roles if name != plan.QUEUE]

    def snapshot(self) -> Snapshot:
        counts, now = self.statistics, time.time()
        roles = tuple(
            RoleView(m.name, m.activity or "", max(0.0, now - m.since), m.ready, m.gauges)
            for name in self.roles.roles
            if (m := self.members.get(name)) is not None
        )
        last = self._metrics.steps[-1] if self._metrics.steps else {}
        return Snapshot(
            phase=self.phase,
            waits=self.waits,
            calls=call_errors(self._played.values()),
            steps=self.config.learner.steps,
            step=int(last.get("step", 0)),
            version=counts.version or None if counts else None,
            roles=roles,
            rows=totals(counts) if counts else {},
            depths={name: stage.ready for name, stage in counts.stages.items()} if counts else {},
            rewards=tuple(float(s["reward_mean"]) for s in self._metrics.steps if "reward_mean" in s),
            metrics=last,
        )

    def engine_idle(self) -> float | None:
        return None if not self._busy else 1.0 - sum(self._busy) / len(self._busy)

    def _track(self, entries: Sequence[Mapping[str, Any]]) -> None:
        for entry in entries:
            if entry.get("event") == "stall":
                continue
            prefix = "eval/" if entry.get("event") == "eval" else ""
            numbers = {f"{prefix}{k}": float(v) for k, v in entry.items() if isinstance(v, int | float)}
            for sink in self.sinks:
                sink.log(int(entry.get("step", 0)), numbers)

    async def drain(self, *, finished: bool) -> None:
        """Stop every role but the broker: together, or the learner first when it may still have to publish.

        A run that is finished ends the rows that are left; one that was interrupted keeps them for `--resume`.
        """
        seconds = self.config.supervision.drain_seconds
        learners = [self.roles.roles[name] for name in plan.learner_names(self.config)]
        others = [r for r in self.roles.roles.values() if r not in learners and r.spec.name != "queue"]
        for roles in [[*learners, *others]] if finished else [learners, others]:
            names = [role.spec.name for role in roles]
            self.enter("draining", f"waits for {', '.join(names)}", names[0])
            for name in await self.roles.stop(roles, seconds):
                self.panel.note(f"{name} did not end within {seconds:.0f} s and was killed")
                await self.forget(name)
            for role in roles:
                if role.process is not None and role.process.returncode > 0:
                    self.panel.note(f"{role.spec.name} failed while it drained; see {role.spec.log}")
        if finished:
            for split in ("train", "eval"):
                await self.queue.end_rows("run ended", split=split)
        self.statistics = await self.queue.statistics()
        self.statistics.check()

    async def forget(self, name: str) -> None:
        """The process of that name is gone: its leases end now, not at its heartbeat's timeout."""
        with suppress(UnknownName):
            await self.queue.end_session(name)


class Quiet:
    """For how long nothing has moved, and when to say so again."""

    def __init__(self, now: float) -> None:
        self._moved = now
        self._state: object = None
        self._alarms = 0

    def seconds(self, now: float, state: object) -> float:
        """Seconds since `state` was last another one."""
        if state != self._state:
            self._state, self._moved, self._alarms = state, now, 0
        return now - self._moved

    def alarm(self, seconds: float, every: float) -> bool:
        """Whether another `every` seconds have gone by in `seconds` of quiet."""
        due = int(seconds / every) > self._alarms
        self._alarms = int(seconds / every)
        return due


class MetricsTail:
    """Reads `metrics.jsonl` as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.steps, self.evaluations = summary.read_metrics(path)
        if path.exists():
            self._offset = path.stat().st_size

    def read(self) -> list[dict[str, Any]]:
        """The entries since the last call; an unfinished last line waits."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        entries = [msgspec.json.decode(line) for line in whole.splitlines()]
        self.steps += [e for e in entries if e.get("event", "step") == "step" and "step" in e]
        return entries


def task_source(config: RunConfig, split: str, *, source: str | None = None) -> TaskSource:
    """The tasks of a split, from the environment's own sampler or the one that is configured."""
    sampler = config.tasks.sampler
    sample = load_object(sampler) if sampler else load_agent(config.env).sample_task
    return TaskSource(config.env, sample, seed=config.seed, split=split, source=source)
