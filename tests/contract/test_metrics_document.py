"""docs/metrics.md has the figures that are served: no more, no fewer, with their types and labels."""

from __future__ import annotations

import re

import pytest
from documents import ROOT
from prometheus_client.parser import text_string_to_metric_families

from dataloaderjob.sidecar import metrics
from dataloaderjob_operator.metrics import ErrorKind, Metrics

DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| ([a-z, ]*) \| (.+) \|$", re.MULTILINE)
Figures = dict[str, tuple[str, frozenset[str]]]
"""By name: type and labels."""


def operator() -> str:
    """With each labelled figure told once, for one that was never has no labels yet."""
    metrics = Metrics()
    metrics.describe(version="1", kopf="2", phases=dict)
    metrics.told("Pod")
    metrics.reconcile_errors.labels("bug").inc()
    metrics.api_writes.labels("Pod", "apply").inc()
    return metrics.text().decode()


def sidecar() -> str:
    none = dict.fromkeys((*metrics.RECEIVER, *metrics.TRAINER), 0)
    return metrics.prometheus([metrics.RingFigures("0", none)], "team/mnist/u")


def served(text: str) -> Figures:
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, frozenset(labels))
    return found


def documented(prefix: str) -> Figures:
    return {
        name: (kind, frozenset(filter(None, labels.split(", "))))
        for name, kind, labels, _ in ROW.findall(DOCUMENT)
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("process", [operator, sidecar])
def test_the_document_has_what_is_served(process):
    prefix = f"dataloaderjob_{process.__name__}_"
    found = served(process())
    assert all(name.startswith(prefix) for name in found)
    assert documented(prefix) == found


def test_each_kind_of_error_is_explained():
    for kind in ErrorKind:
        assert f"`{kind.value}`" in DOCUMENT
