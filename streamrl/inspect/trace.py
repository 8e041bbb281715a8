"""`streamrl trace RUN ROW`: one row's life."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamrl_queue.errors import ConfigError

from .lives import Life, Lives, Moment
from .printing import print_json, shown
from .reading import as_target, read_lives
from .tables import utc
from .target import Target

SAMPLED_STYLE = "bold green"
# Where there is no colour.
SAMPLED_MARKS = "«", "»"

# Columns that are shown elsewhere, or only by --json.
_LONG = ("tokens", "mask", "logprobs", "versions", "segments", "sampling", "metrics", "error")


def trace(name: str, row: int, *, text: bool, as_json: bool) -> int:
    """Print the life of `row`; returns the exit code.

    Raises:
        ConfigError: there is no such run, or `text` was asked for where there is no tokenizer.
        UnknownName: the journal has no such row.
    """
    target = as_target(name)
    lives = read_lives(target, row=row)
    life = lives.rows[row]
    pieces = list(conversation(life, target)) if text else None
    if as_json:
        print_json(document(lives, life, pieces))
        return 0
    console = Console()
    _print_head(console, lives, life)
    console.print(moments_table(lives, life))
    if pieces is not None:
        console.print(coloured(pieces, marks=console.color_system is None), soft_wrap=True)
    return 0


def document(lives: Lives, life: Life, pieces: Sequence[tuple[str, bool]] | None = None) -> dict[str, Any]:
    """The life for machines: times in seconds since the epoch, all columns, the conversation when it was decoded."""
    builtin = msgspec.to_builtins
    versions = [builtin(version) for version in lives.versions.values() if version.version in _versions(life)]
    out = {
        name: getattr(life, name)
        for name in ("row", "group", "member", "split", "env", "key", "step", "lag", "tokens", "oldest_version")
    }
    out |= {
        "state": lives.state(life),
        "reason": life.reason,
        "retired": life.retired,
        "columns": life.columns,
        "versions": versions,
        "moments": [builtin(moment) | {"since_birth": moment.at - life.born} for moment in life.moments],
    }
    if pieces is not None:
        out["conversation"] = [{"text": text, "sampled": sampled} for text, sampled in pieces]
    return out


def _versions(life: Life) -> set[int]:
    named = {moment.version for moment in life.moments} | {moment.oldest_version for moment in life.moments}
    named |= {span["version"] for span in life.columns.get("versions") or ()}
    return {version for version in named if version is not None}


def _print_head(console: Console, lives: Lives, life: Life) -> None:
    state = lives.state(life)
    ended = {"trained": f"trained in step {life.step}, lag {shown(life.lag)}"}.get(state, state)
    ended += f": {life.reason}" if life.reason else ""
    head = Text(f"row {life.row}", style="bold")
    head.append(f"  {ended}{', retired' if life.retired else ''}", style="not bold")
    console.print(head)
    facts = {
        "born": f"{shown(utc(life.born))} UTC",
        "group": f"{life.group}, member {life.member}",
        "split": life.split,
        "env": life.env,
        "key": life.key,
        "task": life.columns.get("task"),
        "status": life.columns.get("status"),
        "error": life.columns.get("error"),
        "tokens": life.tokens,
        "turns": life.columns.get("turns"),
        "versions": _spans(lives, life),
    }
    for name, value in facts.items():
        if value is not None and value != "":
            console.print(Text(f"{name:>10}  {shown(value)}"), soft_wrap=True)


def _spans(lives: Lives, life: Life) -> str | None:
    """Which version sampled from which token on, and after how many steps it was made."""
    spans = life.columns.get("versions")
    if not spans:
        return None
    return ", ".join(f"{_version(lives, span['version'])} from token {span['start']}" for span in spans)


def _version(lives: Lives, version: int | None) -> str:
    known = lives.versions.get(version or 0)
    return f"{version}" + (f" (step {known.step})" if known else "")


def moments_table(lives: Lives, life: Life) -> Table:
    """One line per moment: time of day in UTC, seconds since birth, what happened, and what is known about it."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("time", no_wrap=True)
    table.add_column("since birth", justify="right", no_wrap=True)
    for name in ("event", "stage", "what"):
        table.add_column(name, overflow="fold")
    for moment in life.moments:
        since = f"{moment.at - life.born:.3f} s"
        what = Text(_what(lives, life, moment))
        table.add_row(shown(utc(moment.at))[11:], since, Text(moment.event, style="bold"), moment.stage or "", what)
    return table


def _what(lives: Lives, life: Life, moment: Moment) -> str:
    match moment.event:
        case "granted":
            step = f", for step {moment.step}" if moment.step is not None else ""
            version = f", version {_version(lives, moment.version)}" if moment.version else ""
            return f"attempt {moment.attempt}, to {moment.session}{step}{version}"
        case "written":
            return ", ".join([*_lengths(lives, moment), *_values(lives, life, moment.stage)]) or (
                "evaluated" if moment.stage == "evaluate" else "columns"
            )
        case "lease ended":
            return f"{moment.cause}: {moment.reason} (attempt {moment.attempt or '–'}, {moment.session or '–'})"
        case "trained":
            return f"in step {moment.step}"
        case "given back":
            return f"step {moment.step} was undone by a resume; it is ready again"
        case "retired":
            return f"a checkpoint covers step {moment.step}"
        case "born":
            return f"task {life.key}"
    return moment.reason or ""


def _lengths(lives: Lives, moment: Moment) -> list[str]:
    out = [f"{moment.tokens} tokens"] if moment.tokens is not None else []
    if moment.oldest_version is not None:
        out.append(f"oldest version {_version(lives, moment.oldest_version)}")
    return out


def _values(lives: Lives, life: Life, stage: str | None) -> Iterator[str]:
    """The small columns that the stage wrote."""
    if lives.flow is None:
        return
    for column in next((s.writes for s in lives.flow.stages if s.name == stage), ()):
        value = life.columns.get(column)
        if value is not None and value != {} and column not in _LONG:
            yield f"{column} {shown(value)}"


def conversation(life: Life, target: Target) -> Iterator[tuple[str, bool]]:
    """The row's tokens as text, in runs of sampled (True) and given (False) ones.

    Raises:
        ConfigError: the row has no tokens, or the run has no tokenizer.
    """
    if target.run is None:
        raise ConfigError(f"--text: {target.name} is a journal alone; the tokenizer lies in the run's base/")
    if not life.columns.get("tokens"):
        gone = "they have left the journal" if life.tokens else "nothing was written to it"
        raise ConfigError(f"--text: row {life.row} has no tokens here: {gone}")
    yield from decoded(life.columns, target.run.base)


def decoded(columns: Mapping[str, Any], model_dir: Path) -> Iterator[tuple[str, bool]]:
    """Runs of text of one trajectory's `tokens` and `mask`."""
    from streamrl_agents.template import ChatTemplate

    template = ChatTemplate.load(model_dir)
    pairs = zip(columns["tokens"], columns["mask"], strict=True)
    for sampled, run in groupby(pairs, key=lambda pair: bool(pair[1])):
        yield template.decode([token for token, _ in run]), sampled


def coloured(pieces: Sequence[tuple[str, bool]], *, marks: bool) -> Text:
    """The conversation, with what the policy sampled in another colour, or between marks."""
    text = Text("\n")
    before, after = SAMPLED_MARKS if marks else ("", "")
    for piece, sampled in pieces:
        text.append(f"{before}{piece}{after}" if sampled else piece, style=SAMPLED_STYLE if sampled else "dim")
    return text
