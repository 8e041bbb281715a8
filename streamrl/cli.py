"""The command line. Nothing heavy is imported before a command needs it: `--help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl_queue.errors import ConfigError, StreamRLError

from .inspect.commands import add_queue_actions, add_sql, add_trace

if TYPE_CHECKING:
    from .config import RunConfig

OK, FAILED, REFUSED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 1 failed, 2 refused before anything was started)."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except StreamRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, ConfigError) else FAILED
    except BrokenPipeError:
        # `streamrl config --explain | head`
        sys.stderr.close()
        return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="streamrl", description="Asynchronous reinforcement learning for language-model agents."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    launch = commands.add_parser("launch", help="run a training job on this machine")
    _configured(launch)
    launch.add_argument("--name", help="name of the run, and of its directory below `runs`")
    launch.add_argument("--dry-run", action="store_true", help="print configuration and roles, start nothing")
    launch.add_argument("--resume", action="store_true", help="continue the run of this name")
    launch.set_defaults(command=_launch)

    config = commands.add_parser("config", help="print the resolved configuration")
    _configured(config)
    config.add_argument("--explain", action="store_true", help="print every key with type, default and meaning")
    config.set_defaults(command=_config)

    queue = commands.add_parser("queue", help="run one queue broker alone, or look at a queue")
    _served(queue)
    serve = add_queue_actions(queue).add_parser("serve", help="run one broker alone, as without an action")
    _served(serve)

    status = commands.add_parser("status", help="who waits on whom in a live run")
    status.add_argument("run", metavar="RUN", help="name or directory of the run")
    status.set_defaults(command=_status)
    add_trace(commands)
    add_sql(commands)
    return parser


def _served(queue: argparse.ArgumentParser) -> None:
    queue.add_argument("--bind", metavar="ADDRESS", help="for example tcp://127.0.0.1:7001")
    queue.add_argument("--dir", type=Path, help="directory of the journal")
    queue.add_argument("--durability", choices=("fsync", "flush", "memory"), default="flush")
    queue.add_argument("--key-file", type=Path, help="file with a key of 32 bytes; clients need it too")
    queue.set_defaults(command=_queue)


def _configured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file, or the name of a shipped one (default: demo)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides: learner.steps=20")


def _resolved(options: argparse.Namespace) -> RunConfig:
    from .config import find_file, load_file

    return load_file(find_file(options.config), options.overrides, name=getattr(options, "name", None))


def _launch(options: argparse.Namespace) -> int:
    from rich.console import Console

    from .runtime import plan, rundir

    config = _resolved(options)
    if options.dry_run:
        print(_yaml(config), end="")
        print(f"# roles: {', '.join(plan.role_names(config))}")
        return OK
    named = options.name is not None or any(o.startswith("name=") for o in options.overrides)
    plain_resume = options.resume and options.config is None and not options.overrides
    run, said = rundir.choose(config, resume=options.resume, named=named, trust=plain_resume)
    if said:
        print(said, flush=True)

    from .runtime import launcher

    return launcher.launch(run.configured(config), run, resume=options.resume, console=Console())


def _yaml(config: RunConfig) -> str:
    from .config import to_yaml

    return to_yaml(config)


def _config(options: argparse.Namespace) -> int:
    if options.explain:
        from .config import RunConfig
        from .explain import explanation

        print(explanation(RunConfig))
    else:
        print(_yaml(_resolved(options)), end="")
    return OK


def _queue(options: argparse.Namespace) -> int:
    if options.bind is None or options.dir is None:
        raise ConfigError("queue: expected --bind ADDRESS and --dir DIRECTORY, or an action; see streamrl queue --help")
    from .runtime.alone import run_broker

    return run_broker(options.bind, options.dir, options.durability, options.key_file, partial(print, flush=True))


def _status(options: argparse.Namespace) -> int:
    from .runtime.status import print_status

    return print_status(options.run)


if __name__ == "__main__":
    sys.exit(main())
