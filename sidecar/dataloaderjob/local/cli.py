"""The command `dataloaderjob`: advise, run, env, status, scale, report, inject, map, verify, replay, version."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataloaderjob import __version__
from dataloaderjob.core.errors import DataLoaderJobError, InputError
from dataloaderjob.core.texts import clean_lines
from dataloaderjob.local import subcommands
from dataloaderjob.providers.provider import NAMES as PROVIDERS

EXIT_INPUT = 2
EXIT_FAILED = 1
EXIT_TROUBLE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code."""
    complete_streams()
    args = make_parser().parse_args(argv)
    try:
        code = int(args.command(args))
        with subcommands.output():
            sys.stdout.flush()
        return code
    except (DataLoaderJobError, OSError) as exc:
        sys.stderr.write(f"dataloaderjob: {clean_lines(exc)}\n")
        return EXIT_INPUT if isinstance(exc, InputError) else int(args.failed)
    except UnicodeEncodeError as exc:
        sys.stderr.write(
            f"dataloaderjob: {clean_lines(exc)}: set PYTHONUTF8=1, or a locale with UTF-8 such as LC_ALL=C.UTF-8\n"
        )
        return int(args.failed)
    except Exception:  # an error in user code of a record, or a bug of this package
        traceback.print_exc()
        return int(args.failed)


def complete_streams() -> None:
    """Makes every character printable, whatever the encoding. A stream that was closed before Python started becomes
    the null device."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open until the process ends
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def path(text: str) -> Path:
    """Reads the path of a file or folder from the command line. Raises ArgumentTypeError for an empty text, which would
    mean the current folder, and for a URL."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty; is a shell variable unset?")
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"must be a path on this machine, but is the URL {text}: download it first"
        )
    return Path(text)


def make_parser() -> argparse.ArgumentParser:
    """Builds the command-line parser, from which docs/reference/cli.md is generated."""
    parser = argparse.ArgumentParser(
        prog="dataloaderjob",
        description="Runs a DataLoaderJob on this machine: feeders, sidecar and trainers.",
    )
    parser.set_defaults(failed=EXIT_FAILED)
    parser.add_argument("--version", action="version", version=f"dataloaderjob {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_advise(commands)
    run = commands.add_parser("run", help="run a manifest on this machine; exit with the trainers' exit code")
    run.add_argument("manifest", type=path, help="a DataLoaderJob manifest")
    run.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve /metrics (Prometheus) and /healthz on this port",
    )
    run.add_argument(
        "--provider", choices=PROVIDERS, default=PROVIDERS[0],
        help="start feeders with ray, as on a cluster (default), or as local processes on this machine",
    )  # fmt: skip
    run.add_argument(
        "--record", type=path, metavar="FOLDER",
        help=(
            "record the batches that each rank consumes, for verify and replay; use the same folder for a "
            "resumed run"
        ),
    )  # fmt: skip
    run.set_defaults(command=subcommands.run)
    _add_env(commands)
    status = commands.add_parser("status", help="show the runs on this machine")
    status.add_argument("--dir", help="show only the run with this folder, as listed by status")
    status.add_argument(
        "--watch", action="store_true", help="keep refreshing until nothing runs or you press Ctrl-C"
    )
    status.set_defaults(command=subcommands.status)
    scale = commands.add_parser("scale", help="change spec.feeders.replicas of a run on this machine")
    scale.add_argument("replicas", type=int, help="the new number of replicas")
    scale.add_argument("--dir", help="folder of the run, required if several are running")
    scale.set_defaults(command=subcommands.scale)
    _add_report(commands)
    _add_inject(commands)
    _add_map(commands)
    _add_verify(commands)
    _add_replay(commands)
    commands.add_parser("version", help="show the version").set_defaults(command=subcommands.version)
    return parser


