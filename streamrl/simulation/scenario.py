"""What is simulated: how many processes of which kind, how long, with which settings and faults. All from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Final, Literal, Self

import msgspec

from streamrl_queue.config import Durability, Flow, OnStale, QueueConfig, training_flow
from streamrl_queue.errors import ConfigError

from .network import Rates

Act = Literal["crash", "torn", "power", "pause", "cut", "slow"]

# Faults of processes and how often each is drawn, relative to the others.
PROCESS_FAULTS: Final[Mapping[str, float]] = {
    "crash": 4.0,
    "torn": 1.0,
    "power": 1.0,
    "pause": 3.0,
    "cut": 2.0,
    "slow": 1.0,
}
# Faults of messages and their probabilities.
MESSAGE_FAULTS: Final[Mapping[str, float]] = {
    "lose": 0.003,
    "drop": 0.01,
    "duplicate": 0.01,
    "corrupt": 0.005,
    "delay": 0.01,
    "replay": 0.01,
}
# Between two faults of processes, on average.
FAULT_SECONDS: Final = 4.0
MIXES: Final = ("all", "all", "all", "processes", "messages", "none")


class Fault(msgspec.Struct, frozen=True):
    """One scripted fault: `60:pause:learner-0:8` stalls the learner for 8 seconds from second 60 on."""

    at: float
    act: str
    target: str
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ConfigError when the text is no fault."""
        at, act, target, *seconds = text.split(":") if text.count(":") >= 2 else ("", "", text)
        if act not in PROCESS_FAULTS:
            known = ", ".join(PROCESS_FAULTS)
            raise ConfigError(f"--at {text}: expected SECOND:FAULT:PROCESS[:SECONDS] with a fault out of {known}")
        try:
            return cls(float(at), act, target, float(seconds[0]) if seconds else 5.0)
        except ValueError:
            raise ConfigError(f"--at {text}: {at!r} and {seconds} must be seconds") from None


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run depends on beside the code. Times are virtual seconds."""

    seed: int
    engines: int
    producers: int
    scorers: int
    seconds: float
    """Faults happen and tasks are fed for so long; then all that is left must come to its end."""
    group_size: int
    rows_per_step: int
    max_staleness: int
    on_stale: OnStale
    durability: Durability
    session_seconds: float
    rollout_seconds: float
    scoring_seconds: float
    max_deliveries: int
    waiting_rows: int
    segment_bytes: int
    concurrency: int
    token_seconds: float
    step_seconds: float
    checkpoint_every: int
    straggler_seconds: float | None
    """How long a group waits for its last member; None: until it comes."""
    failing_share: float
    """Share of tasks whose environment raises."""
    poison_share: float
    """Share of rows that no engine can play."""
    linger_seconds: float
    processes: dict[str, float]
    """Weights of the faults of processes."""
    fault_seconds: float
    rates: Rates
    script: tuple[Fault, ...] = ()

    @classmethod
    def draw(
        cls,
        seed: int,
        *,
        engines: int = 2,
        producers: int = 2,
        seconds: float = 60.0,
        faults: str = "random",
        script: Iterable[str] = (),
    ) -> Self:
        """The scenario of a seed. `faults` is `random`, `all`, `none`, or `name=number,…`: weights of faults of
        processes, of which one comes `every=seconds` on average, and probabilities of faults of messages.

        Raises:
            ConfigError: an unknown fault.
        """
        rng = random.Random(f"scenario/{seed}")
        processes, rates, every = _faults(rng.choice(MIXES) if faults == "random" else faults)
        group, session = rng.choice((2, 4, 4)), rng.choice((2.0, 3.0, 6.0))
        return cls(
            seed=seed,
            engines=engines,
            producers=producers,
            scorers=rng.choice((1, 2)),
            seconds=seconds,
            group_size=group,
            rows_per_step=group * rng.choice((1, 2, 2, 3)),
            max_staleness=rng.choice((0, 1, 2, 2, 3)),
            on_stale=rng.choice(("wait", "wait", "wait", "drop", "keep")),
            durability=rng.choice(("flush", "fsync")),
            session_seconds=session,
            rollout_seconds=rng.choice((6.0, 15.0, 60.0)),
            scoring_seconds=rng.choice((2.0, 10.0)),
            max_deliveries=rng.choice((2, 3, 5)),
            waiting_rows=rng.choice((24, 64, 512)),
            segment_bytes=rng.choice((1 << 15, 1 << 17, 1 << 24)),
            concurrency=rng.choice((4, 8, 16)),
            token_seconds=rng.choice((0.01, 0.03)),
            step_seconds=rng.choice((0.3, 1.0, 2.0)),
            checkpoint_every=rng.choice((1, 2, 4)),
            straggler_seconds=rng.choice((None, None, 2.0, 8.0)) if group > 2 else None,
            failing_share=rng.choice((0.0, 0.05)),
            poison_share=rng.choice((0.0, 0.01)),
            linger_seconds=rng.choice((0.5, 2.0)),
            processes=processes,
            fault_seconds=every,
            rates=rates,
            script=tuple(Fault.parse(text) for text in script),
        )

    @property
    def flow(self) -> Flow:
        config = QueueConfig(
            durability=self.durability,
            max_staleness=self.max_staleness,
            on_stale=self.on_stale,
            waiting_rows=self.waiting_rows,
            rollout_seconds=self.rollout_seconds,
            scoring_seconds=self.scoring_seconds,
            max_deliveries=self.max_deliveries,
            session_seconds=self.session_seconds,
            partial_members=self.group_size - 1 if self.straggler_seconds is not None else None,
            straggler_seconds=self.straggler_seconds,
        )
        return training_flow(config, rows_per_step=self.rows_per_step)


def _faults(text: str) -> tuple[dict[str, float], Rates, float]:
    """Weights of process faults, rates of message faults and the time between faults that a text asks for."""
    every = {"every": FAULT_SECONDS}
    if text in ("all", "none", "processes", "messages"):
        processes = dict(PROCESS_FAULTS) if text in ("all", "processes") else {}
        messages = dict(MESSAGE_FAULTS) if text in ("all", "messages") else {}
    else:
        processes, messages = {}, {}
        for part in text.split(","):
            name, _, amount = part.partition("=")
            kinds = ((processes, PROCESS_FAULTS), (messages, MESSAGE_FAULTS), (every, every))
            kind, usual = next(((k, u) for k, u in kinds if name in u), ({}, {}))
            if name not in usual:
                raise ConfigError(f"--faults {name}: expected all, none, or some of {', '.join(_known())}")
            try:
                kind[name] = float(amount) if amount else usual[name]
            except ValueError:
                raise ConfigError(f"--faults {part}: expected a number behind =, got {amount!r}") from None
    if "delay" in messages:
        messages["slow"] = messages.pop("delay")
    return processes, Rates(**messages), every["every"]


def _known() -> list[str]:
    return [*PROCESS_FAULTS, *MESSAGE_FAULTS, "every"]
