"""The commands of `dataloaderjob`. Each command prints its results and returns the exit code. A command imports the
libraries that it needs only when it runs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

from dataloaderjob import __version__
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.processes import discard_output
from dataloaderjob.core.supervision import MAX_FEEDERS

EXIT_DIFFERENT = 1
"""Exit code of verify and replay for a difference, as in diff and cmp. The exit code for any other problem is
EXIT_TROUBLE."""
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
"""Exit code that shells report for a program that SIGPIPE has terminated."""


def advise(args: argparse.Namespace) -> int:
    from dataloaderjob.advise.command import advise

    try:
        command = args.script[1:] if args.script[:1] == ["--"] else args.script
        _print(
            advise(command, steps=args.steps, timeout_s=args.timeout, link_gbit=args.link, as_json=args.json)
        )
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def run(args: argparse.Namespace) -> int:
    try:
        from dataloaderjob.api import load_manifest
    except ModuleNotFoundError as exc:
        raise InputError(
            f"reading a manifest requires the module {exc.name!r}: pip install "
            "'dataloaderjob[trainer,cli]' for --provider local, 'dataloaderjob[local]' for Ray"
        ) from exc
    from dataloaderjob.local.run import run

    job = load_manifest(args.manifest, one_machine=True)
    return run(job, args.manifest, metrics_port=args.metrics_port, provider=args.provider, record=args.record)


def env(args: argparse.Namespace) -> int:
    from dataloaderjob.local.attaching import VARIABLES, as_json, exports, find_attachable, variables

    if args.unset:
        _print(f"unset {' '.join(VARIABLES)}")
        return 0
    found = variables(find_attachable(args.name, args.dir))
    for line in [as_json(found)] if args.json else exports(found):
        _print(line)
    return 0


def status(args: argparse.Namespace) -> int:
    from dataloaderjob.local.console import status_lines
    from dataloaderjob.local.status import find_run, histories, live_runs

    runs = [find_run(args.dir)] if args.dir else live_runs()
    if not runs:
        _print("you have no run on this machine")
    elif args.watch:
        return _watch(args.dir)
    for run, history in zip(runs, histories(runs), strict=True):
        for line in status_lines(run, history):
            _print(line)
    return 0


def _watch(folder: str | None) -> int:
    from dataloaderjob.local.console import Console, watch
    from dataloaderjob.local.status import live_runs

    shown = Console()
    try:
        watch(lambda: [run for run in live_runs(folder) if folder or run.kept_until is None], shown)
    except KeyboardInterrupt:
        if shown.live:
            _print("")  # so that further output goes below the ^C
        return EXIT_INTERRUPTED
    shown.line("", "no run is left to watch", False)
    return 0


def scale(args: argparse.Namespace) -> int:
    from dataloaderjob.local.status import find_run

    run = find_run(args.dir)
    least, per_pod = int(run.about.get("min", 0)), int(run.about.get("per_pod", 1))
    most = MAX_FEEDERS // per_pod
    if args.replicas > most:
        times = f" of {per_pod} feeders each" if per_pod > 1 else ""
        raise InputError(f"{run.name} may have at most {most} replicas{times}, got {args.replicas}")
    if args.replicas < least:
        raise InputError(
            f"{run.name} requires at least {least} replicas of feeders, got {args.replicas}: see "
            "spec.feeders.minAvailable"
        )
    feeders = args.replicas * per_pod
    run.ask({"type": "scale", "feeders": feeders})
    _print(f"{run.name}: {feeders} feeders from now on")
    return 0


def report(args: argparse.Namespace) -> int:
    from dataloaderjob.local.reporting.command import report

    _print(report(args.run, args.output, namespace=args.namespace, seconds=args.seconds))
    return 0


def inject(args: argparse.Namespace) -> int:
    try:
        from dataloaderjob.local import injecting
    except ModuleNotFoundError as exc:
        raise InputError(
            f"inject requires the module {exc.name!r}: pip install 'dataloaderjob[cli]'"
        ) from exc
    request = injecting.Request(
        source=args.filename, manifest=args.job_file, job=args.job,
        sidecar_image=args.sidecar_image or injecting.SIDECAR_IMAGE, pull_secrets=args.sidecar_pull_secret,
    )  # fmt: skip
    with output():
        injecting.run(request, args.output, in_place=args.in_place)
    return 0


def map_(args: argparse.Namespace) -> int:
    try:
        try:
            import pyarrow.parquet  # noqa: F401

            from dataloaderjob.local.mapping import command
        except ModuleNotFoundError as exc:
            needed = str(exc.name).partition(".")[0]
            raise InputError(f"map requires the module {needed!r}: pip install 'dataloaderjob[map]'") from exc
        names = (
            "script",
            "dataset",
            "function",
            "output",
            "collate_fn",
            "batch_size",
            "rows_per_file",
            "feeders",
        )
        _print(command.run(command.Arguments(**{name: getattr(args, name) for name in names})))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def verify(args: argparse.Namespace) -> int:
    from dataloaderjob.local.verify import check, compare

    if args.sample is not None and (args.other is not None or args.sample < 1):
        raise InputError(
            "--sample must be at least 1, and applies only to a single record, whose batches are rebuilt"
        )
    if args.other is not None:
        equal, lines = compare(args.record, args.other, epoch=args.epoch, trusted=args.trust)
    else:
        equal, lines = check(args.record, epoch=args.epoch, sample=args.sample, trusted=args.trust)
    for line in lines:
        _print(line)
    return 0 if equal else EXIT_DIFFERENT


def replay(args: argparse.Namespace) -> int:
    from dataloaderjob.local.replay import Replay

    output = None if args.output is None else args.output.absolute()
    replay = Replay(args.record, rank=args.rank, loader=args.loader, epoch=args.epoch, batch=args.batch)
    replay.make(debug=args.pdb, trusted=args.trust)
    for line in replay.lines():
        _print(line)
    if output is not None:
        replay.save(output)
    return 0 if replay.equal else EXIT_DIFFERENT


def version(_: argparse.Namespace) -> int:
    _print(f"dataloaderjob {__version__}")
    return 0


def _print(text: str) -> None:
    with output():
        sys.stdout.write(f"{text}\n")


@contextlib.contextmanager
def output() -> Iterator[None]:
    """Ends the command without a message if the reader of its output, such as `head`, has closed the pipe."""
    try:
        yield
    except BrokenPipeError:
        discard_output(sys.stdout.fileno())
        sys.exit(EXIT_PIPE)
