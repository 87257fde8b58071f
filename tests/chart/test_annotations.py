"""The chart's annotations for Artifact Hub are complete, and true."""

from __future__ import annotations

import re
from typing import Any

import yaml

from chart import CHART, render
from dataloaderjob.api import parse_object

CHART_YAML = yaml.safe_load((CHART / "Chart.yaml").read_text())
PREFIX = "artifacthub.io/"
CATEGORIES = {
    "ai-machine-learning", "database", "integration-delivery", "monitoring-logging", "networking", "security",
    "storage", "streaming-messaging",
}  # fmt: skip
CAPABILITIES = ["Basic Install", "Seamless Upgrades", "Full Lifecycle", "Deep Insights", "Auto Pilot"]
KINDS = {"added", "changed", "deprecated", "removed", "fixed", "security"}
URL = re.compile(r"https://\S+")


def annotation(name: str) -> Any:
    return yaml.safe_load(CHART_YAML["annotations"][PREFIX + name])


def test_all_annotations_are_present() -> None:
    assert set(CHART_YAML["annotations"]) == {
        PREFIX + name
        for name in (
            "category", "changes", "crds", "crdsExamples", "images", "license", "links", "operator",
            "operatorCapabilities", "recommendations",
        )
    }  # fmt: skip


def test_annotations_have_known_values() -> None:
    assert annotation("category") in CATEGORIES
    assert annotation("license") == "Apache-2.0"
    assert CHART_YAML["annotations"][PREFIX + "operator"] == "true", "a string: annotations are"
    assert annotation("operatorCapabilities") in CAPABILITIES
    assert all(change["kind"] in KINDS and change["description"] for change in annotation("changes"))
    assert all(
        URL.fullmatch(entry["url"]) for entry in [*annotation("links"), *annotation("recommendations")]
    )
    assert all(entry["name"] for entry in annotation("links"))


def test_annotated_images_are_the_rendered_ones() -> None:
    text = yaml.safe_dump_all(render().values())
    found = set(re.findall(r"ghcr\.io/[a-z/]+:[\w.]+", text))
    assert {entry["image"] for entry in annotation("images")} == found
    assert all(entry["platforms"] == ["linux/amd64", "linux/arm64"] for entry in annotation("images"))


def test_annotated_crd_and_examples_match_the_chart() -> None:
    crd = render()["CustomResourceDefinition", "dataloaderjobs.dataloading.dev"]
    (only,) = annotation("crds")
    names, versions = crd["spec"]["names"], [version["name"] for version in crd["spec"]["versions"]]
    assert (only["name"], only["kind"]) == (crd["metadata"]["name"], names["kind"])
    assert only["version"] in versions
    for example in annotation("crdsExamples"):
        assert parse_object(example).kind == only["kind"]


def test_chart_and_application_share_one_version() -> None:
    assert CHART_YAML["version"] == CHART_YAML["appVersion"]
