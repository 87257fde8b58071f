"""`make generate`: all that is made of the code, which is the schema of the manifest and pages of the documents.

FILES has a row for each. A test fails when one of them is not what would be made.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import manifest_reference
from prometheus_client.parser import text_string_to_metric_families

import dataloaderjob
import dataloaderjob_operator.__main__ as operator
from dataloaderjob.api import crd
from dataloaderjob.api.trainer import TrainerSpec
from dataloaderjob.core import places
from dataloaderjob.local import cli
from dataloaderjob.local.plan import EXIT_LATE
from dataloaderjob.sidecar import metrics as sidecar
from dataloaderjob_operator.monitoring import ErrorKind, Metrics

ROOT = Path(__file__).resolve().parent.parent
METRICS = ROOT / "docs/reference/metrics.md"
MADE = "<!-- Made by `make generate`. Change {}, not this file. -->"
EXCEPTIONS_HEAD = f"""# Exceptions

{MADE.format("the classes")}

All are names of the package, as in `except dataloaderjob.FeederLost`. An exception that your own code raises in a
feeder reaches the training loop as what it is, with the feeder's traceback, as with torch's DataLoader. A message says
what was needed, what was found and what to do.

| exception | is a | meaning |
|---|---|---|
"""
HEAD = "| metric | type | labels | what |\n|---|---|---|---|\n"
CLI_HEAD = f"""# Commands

{MADE.format("the parsers")}

"""
CLI_EXITS = """## Exit codes

The last line on standard error says why, and what to do.

| code | of | meaning |
|---|---|---|
| 0 | all | Success; `run`: all trainers ended with 0. |
| {refused} | all | An argument or the manifest cannot work, or there is no such run or record; nothing was started. |
| {refused} | `map` | A result of your function cannot be written; complete files stay. |
| {failed} | all but `verify`, `replay` | The service cannot go on, or the system refused something, such as a file. |
| {failed} | `map` | Your code raised an exception. |
| {different} | `verify`, `replay` | There is a difference, which standard output names. |
| {trouble} | `verify`, `replay` | Whatever else went wrong: whether there is a difference was not found out. |
| {late} | `run` | A deadline of the manifest passed. |
| 128 and the signal's number | `run`, `map` | Ended by a signal, such as 130 after Ctrl-C. |
| any other | `run` | That of the first trainer that failed. |

"""
VARIABLES = (
    (
        places.SOCKET_VARIABLE, "job", "trainer", "the private service of the script",
        "Path of the sidecar's Unix socket. A script by itself has none and starts feeders of its own.",
    ),
    (
        places.FEEDERS_VARIABLE, "job, you", "trainer", "CPUs of the process less one, from 1 to 8",
        "Number of the job's feeders; a script by itself starts as many where `num_workers` is left out.",
    ),
    (
        places.PREFETCH_VARIABLE, "job, you", "trainer", "twice the number of feeders, 16 at least",
        "Batches that the sampler is ahead where `prefetch_factor` is left out: `spec.loader.prefetch`.",
    ),
    (
        places.ALLOW_PICKLE_VARIABLE, "job, you", "trainer", "not allowed",
        "`1`: batches may hold objects that only pickle can carry, as with `allow_pickle=True`.",
    ),
    (
        places.RECORD_VARIABLE, "`dataloaderjob run --record`, you", "trainer", "nothing is recorded",
        "Folder in which each trainer process writes down what it takes, for `verify` and `replay`.",
    ),
    (
        places.FOLDER_VARIABLE, "you", "trainer", "`dataloaderjob` in `XDG_RUNTIME_DIR`, else in the temporary folder",
        "Folder for the socket and files of a script's own service; others may not write to it.",
    ),
    (
        places.KEEP_VARIABLE, "you", "trainer", "feeders end with their script",
        "Seconds for which a script's own feeders stay after it, for the next script of the same environment.",
    ),
    (
        places.IN_FEEDER_VARIABLE, "feeder", "trainer", "not in a feeder",
        "`1` in feeders: a loader that is iterated there is refused, since it would wait for itself.",
    ),
    (
        places.DISTRIBUTED_VARIABLE, "trainer", "feeders", "the trainer has no process group",
        "`1` where a slot of an IterableDataset answers for its trainer's rank in `torch.distributed`.",
    ),
    (
        places.PATH_VARIABLE, "trainer", "private service", "Python's own",
        "The trainer's import path; the feeders of a script by itself get it as `PYTHONPATH`.",
    ),
    (
        places.IMPORTED_VARIABLE, "private service", "feeder host", "not recorded",
        "File in which feeders that stay after their script record what they have imported.",
    ),
    (
        places.RUN_VARIABLE, "`dataloaderjob run`, trainer", "the same, private service", "none",
        "Tag in the environment of all processes of one run, by which none of them is left behind.",
    ),
    (
        places.NODE_FOLDER_VARIABLE, "feeders' pod", "feeders", "a folder of their own",
        "Folder of the pod in which its feeders keep blobs and find the socket for their output.",
    ),
    (
        places.RAY_TASKS_VARIABLE, "job", "feeders", "user code cannot reach the job's Ray",
        "`1` where `spec.ray.managed.tasks` leaves room for Ray tasks: feeders hand address and token on to user code.",
    ),
)  # fmt: skip
"""A row for each variable: name, who sets it, who reads it, what holds without it, meaning. """
ENVIRONMENT = f"""# Environment variables

