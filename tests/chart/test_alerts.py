"""Alerts and the dashboard ask for metrics that there are; each alert and condition has its place in the runbook."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from chart import CHART, render
from dataloaderjob.api.status import ConditionType, Phase

ROOT = CHART.parents[1]
RUNBOOK = (ROOT / "docs/kubernetes/runbook.md").read_text()
ON = ("--set", "prometheusRule.enabled=true,dashboard.enabled=true")
RULE, DASHBOARD = ("PrometheusRule", "r-operator"), ("ConfigMap", "r-operator-dashboard")
TARGET = {"namespace"}
"""Labels that a scrape adds."""
NAME = re.compile(r"dataloaderjob_(?:operator|sidecar)_\w+")


@functools.cache
def documented() -> dict[str, set[str]]:
    """The labels of each metric in the reference."""
    text = (ROOT / "docs/reference/metrics.md").read_text()
    found: dict[str, set[str]] = {}
    for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*)\|", text, re.MULTILINE):
        known = {label.strip() for label in labels.split(",")} - {""}
        if kind == "histogram":
            found |= {f"{name}_bucket": known | {"le"}, f"{name}_sum": known, f"{name}_count": known}
        else:
            found[name] = known
    assert len(found) > 30
    return found


@functools.cache
def alerts() -> tuple[dict[str, Any], ...]:
    groups = render(*ON)[RULE]["spec"]["groups"]
    return tuple(rule for group in groups for rule in group["rules"])


@functools.cache
def dashboard() -> dict[str, Any]:
    return dict(json.loads(render(*ON)[DASHBOARD]["data"]["dataloaderjob.json"]))


def queries() -> Iterator[tuple[str, str]]:
    """By the title of what asks."""
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def unknown(query: str) -> list[str]:
    """Metrics, and labels of metrics, that nothing serves."""
    named = NAME.findall(re.sub(r"dataloaderjob_(namespace|name)\b", "", query))
    wrong = [name for name in named if name not in documented()]
    labels: set[str] = set()
    for inner in re.findall(r"\{([^}]*)\}", query):
        labels |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inner))
    for inner in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", query):
        labels |= {label.strip() for label in inner.split(",")}
    has = set.union(TARGET, *(documented().get(name, set()) for name in named))
    return wrong + sorted(labels - has) + ([] if named else ["no metric at all"])


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


HEADINGS = re.findall(r"^### (.+)$", RUNBOOK, re.MULTILINE)


@pytest.mark.parametrize(("title", "query"), list(queries()))
def test_every_metric_and_label_in_a_query_is_served(title: str, query: str) -> None:
    assert unknown(query) == []
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")


def test_unknown_metric_or_label_is_detected() -> None:
    assert unknown("rate(dataloaderjob_sidecar_asks_total[5m])") == ["dataloaderjob_sidecar_asks_total"]
    assert unknown("sum by (job) (dataloaderjob_sidecar_feeders)") == ["job"]
    assert unknown('dataloaderjob_operator_jobs{stage="a"}') == ["stage"]
    assert unknown("histogram_quantile(0.9, dataloaderjob_operator_queue_latency_seconds)") != []


def test_phases_named_in_queries_exist() -> None:
    named = {
        word
        for _, query in queries()
        for text in re.findall(r'phase=~?"([^"]*)"', query)
        for word in text.split("|")
    }
    assert named
    assert named <= {phase.value for phase in Phase}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alert_has_duration_severity_summary_and_runbook_section(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+[mh]", rule["for"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert len(rule["annotations"]["summary"]) > 20
    page, _, section = rule["annotations"]["runbook_url"].partition("#")
    assert page.endswith("/docs/kubernetes/runbook.md")
    assert section in {anchor(heading) for heading in HEADINGS}


def test_table_of_conditions_has_them_all_in_their_order() -> None:
    page = (ROOT / "docs/kubernetes/troubleshooting.md").read_text()
    table = page.partition("### Conditions")[2].partition("### ")[0]
    assert re.findall(r"^\| \[`(\w+)`\]", table, re.MULTILINE) == [str(kind) for kind in ConditionType]


def test_runbook_has_exactly_one_section_per_alert_and_condition() -> None:
    wanted = [rule["alert"] for rule in alerts()] + [f"Condition {kind.value}" for kind in ConditionType]
    assert sorted(HEADINGS) == sorted(wanted)


def test_dashboard_has_grafanas_label_and_takes_other_labels() -> None:
    assert render(*ON)[DASHBOARD]["metadata"]["labels"]["grafana_dashboard"] == "1"
    other = render(*ON, "--set", "dashboard.labels.team=a,dashboard.annotations.grafana_folder=Training")
    metadata = other[DASHBOARD]["metadata"]
    assert (metadata["labels"]["team"], metadata["annotations"]) == ("a", {"grafana_folder": "Training"})


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (place["x"] + dx, place["y"] + dy)
        for place in (panel["gridPos"] for panel in panels)
        for dx in range(place["w"])
        for dy in range(place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) == 23


def test_alerts_and_dashboard_are_off_by_default() -> None:
    found = render()
    assert RULE not in found
    assert DASHBOARD not in found


def test_runbook_url_and_labels_come_from_the_values() -> None:
    values = "prometheusRule.labels.release=prom,prometheusRule.runbook=https://wiki/x"
    rule = render(*ON, "--set", values)[RULE]
    assert rule["metadata"]["labels"]["release"] == "prom"
    first = rule["spec"]["groups"][0]["rules"][0]
    assert first["annotations"]["runbook_url"] == f"https://wiki/x#{first['alert'].lower()}"
