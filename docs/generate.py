"""`python docs/generate.py`: writes the tables of docs/metrics.md from the code. A test compares both."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from dataloaderjob.sidecar import metrics as sidecar
from dataloaderjob_operator.metrics import ErrorKind, Metrics

DOCUMENT = Path(__file__).parent / "metrics.md"
HEAD = "| metric | type | labels | what |\n|---|---|---|---|\n"


def of_operator() -> str:
    """What the operator serves once each labelled metric has a value."""
    made = Metrics()
    made.describe(version="1", kopf="2", phases=dict)
    made.told("Pod")
    made.reconcile_errors.labels(ErrorKind.BUG.value).inc()
    made.api_writes.labels("Pod", "apply").inc()
    return made.text().decode()


def of_sidecar() -> str:
    none = sidecar.RingMetrics("0", dict.fromkeys(sidecar.KEYS, 0))
    return sidecar.prometheus([none], "team/mnist/uid")


def table(text: str) -> str:
    """One row for each metric in Prometheus' text format."""
    rows = []
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        rows.append(f"| `{name}` | {family.type} | {', '.join(sorted(labels))} | {family.documentation} |\n")
    return HEAD + "".join(rows)


def document(text: str) -> str:
    """`text` with its two tables made anew."""
    tables = iter((table(of_operator()), table(of_sidecar())))
    return re.sub(r"\| metric \|.*\n(?:\|.*\n)+", lambda _: next(tables), text)


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