def _add_advise(commands: Any) -> None:
    advise = commands.add_parser(
        "advise", help="observe an unchanged script, and report whether feeders would help, and how many",
        description="Runs a script with torch's DataLoader, times its steps with and without input, makes a few "
        "batches, prints the advice, and ends the script. It needs neither feeders nor Ray. The script's output goes "
        "to standard error.",
        usage="dataloaderjob advise [options] -- COMMAND ...",
    )  # fmt: skip
    advise.add_argument("--steps", type=int, default=50, metavar="N", help="steps to observe (default: 50)")
    advise.add_argument(
        "--timeout", type=float, default=90, metavar="S",
        help="stop observing after this number of seconds (default: 90)",
    )  # fmt: skip
    advise.add_argument(
        "--link",
        type=float,
        metavar="GBIT",
        help="bandwidth of the link into the trainer's node, in Gbit/s (default: unlimited)",
    )
    advise.add_argument(
        "--json", action="store_true", help="print JSON: input_bound, gain, feeders, limit and more"
    )
    advise.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="the command that starts the training script",
    )
    advise.set_defaults(command=subcommands.advise)


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report", help="write a page about a run: waiting, feeders and their events, slow samples, CPU, the verdict",
        description=(
            "Writes an HTML file about a live run, a run that was started with --record, or a "
            "job on a cluster, which it watches for a minute. The file can be opened offline."
        ),
    )  # fmt: skip
    report.add_argument(
        "run", nargs="?", metavar="RUN",
        help="name or folder of a live run, or the folder of a record (default: the only live run); with "
        "--namespace, name of a DataLoaderJob",
    )  # fmt: skip
    report.add_argument(
        "-n", "--namespace", metavar="NAMESPACE",
        help="watch a job in this namespace of kubectl's current cluster",
    )  # fmt: skip
    report.add_argument(
        "--seconds", type=int, default=60, metavar="S", help="time to watch a job on a cluster (default: 60)"
    )
    report.add_argument(
        "-o", "--output", type=path, default=Path("report.html"), metavar="FILE",
        help="file to write (default: report.html)",
    )  # fmt: skip
    report.set_defaults(command=subcommands.report)


def _add_env(commands: Any) -> None:
    env = commands.add_parser(
        "env", help="print the variables that attach your own training scripts to a run on this machine",
        description=(
            "Prints sh commands that attach a shell's processes to a run whose manifest has "
            "spec.trainers.attach: eval \"$(dataloaderjob env NAME)\". If there is no such run, it prints "
            "only an error, and the shell is unchanged."
        ),
    )  # fmt: skip
    env.add_argument("name", nargs="?", metavar="NAME", help="name of the job (default: the only run)")
    env.add_argument("--dir", help="folder of the run, required if several have the same name")
    how = env.add_mutually_exclusive_group()
    how.add_argument("--unset", action="store_true", help="print the commands that detach the shell again")
    how.add_argument("--json", action="store_true", help="print a JSON object of variables, for a notebook")
    env.set_defaults(command=subcommands.env)


def _add_inject(commands: Any) -> None:
    inject = commands.add_parser(
        "inject", help="add the sidecar of a job with spec.trainers.attach to the pod templates of a file",
        description=(
            "Adds the sidecar to pod templates with the label dataloading.dev/inject: NAME, in objects of "
            "all known kinds. All other lines remain unchanged. Injecting a file twice has the same result "
            "as injecting it once."
        ),
    )  # fmt: skip
    inject.add_argument(
        "-f", "--filename", required=True, metavar="FILE", help="YAML or JSON file; - for stdin"
    )
    inject.add_argument(
        "-j", "--job-file", metavar="FILE",
        help="file with the DataLoaderJob; - for stdin (default: the file given with -f)",
    )  # fmt: skip
    inject.add_argument(
        "--job",
        metavar="NAME",
        help="also inject pod templates without the label, and label them with this job",
    )
    inject.add_argument("-o", "--output", metavar="FILE", help="write to this file (default: stdout)")
    inject.add_argument("--in-place", action="store_true", help="change the file given with -f")
    inject.add_argument(
        "--sidecar-image", metavar="IMAGE",
        help=(
            "sidecar image for a job that does not name one, as in the chart's values (default: the "
            "chart's default)"
        ),
    )  # fmt: skip
    inject.add_argument(
        "--sidecar-pull-secret", action="append", default=[], metavar="NAME",
        help="pull secret for that image in the pods' namespace; may be repeated",
    )  # fmt: skip
    inject.set_defaults(command=subcommands.inject)


