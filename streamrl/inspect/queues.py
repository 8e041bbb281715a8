"""`streamrl queue stats|peek|dead|requeue`: a queue from outside, with its broker or from its journal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import trio
from rich.console import Console
from rich.text import Text

from streamrl_queue import Receipt, Statistics, TransferQueue, Version, audit, snapshot
from streamrl_queue.batches import RowKeys
from streamrl_queue.config import Flow
from streamrl_queue.errors import ConfigError, JournalError, UnknownName
from streamrl_queue.keys import find_key
from streamrl_queue.nursery import run as run_trio
from streamrl_queue.rows import Rows

from ..runtime.counts import conservation
from ..runtime.losses import last_line
from ..runtime.summary import conservation_table
from .lives import Life, Lives
from .printing import print_json, print_table, shown, size
from .reading import fold, read_lives, task_lines
from .tables import utc
from .target import Target, find

T = TypeVar("T")

CONNECT_SECONDS = 5.0
PEEK_COLUMNS = RowKeys.__struct_fields__


def stats(name: str, key: Path | None, *, as_json: bool) -> int:
    """Counts by state, stage, split and reason; journal bytes; versions. From the broker when one is running."""
    target = find(name)
    if target.address is not None:

        async def ask(queue: TransferQueue) -> tuple[Statistics, int, tuple[Version, ...], dict[str, int]]:
            dropped = await queue.protocol_errors()
            return await queue.statistics(), await queue.journal_bytes(), await queue.versions(), dropped

        counts, held, versions, dropped = _asked(target, key, ask)
        source = f"the broker at {target.address}"
    else:
        journal = target.require_journal("stats")
        rows = stand(journal, target.flow())
        counts, versions = rows.statistics(), tuple(rows.versions.values())
        held, source = audit.stored_bytes(journal), f"the journal in {journal}"
        dropped = {"total": 0}
    if as_json:
        print_json(_stats_document(counts, held, versions) | {"protocol_errors": dropped})
        return 0
    console = Console()
    console.print(f"from {source}", highlight=False, soft_wrap=True)
    console.print(conservation_table(conservation(counts)))
    lines = [(split, *(states.get(s, 0) for s in _STATES)) for split, states in counts.by_split.items()]
    print_table(console, ["split", *_STATES], lines, title="by split")
    stages = [(stage, n.ready, n.parked, n.leased, n.written) for stage, n in counts.stages.items()]
    print_table(console, ["stage", "ready", "parked", "leased", "written"], stages, title="by stage")
    console.print(f"{'step':>10}  {counts.step}", highlight=False)
    committed = sum(version.committed for version in versions)
    console.print(
        f"{'version':>10}  {counts.version} (after {counts.version_step} steps); "
        f"{len(versions)} begun, {committed} committed",
        highlight=False,
    )
    console.print(f"{'journal':>10}  {size(held)}", highlight=False)
    if total := dropped.pop("total"):
        peers = ", ".join(f"{peer} {n}" for peer, n in dropped.items())
        console.print(f"{'dropped':>10}  {total} messages that were not for it: connection {peers}", highlight=False)
    return 0


_STATES = ("waiting", "ready", "parked", "leased", "trained", "done", "dropped", "dead")


def _stats_document(counts: Statistics, held: int, versions: Sequence[Version]) -> dict[str, Any]:
    return {
        **conservation(counts),
        "by_split": counts.by_split,
        "stages": {
            stage: {"ready": n.ready, "parked": n.parked, "leased": n.leased, "written": n.written}
            for stage, n in counts.stages.items()
        },
        "step": counts.step,
        "version": counts.version,
        "version_step": counts.version_step,
        "versions_begun": len(versions),
        "versions_committed": sum(version.committed for version in versions),
        "journal_bytes": held,
    }


def peek(name: str, stage: str, rows: int, key: Path | None, *, as_json: bool) -> int:
    """The rows that are ready for `stage`, in the order of hand-out."""
    target = find(name)
    if target.address is not None:

        async def ask(queue: TransferQueue) -> tuple[tuple[RowKeys, ...], int]:
            found = await queue.peek(stage, rows)
            return found, (await queue.statistics()).stages[stage].ready

        found, ready = _asked(target, key, ask)
    else:
        state = stand(target.require_journal("peek"), target.flow())
        found = tuple(
            RowKeys(row.id, row.group.id, row.member, row.attempts.get(stage, 0), row.split, row.tokens)
            for row in state.peek(stage, rows)
        )
        ready = state.statistics().stages[stage].ready
    lines = [tuple(getattr(keys, name) for name in PEEK_COLUMNS) for keys in found]
    if as_json:
        print_json([dict(zip(PEEK_COLUMNS, line, strict=True)) for line in lines])
        return 0
    console = Console()
    print_table(console, PEEK_COLUMNS, lines)
    console.print(f"{len(lines)} of {ready} rows ready for {stage}", style="dim", highlight=False)
    return 0


def dead(name: str, rows: int, *, as_json: bool) -> int:
    """Rows that died or were dropped, the last ones first, with reason and task."""
    target = find(name)
    target.require_journal("dead")
    lives = read_lives(target)
    lost = [life for life in lives.rows.values() if life.end in ("dead", "dropped")]
    lost.sort(key=lambda life: -life.moments[-1].at)
    names = ("row", "end", "reason", "at", "split", "env", "key", "attempts", "task", "error")
    lines = [_lost(life) for life in lost[:rows]]
    if as_json:
        print_json([dict(zip(names, line, strict=True)) for line in lines])
        return 0
    console = Console()
    for line in lines:
        _print_lost(console, dict(zip(names, line, strict=True)))
    console.print(f"{len(lines)} of {len(lost)} rows that died or were dropped", style="dim", highlight=False)
    return 0


def _print_lost(console: Console, row: Mapping[str, Any]) -> None:
    """A paragraph for each row: eight columns fit no terminal."""
    head = Text(f"row {row['row']}", style="bold")
    attempts = f", attempts: {row['attempts']}" if row["attempts"] else ""
    head.append(
        f"  {row['end']}: {row['reason']}  ({row['split']}, {shown(row['at'])} UTC{attempts})", style="not bold"
    )
    console.print(head)
    error = last_line(row["error"]) if row["error"] else None
    for name, value in (("task", row["task"]), ("key", row["key"]), ("error", error)):
        if value is not None:
            line = Text(f"{name:>9}  {value}".replace("\n", "⏎"))
            line.truncate(console.width, overflow="ellipsis")
            console.print(line)


def _lost(life: Life) -> tuple[Any, ...]:
    columns = life.columns
    attempts = " ".join(f"{stage} {n}" for stage, n in life.attempts.items())
    ended = utc(life.moments[-1].at)
    task = columns.get("task")
    task = task.decode(errors="replace") if isinstance(task, bytes) else task
    return life.row, life.end, life.reason, ended, life.split, life.env, life.key, attempts, task, columns.get("error")


def requeue(name: str, rows: Sequence[int], key: Path | None) -> int:
    """Put the tasks of dead or dropped rows again, as fresh groups.

    Each row makes one group of as many members as its own had; its key is that of the task, then `again/ROW`. So the
    same row is put again only once; what is put again may be put again in its turn.

    Raises:
        ConfigError: no broker is running, or the rows' tasks have left the journal.
        UnknownName: a row that is not there, or that is neither dead nor dropped.
    """
    target = find(name)
    address = target.require_address("requeue")
    journal = target.require_journal("requeue")
    lives = fold(journal, target.flow())
    chosen = [_ended(lives, row) for row in dict.fromkeys(rows)]
    tasks = task_lines(journal, [life.row for life in chosen])
    if gone := [life.row for life in chosen if life.row not in tasks]:
        raise ConfigError(f"requeue: the tasks of rows {gone} have left the journal; put them again yourself")
    members = {life.row: _members(lives, life) for life in chosen}

    async def put(queue: TransferQueue) -> list[tuple[Life, Receipt]]:
        out = []
        for life in chosen:
            receipt = await queue.put(
                tasks[life.row],
                keys=[f"{life.key}/again/{life.row}"],
                members=members[life.row],
                split=life.split,
                priority=life.priority,
            )
            out.append((life, receipt))
        return out

    console = Console()
    for life, receipt in _asked(target, key, put):
        made = _range(receipt.rows)
        before = "was put again before, as" if receipt.duplicates else "is put again as"
        console.print(f"row {life.row} {before} {made} at {address}", highlight=False, soft_wrap=True)
    return 0


def _ended(lives: Lives, row: int) -> Life:
    life = lives.rows.get(row)
    if life is None:
        raise UnknownName(f"requeue: there is no row {row}; the journal has rows 1 to {lives.tasks}")
    if life.end not in ("dead", "dropped"):
        state = lives.state(life)
        raise UnknownName(f"requeue: row {row} is {state}; only rows that died or were dropped are put again")
    return life


def _members(lives: Lives, life: Life) -> int:
    return sum(1 for other in lives.rows.values() if other.group == life.group)


def _range(rows: Sequence[int]) -> str:
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]}"


def stand(journal: Path, flow: Flow | None) -> Rows:
    """The state of a queue whose broker is not running: the newest snapshot, and what came after it.

    Raises:
        ConfigError: the journal's stages are nobody's that we know.
        JournalError: an event does not fit what went before; the journal is damaged.
    """
    if flow is None:
        raise ConfigError(f"{journal}: its stages are not those of a run; start its broker and give its address")
    whole = [found for found in audit.snapshots(journal) if not isinstance(found, audit.Damage)]
    first, rows = 0, Rows(flow)
    if whole:
        first, data = whole[-1]
        rows = snapshot.load(data, now=0.0)
    for entry in audit.events(journal):
        if entry.record >> 32 >= first:
            try:
                rows.apply(entry.event, record=entry.record)
            except KeyError as error:
                raise JournalError(
                    f"{journal}: a {type(entry.event).__name__} names {error}, which is not there; "
                    "`streamrl queue verify` says what is damaged"
                ) from error
    return rows


def _asked(target: Target, key: Path | None, ask: Callable[[TransferQueue], Awaitable[T]]) -> T:
    """What the broker answers."""
    address = target.require_address("this")
    secret = find_key(key or target.key_file())

    async def session() -> T:
        with trio.fail_after(CONNECT_SECONDS * 4):
            opened = TransferQueue.connect(address, key=secret, role="status", deadline=CONNECT_SECONDS)
            async with opened as queue:
                return await ask(queue)

    return run_trio(session)
