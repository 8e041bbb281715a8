"""The commands that look at runs and queues, for the command line's parser. Imports nothing heavy by itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

RUN = "name or directory of a run, or the directory of a journal"
TARGET = f"{RUN}, or a queue's address"


def add_trace(commands: Any) -> None:
    """`streamrl trace RUN ROW`."""
    trace = commands.add_parser("trace", help="one row's life: stages, times, versions, deliveries, step or reason")
    trace.add_argument("run", metavar="RUN", help=RUN)
    trace.add_argument("row", metavar="ROW", type=int)
    trace.add_argument("--text", action="store_true", help="show the conversation too, sampled tokens in colour")
    trace.add_argument("--json", action="store_true", help="for machines, with all columns")
    trace.set_defaults(command=_trace)


def add_sql(commands: Any) -> None:
    """`streamrl sql RUN [QUERY]`."""
    sql = commands.add_parser("sql", help="query a run's rows, events, versions and steps (needs DuckDB)")
    sql.add_argument("run", metavar="RUN", help=RUN)
    sql.add_argument("query", metavar="QUERY", nargs="?", help="without one, list the tables and their columns")
    form = sql.add_mutually_exclusive_group()
    form.add_argument("--csv", dest="form", action="store_const", const="csv", default="table")
    form.add_argument("--json", dest="form", action="store_const", const="json")
    sql.set_defaults(command=_sql)


def add_queue_actions(queue: argparse.ArgumentParser) -> Any:
    """`streamrl queue stats|peek|dead|requeue|verify`; returns the place for more of them."""
    actions = queue.add_subparsers(title="actions", metavar="ACTION")

    stats = _action(actions, "stats", TARGET, "counts by state, stage, split and reason", _stats, key=True)
    _json(stats)

    peek = _action(actions, "peek", TARGET, "rows that are ready for a stage, without leasing them", _peek, key=True)
    peek.add_argument("stage", metavar="STAGE")
    _rows(peek)
    _json(peek)

    dead = _action(actions, "dead", RUN, "rows that died or were dropped, with reason and task", _dead)
    _rows(dead)
    _json(dead)

    requeue = _action(actions, "requeue", RUN, "put the tasks of dead or dropped rows again", _requeue, key=True)
    requeue.add_argument("rows", metavar="ROW", type=int, nargs="+")

    verify = _action(actions, "verify", RUN, "check every record of the journal, and that its rows add up", _verify)
    _json(verify)
    return actions


def _action(actions: Any, name: str, target: str, what: str, command: Any, *, key: bool = False) -> Any:
    action = actions.add_parser(name, help=what, description=what)
    action.add_argument("target", metavar="TARGET", help=target)
    if key:
        action.add_argument("--key-file", type=Path, help="file with the queue's key")
    action.set_defaults(command=command)
    return action


def _rows(action: Any) -> None:
    action.add_argument("--rows", type=int, default=20, metavar="N", help="how many at most (default: 20)")


def _json(action: Any) -> None:
    action.add_argument("--json", action="store_true", help="for machines")


def _trace(options: argparse.Namespace) -> int:
    from .trace import trace

    return trace(options.run, options.row, text=options.text, as_json=options.json)


def _sql(options: argparse.Namespace) -> int:
    from .sql import sql

    return sql(options.run, options.query, form=options.form)


def _stats(options: argparse.Namespace) -> int:
    from .queues import stats

    return stats(options.target, options.key_file, as_json=options.json)


def _peek(options: argparse.Namespace) -> int:
    from .queues import peek

    return peek(options.target, options.stage, options.rows, options.key_file, as_json=options.json)


def _dead(options: argparse.Namespace) -> int:
    from .queues import dead

    return dead(options.target, options.rows, as_json=options.json)


def _requeue(options: argparse.Namespace) -> int:
    from .queues import requeue

    return requeue(options.target, options.rows, options.key_file)


def _verify(options: argparse.Namespace) -> int:
    from .verify import verify

    return verify(options.target, as_json=options.json)