{MADE.format("the table in `docs/generate.py`")}

*Job* is `dataloaderjob run` or the operator; a manifest cannot set these variables itself. A script by itself needs
none of them; *private service* is what it starts on its machine.

| variable | set by | read by | without it | meaning |
|---|---|---|---|---|
{{ours}}
## What a trainer's command gets

`dataloaderjob run` and the operator set what `torchrun` sets or reads. Where a replica has several processes, its
command is `torchrun`, which reads the variables `PET_*` and sets those of the ranks itself.

| variable | where a replica is one process | where it has several |
|---|---|---|
{{launch}}
On one machine `LOCAL_RANK` and `LOCAL_WORLD_SIZE` count all replicas, since they are all there.

## Variables of others that count

| variable | effect |
|---|---|
| `RANK`, `PMI_RANK` and other launchers' | Name of the process at the sidecar, and its label in metrics. |
| `MASTER_PORT`, `TORCHELASTIC_RUN_ID` and other launchers' | Ranks of one launch share a private service. |
| `PYTHONHASHSEED` | Order of sets of strings: feeders have 0 unless it is set, so that all of them agree. |
| `XDG_RUNTIME_DIR`, `TMPDIR` | Where the folder of a private service is. |

User code in the feeders sees the trainer's environment. What belongs to one rank, process or machine stays behind:
variables of launchers, of Kubernetes, Ray, CUDA and Python, and of the session, such as `HOME` and `TERM`, unless the
script changed these itself.
"""


def of_operator() -> str:
    """What the operator serves once each labelled metric has a value."""
    made = Metrics()
    made.describe(version="1", kopf="2", phases=dict)
    made.received("Pod")
    made.reconcile_errors.labels(ErrorKind.BUG.value).inc()
    made.api_writes.labels("Pod", "apply").inc()
    return made.text().decode()


def of_sidecar() -> str:
    return sidecar.prometheus([("0", dict.fromkeys(sidecar.KEYS, 0))], "team/mnist/uid")


def table(text: str) -> str:
    """One row for each metric in Prometheus' text format."""
    rows = []
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        rows.append(f"| `{name}` | {family.type} | {', '.join(sorted(labels))} | {family.documentation} |\n")
    return HEAD + "".join(rows)


def metrics() -> str:
    """The page of metrics with its two tables made anew."""
    tables = iter((table(of_operator()), table(of_sidecar())))
    return re.sub(r"\| metric \|.*\n(?:\|.*\n)+", lambda _: next(tables), METRICS.read_text())


def errors() -> list[type[Exception]]:
    """Classes that a script can catch, each after the one that it refines."""
    found: list[type[Exception]] = [dataloaderjob.DataLoaderJobError]
    for parent in found:
        found += sorted(
            (child for child in parent.__subclasses__() if child.__name__ in dataloaderjob.__all__),
            key=lambda child: child.__name__,
        )
    return found


