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
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.version:
        print(f"streamrl {_version()}")
        return OK
    if options.command is None:
        parser.print_help()
        return OK
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
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    launch = commands.add_parser("launch", help="run a training job on this machine")
    _configured(launch)
    launch.add_argument("--name", help="name of the run, and of its directory below `runs`")
    launch.add_argument("--dry-run", action="store_true", help="check, print configuration and roles, start nothing")
    launch.add_argument("--resume", action="store_true", help="continue it, with its own configuration")
    launch.set_defaults(command=_launch)

    config = commands.add_parser("config", help="print the resolved configuration")
    _configured(config)
    config.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="KEY",
        help="print every key, or KEY and those below it, with type, default, value in the file and meaning",
    )
    config.set_defaults(command=_config)

    algorithms = commands.add_parser("algorithms", help="the pieces that an algorithm is made of, with their sources")
    algorithms.set_defaults(command=_algorithms)

    queue = commands.add_parser("queue", help="run one queue broker alone, or look at a queue")
    _served(queue)
    serve = add_queue_actions(queue).add_parser("serve", help="run one broker alone, as without an action")
    _served(serve)

    keygen = commands.add_parser("keygen", help="make a key for a queue that other hosts may reach")
    keygen.add_argument("file", nargs="?", type=Path, metavar="FILE", help="written with mode 600; none: printed")
    keygen.set_defaults(command=_keygen)

    engines = commands.add_parser("engines", help="install inference servers in environments of their own")
    actions = engines.add_subparsers(title="actions", metavar="ACTION", required=True)
    install = actions.add_parser("install", help="make the environment of a server, once; takes minutes")
    install.add_argument("kind", choices=("sglang", "vllm"))
    install.add_argument("--cpu", action="store_true", help="a build without CUDA, for machines without a GPU")
    install.set_defaults(command=_install)

    simulate = commands.add_parser("simulate", help="the queue under faults, on virtual time; checks all invariants")
    simulate.add_argument("--seed", default="0", metavar="S", help="a seed, or FIRST:END for many")
    simulate.add_argument("--engines", type=int, default=2, metavar="N")
    simulate.add_argument("--producers", type=int, default=2, metavar="N")
    simulate.add_argument("--hours", type=float, default=0.05, metavar="H", help="virtual hours with faults")
    simulate.add_argument(
        "--faults", default="random", help="random (the seed decides), all, none, or NAME=N,… (weights and rates)"
    )
    simulate.add_argument(
        "--at", action="append", default=[], metavar="SECOND:FAULT:PROCESS[:SECONDS]", help="one fault; may be repeated"
    )
    simulate.add_argument("--jobs", type=int, default=1, metavar="N", help="processes, for many seeds")
    simulate.set_defaults(command=_simulate)

    status = commands.add_parser(
        "status",
        help="who waits on whom in a live run",
        description="Who waits for whom and for how long, followed to the end: the last line is where to look. "
        "Below it, all processes with what they do, and where the rows are.",
    )
    status.add_argument("run", metavar="RUN", help="name or directory of the run")
    status.add_argument("--json", action="store_true", help="one JSON object; its `head` is where to look")
    status.set_defaults(command=_status)
    add_trace(commands)
    add_sql(commands)
    return parser


def _served(queue: argparse.ArgumentParser) -> None:
    queue.add_argument("--bind", metavar="ADDRESS", help="for example tcp://127.0.0.1:7001")
    queue.add_argument("--dir", type=Path, help="directory of the journal")
    queue.add_argument("--durability", choices=("fsync", "flush", "memory"), default="flush")
    queue.add_argument(
        "--stages",
        type=_names,
        default=("work",),
        metavar="NAME,…",
        help="what is done to every row, in this order; each stage reads all columns and may write any (default: work)",
    )
    queue.add_argument("--key-file", type=Path, help="file of `streamrl keygen`; clients need it too")
    queue.add_argument(
        "--recovery",
        choices=("stop", "skip"),
        default="stop",
        help="damaged columns in the journal: refuse to start, or drop their rows (default: stop)",
    )
    queue.add_argument(
        "--metrics", metavar="HOST:PORT", help="answer Prometheus at http://HOST:PORT/metrics; on this host only"
    )
    queue.set_defaults(command=_queue)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    return names


