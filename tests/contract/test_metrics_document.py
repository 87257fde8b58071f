"""Metrics have the names that Prometheus users expect, and docs/reference/metrics.md explains kinds of errors."""

from __future__ import annotations

import generate
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dataloaderjob_operator.monitoring import ErrorKind

SERVED = [
    pytest.param(family, prefix, id=family.name)
    for text, prefix in (
        (generate.of_operator(), "dataloaderjob_operator_"),
        (generate.of_injector(), "dataloaderjob_injector_"),
        (generate.of_sidecar(), "dataloaderjob_sidecar_"),
    )
    for family in text_string_to_metric_families(text)
]


@pytest.mark.parametrize(("family", "prefix"), SERVED)
def test_a_metric_follows_the_habits_of_prometheus(family, prefix):
    """Base units in the name, a sentence as help, no label that Prometheus sets itself."""
    assert family.name.startswith(prefix)
    assert not family.name.endswith(("_ns", "_ms", "_nbytes", "_kb", "_count"))
    assert family.documentation[0].isupper()
    labels = {label for sample in family.samples for label in sample.labels}
    assert not labels & {"job", "instance"}


def test_each_kind_of_error_is_explained():
    text = generate.METRICS.read_text()
    for kind in ErrorKind:
        assert f"`{kind.value}`" in text
