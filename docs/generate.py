"""`python docs/generate.py` makes docs/exceptions.md and the tables of docs/metrics.md from the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import dataloaderjob
from dataloaderjob.sidecar import metrics as sidecar
from dataloaderjob_operator.monitoring import ErrorKind, Metrics

METRICS = Path(__file__).parent / "metrics.md"
EXCEPTIONS = Path(__file__).parent / "exceptions.md"
EXCEPTIONS_HEAD = """# Exceptions

<!-- Made by `python docs/generate.py`. Change the classes, not this file. -->

All are names of the package, as in `except dataloaderjob.FeederLost`. An exception that your own code raises in a
feeder reaches the training loop as what it is, with the feeder's traceback, as with torch's DataLoader. A message says
what was needed, what was found and what to do.

| exception | is a | meaning |
|---|---|---|
"""
HEAD = "| metric | type | labels | what |\n|---|---|---|---|\n"


def of_operator() -> str:
    """What the operator serves once each labelled metric has a value."""
    made = Metrics()
    made.describe(version="1", kopf="2", phases=dict)
    made.received("Pod")
    made.reconcile_errors.labels(ErrorKind.BUG.value).inc()
    made.api_writes.labels("Pod", "apply").inc()
    return made.text().decode()


def of_sidecar() -> str:
    none = sidecar.ReceiverMetrics("0", dict.fromkeys(sidecar.KEYS, 0))
    return sidecar.prometheus([none], "team/mnist/uid")


def table(text: str) -> str:
    """One row for each metric in Prometheus' text format."""
    rows = []
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        rows.append(f"| `{name}` | {family.type} | {', '.join(sorted(labels))} | {family.documentation} |\n")
    return HEAD + "".join(rows)


def metrics(text: str) -> str:
    """`text` with its two tables made anew."""
    tables = iter((table(of_operator()), table(of_sidecar())))
    return re.sub(r"\| metric \|.*\n(?:\|.*\n)+", lambda _: next(tables), text)


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


if __name__ == "__main__":
    METRICS.write_text(metrics(METRICS.read_text()))
    EXCEPTIONS.write_text(exceptions())