def _configured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file, or the name of a shipped one (default: demo)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides: learner.steps=20")


def _resolved(options: argparse.Namespace) -> RunConfig:
    from .config import find_file, load_file

    return load_file(find_file(options.config), options.overrides, name=getattr(options, "name", None))


def _launch(options: argparse.Namespace) -> int:
    from rich.console import Console

    from .runtime import plan, preflight, rundir

    named = options.name is not None or any(o.startswith("name=") for o in options.overrides)
    own = options.resume and options.config is None
    config = _resumed(options, named) if own else _resolved(options)
    run, said = rundir.choose(config, resume=options.resume, named=named or own)
    config = run.configured(config)
    if options.dry_run:
        preflight.check_inputs(config, run)
        print(_yaml(config), end="")
        print(f"# roles: {', '.join(plan.role_names(config))}")
        return OK
    if said:
        print(said, flush=True)

    from .runtime import launcher

    return launcher.launch(config, run, resume=options.resume, console=Console())


def _resumed(options: argparse.Namespace, named: bool) -> RunConfig:
    """The run's own configuration with the overrides on top."""
    import msgspec

    from .config import find_file, load_file
    from .runtime.rundir import to_resume

    where = [o for o in options.overrides if o.startswith(("name=", "runs="))]
    place = load_file(find_file(None), where, name=options.name)
    run = to_resume(place, named=named)
    config = load_file(run.config, options.overrides, name=run.path.name)
    # It may have been started from another directory.
    return msgspec.structs.replace(config, runs=place.runs)


def _yaml(config: RunConfig) -> str:
    from .config import to_yaml

    return to_yaml(config)


def _config(options: argparse.Namespace) -> int:
    if options.explain is not None and "=" in options.explain:
        options.overrides.insert(0, options.explain)
        options.explain = ""
    config = _resolved(options)
    if options.explain is None:
        print(_yaml(config), end="")
        return OK
    from .config import RunConfig, find_file, plain
    from .explain import explanation

    source = "here" if options.overrides else find_file(options.config).name
    print(explanation(RunConfig, options.explain, values=plain(config), source=source))
    return OK


def _algorithms(options: argparse.Namespace) -> int:
    from .algorithms import listing

    print(listing())
    return OK


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("streamrl")
    except PackageNotFoundError:
        return "from a checkout that is not installed"


def _queue(options: argparse.Namespace) -> int:
    if options.bind is None or options.dir is None:
        raise ConfigError("queue: expected --bind ADDRESS and --dir DIRECTORY, or an action; see streamrl queue --help")
    from .runtime.alone import run_broker

    return run_broker(
        options.bind,
        options.dir,
        options.durability,
        options.key_file,
        partial(print, flush=True),
        stages=options.stages,
        recovery=options.recovery,
        metrics=options.metrics,
    )


def _keygen(options: argparse.Namespace) -> int:
    from streamrl_queue.keys import new_key, write_key

    if options.file is None:
        print(new_key().hex())
        return OK
    write_key(options.file)
    print(f"{options.file}: a key, for the broker and its clients: --key-file {options.file}, or queue.key_file")
    return OK


def _install(options: argparse.Namespace) -> int:
    from streamrl_producers.engines.install import install

    print(install(options.kind, cpu=options.cpu, say=partial(print, flush=True)))
    return OK


def _simulate(options: argparse.Namespace) -> int:
    from .simulation import runner

    settings = runner.Options(
        engines=options.engines,
        producers=options.producers,
        hours=options.hours,
        faults=options.faults,
        script=tuple(options.at),
    )
    passed = runner.run(settings, runner.parse_seeds(options.seed), options.jobs, partial(print, flush=True))
    return OK if passed else FAILED


def _status(options: argparse.Namespace) -> int:
    from .runtime.status import print_status, status_data

    if not options.json:
        return print_status(options.run)
    import msgspec

    print(msgspec.json.encode(status_data(options.run)).decode())
    return OK


if __name__ == "__main__":
    sys.exit(main())
