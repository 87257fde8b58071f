"""The version stands in `dataloaderjob.__version__`; what cannot read it there says the same."""

from __future__ import annotations

import re

import yaml
from documents import ROOT

import dataloaderjob


def test_the_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((ROOT / "charts/dataloaderjob/Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {dataloaderjob.__version__}


def test_every_image_that_is_named_has_the_version_of_the_package():
    files = (
        "README.md",
        "docs/kubernetes/images-and-data.md",
        "charts/dataloaderjob/Chart.yaml",
        "examples/fashion-mnist/Dockerfile",
    )
    found = {
        tag
        for name in files
        for tag in re.findall(
            r"dataloaderjob/(?:operator|sidecar|feeder):([\w.]+)", (ROOT / name).read_text()
        )
    }
    assert found == {dataloaderjob.__version__}


def test_the_changelog_has_a_section_for_the_version():
    assert f"## {dataloaderjob.__version__}" in (ROOT / "CHANGELOG.md").read_text()
