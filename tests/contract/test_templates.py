"""The forms for issues have what GitHub requires, and ask for what a maintainer needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from documents import ROOT

FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
KINDS = {"textarea", "dropdown", "input", "checkboxes", "markdown"}


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_shows(form: Path):
    found = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(found)
    ids = [field["id"] for field in found["body"]]
    assert len(ids) == len(set(ids))
    for field in found["body"]:
        assert field["type"] in KINDS
        assert field["attributes"]["label"]
        assert field["type"] != "dropdown" or all(isinstance(o, str) for o in field["attributes"]["options"])


def test_a_report_of_a_bug_asks_for_versions_manifest_status_and_output():
    text = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
    for wanted in ("dataloaderjob version", "manifest", "dataloaderjob status", "kubectl get dlj", "Output"):
        assert wanted in text


def test_a_pull_request_is_asked_for_its_reason_and_its_tests():
    text = (ROOT / ".github/pull_request_template.md").read_text()
    for wanted in ("why", "CONTRIBUTING.md", "make check", "make test", "CHANGELOG.md"):
        assert wanted in text
