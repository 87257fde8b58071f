"""The command `dataloaderjob`: run, status, scale, version."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dataloaderjob import __version__
from dataloaderjob.core.errors import DataLoaderJobError, InputError
from dataloaderjob.providers.provider import NAMES as PROVIDERS

EXIT_INPUT = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    args = make_parser().parse_args(argv)
    try:
        return int(args.command(args))
    except (DataLoaderJobError, OSError) as exc:
        sys.stderr.write(f"dataloaderjob: {exc}\n")
        return EXIT_INPUT if isinstance(exc, InputError) else EXIT_FAILED


def make_parser() -> argparse.ArgumentParser:
    """The command line; docs/reference/cli.md is made of it."""
    parser = argparse.ArgumentParser(
        prog="dataloaderjob",
        description="Runs a DataLoaderJob on this machine: feeders, sidecar and trainers.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    run = commands.add_parser("run", help="run a manifest here; ends with the trainers' exit code")
    run.add_argument("manifest", type=Path, help="a DataLoaderJob manifest")
    run.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="serve Prometheus' /metrics and /healthz here"
    )
    run.add_argument(
        "--provider", choices=PROVIDERS, default=PROVIDERS[0],
        help="who starts feeders: ray as on a cluster (default), or plain processes of this machine",
    )  # fmt: skip
    run.set_defaults(command=_run)
    status = commands.add_parser("status", help="show what runs here")
    status.add_argument("--dir", help="folder of one run, as status shows it")
    status.add_argument(
        "--watch", action="store_true", help="show it again and again, until nothing runs or you press Ctrl-C"
    )
    status.set_defaults(command=_status)
    scale = commands.add_parser("scale", help="change spec.feeders.replicas of what runs here")
    scale.add_argument("replicas", type=int, help="the new number")
    scale.add_argument("--dir", help="folder of the run, where several live")
    scale.set_defaults(command=_scale)
    commands.add_parser("version", help="show the version").set_defaults(command=_version)
    return parser


def _run(args: argparse.Namespace) -> int:
    try:
        from dataloaderjob.api import load_manifest
    except ModuleNotFoundError as exc:
        raise InputError(
            f"to read a manifest the module {exc.name!r} is needed: pip install 'dataloaderjob[trainer,cli]' for "
            "--provider local, 'dataloaderjob[local]' for Ray"
        ) from exc
    from dataloaderjob.local.run import run

    job = load_manifest(args.manifest)
    return run(job, args.manifest, metrics_port=args.metrics_port, provider=args.provider)


def _status(args: argparse.Namespace) -> int:
    from dataloaderjob.local.console import status_lines
    from dataloaderjob.local.status import find_run, live_runs

    runs = [find_run(args.dir)] if args.dir else live_runs()
    if not runs:
        _print("nothing of yours runs on this machine")
    elif args.watch:
        return _watch(args.dir)
    for run in runs:
        for line in status_lines(run):
            _print(line)
    return 0


def _watch(folder: str | None) -> int:
    from dataloaderjob.local.console import Console, watch
    from dataloaderjob.local.status import live_runs

    shown = Console()
    try:
        watch(lambda: live_runs(folder), shown)
    except KeyboardInterrupt:
        if shown.live:
            _print("")  # below the ^C
        return EXIT_INTERRUPTED
    shown.line("", "nothing is left to watch", False)
    return 0


def _scale(args: argparse.Namespace) -> int:
    from dataloaderjob.local.status import find_run

    run = find_run(args.dir)
    least, most = int(run.about.get("min", 0)), run.about.get("max")
    if args.replicas < least or (most is not None and args.replicas > most):
        upper = "any number" if most is None else str(most)
        raise InputError(
            f"{run.job} may have {least} to {upper} replicas of feeders, found {args.replicas}: see "
            "spec.feeders.minReplicas and maxReplicas"
        )
    feeders = args.replicas * int(run.about.get("per_pod", 1))
    run.ask({"type": "scale", "feeders": feeders})
    _print(f"{run.job}: {feeders} feeders from now on")
    return 0


def _version(_: argparse.Namespace) -> int:
    _print(f"dataloaderjob {__version__}")
    return 0


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