def _add_map(commands: Any) -> None:
    map_ = commands.add_parser(
        "map", help="apply a function or a model to a dataset on feeders, and write the results as Parquet",
        description="Applies a function from a script to the batches of a dataset, on feeders, and writes one row for "
        "each sample. Repeat the command to resume an interrupted run.",
    )  # fmt: skip
    map_.add_argument(
        "script", type=path, help='a Python script; code below if __name__ == "__main__": does not run'
    )
    map_.add_argument(
        "dataset", help="name, in the script, of a dataset with __len__, or of a function that returns one"
    )
    map_.add_argument(
        "function", help=(
            "name, in the script, of a function, a torch.nn.Module, or a class with callable instances; it "
            "is called with a batch and returns a dict of columns, or one column"
        ),
    )  # fmt: skip
    map_.add_argument(
        "--output", type=path, required=True, metavar="FOLDER",
        help="folder for the results; an interrupted run with the same arguments is resumed",
    )  # fmt: skip
    map_.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="samples in a batch (default: 32)"
    )
    map_.add_argument(
        "--collate-fn", metavar="NAME",
        help=(
            "name, in the script, of the function that collates a list of samples (default: torch's "
            "default_collate)"
        ),
    )  # fmt: skip
    map_.add_argument(
        "--rows-per-file", type=int, default=8192, metavar="N",
        help=(
            "rows per file, rounded up to whole batches; an interruption loses the work on at most one "
            "file (default: 8192)"
        ),
    )  # fmt: skip
    map_.add_argument(
        "--feeders", type=int, metavar="N",
        help=(
            "number of feeders; with 0, this process does the work, for debugging (default: as for a "
            "loader)"
        ),
    )  # fmt: skip
    map_.set_defaults(command=subcommands.map_)


_TRUST = (
    "This command runs the code in the record: use only records that you trust. It refuses a record that "
    "another user owns or could have changed, unless --trust names that user."
)


def _add_trust(parser: Any) -> None:
    parser.add_argument(
        "--trust", action="append", default=[], metavar="USER",
        help="run code from records that this user owns; may be repeated (default: only your own and root's)",
    )  # fmt: skip


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify", help="compare two recorded runs, or one run with its dataset",
        description=(
            "Compares the batches that two runs consumed, and names the first difference. If only one run is given, "
            "compares its batches with those that its code and data produce here. "
            f"{_TRUST} Exit codes: 0 equal, 1 different, 2 inconclusive; see standard error."
        ),
    )  # fmt: skip
    verify.add_argument("record", type=path, help="the --record folder of a run")
    verify.add_argument(
        "other", type=path, nargs="?", help="folder of another run; if omitted, batches are rebuilt"
    )
    verify.add_argument("--epoch", type=int, metavar="E", help="check only this epoch; the first is 0")
    verify.add_argument(
        "--sample", type=int, metavar="N", help="rebuild only N evenly spaced batches, not all"
    )
    _add_trust(verify)
    verify.set_defaults(command=subcommands.verify, failed=EXIT_TROUBLE)


def _add_replay(commands: Any) -> None:
    replay = commands.add_parser(
        "replay", help="rebuild one recorded batch in this process",
        description=(
            "Rebuilds one batch of a recorded run in this process and compares it with the batch that was "
            f"consumed. {_TRUST} Exit codes: 0 equal, 1 different, 2 inconclusive; see standard error."
        ),
    )  # fmt: skip
    replay.add_argument("record", type=path, help="the --record folder of a run")
    replay.add_argument("--rank", default="0", metavar="R", help="the rank (default: 0)")
    replay.add_argument(
        "--loader", type=int, default=0, metavar="L",
        help="number of the loader, in order of creation in the script (default: 0)",
    )  # fmt: skip
    replay.add_argument(
        "--epoch", type=int, required=True, metavar="E", help="the loader's epoch; the first is 0"
    )
    replay.add_argument(
        "--batch",
        type=int,
        required=True,
        metavar="N",
        help="number of the batch in the epoch; the first is 0",
    )
    replay.add_argument("--pdb", action="store_true", help="stop in the debugger before each sample is made")
    replay.add_argument(
        "--output", type=path, metavar="FILE", help="save the batch to this file with torch.save"
    )
    _add_trust(replay)
    replay.set_defaults(command=subcommands.replay, failed=EXIT_TROUBLE)


if __name__ == "__main__":
    sys.exit(main())