def exceptions() -> str:
    """The page of errors."""
    rows = []
    for error in errors():
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        rows.append(f"| `{error.__name__}` | {bases} | {inspect.getdoc(error)} |\n")
    return EXCEPTIONS_HEAD + "".join(rows)


def commands() -> str:
    """The page of commands."""
    parser = cli.make_parser()
    parts = [CLI_HEAD, f"{parser.description}\n\n"]
    for action in _actions(parser):
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  argparse has no other name for them
            helps = {choice.dest: choice.help for choice in action._choices_actions}  # noqa: SLF001  as above
            for name, command in action.choices.items():
                parts.append(f"## dataloaderjob {name}\n\n{_sentence(helps[name] or '')}\n\n")
                parts.append(_arguments(command))
    codes = {"different": cli.EXIT_DIFFERENT, "trouble": cli.EXIT_TROUBLE, "late": EXIT_LATE}
    parts.append(CLI_EXITS.format(refused=cli.EXIT_INPUT, failed=cli.EXIT_FAILED, **codes))
    parser = operator.make_parser()
    parts.append(
        f"## The operator\n\n`python -m dataloaderjob_operator`: {parser.description} The chart gives it its "
    )
    parts.append("arguments.\n\n" + _arguments(parser))
    return "".join(parts).rstrip("\n") + "\n"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All but --help."""
    for action in parser._actions:  # noqa: SLF001  argparse has no other name for them
        if not isinstance(action, argparse._HelpAction):  # noqa: SLF001  as above
            yield action


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in _actions(parser):
        name = action.option_strings[-1] if action.option_strings else action.metavar or action.dest
        if action.option_strings and action.nargs != 0:
            value = action.metavar or ("" if action.choices else action.dest.upper().split("_")[-1])
            name = f"{name} {value}".rstrip()
        choices = ", ".join(f"`{choice}`" for choice in action.choices or ())
        default = "required" if action.required else _default(action.default)
        help_ = _sentence(" ".join((action.help or "").split()))
        rows.append(f"| `{name}` | {default} | {help_}{f' One of {choices}.' if choices else ''} |\n")
    return f"| argument | default | meaning |\n|---|---|---|\n{''.join(rows)}\n" if rows else ""


def _sentence(phrase: str) -> str:
    """A phrase of --help with the capital and the full stop that a page has."""
    return f"{phrase[:1].upper()}{phrase[1:].rstrip('.')}." if phrase else ""


def _default(value: object) -> str:
    if value in (None, [], False, argparse.SUPPRESS):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def environment() -> str:
    """The page of environment variables."""
    ours = "".join(
        f"| `{name}` | {set_by} | {read_by} | {default} | {meaning} |\n"
        for name, set_by, read_by, default, meaning in VARIABLES
    )
    one, several = (_launch(processes) for processes in (1, 5))
    launch = "".join(f"| `{name}` | {one[name]} | {several.get(name, '')} |\n" for name in one)
    return ENVIRONMENT.format(ours=ours, launch=launch)


def _launch(processes: int) -> dict[str, str]:
    """What of its job each launch variable is."""
    template = {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["train"]}]}}
    spec = TrainerSpec.model_validate({"replicas": 7, "processesPerPod": processes, "template": template})
    words = {
        "7": "replicas",
        "5": "processes of a replica",
        "3": "number of the replica",
        "host": "host of replica 0",
        "29500": "a port there",
    }
    made = spec.launch_environment(replica=3, master_addr="host", master_port=29500)
    return {name: words.get(value, value) for name, value in made.items()}


FILES: dict[str, Callable[[], str]] = {
    "crds/dataloaderjobs.yaml": crd.crd_text,
    "charts/dataloaderjob/files/dataloaderjobs.yaml": crd.crd_text,
    "docs/reference/manifest.md": manifest_reference.reference,
    "docs/reference/cli.md": commands,
    "docs/reference/environment.md": environment,
    "docs/reference/exceptions.md": exceptions,
    "docs/reference/metrics.md": metrics,
}
"""What is made, and of what."""

if __name__ == "__main__":
    for path, make in FILES.items():
        (ROOT / path).write_text(make())
