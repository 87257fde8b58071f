"""The threat model names a test for each promise, and each of them exists."""

from __future__ import annotations

import re

import pytest
from documents import ROOT

PAGE = (ROOT / "docs/reference/threat-model.md").read_text()
PROMISES = PAGE.split("## What each promise rests on")[1].split("## What is not defended")[0]
TESTS = sorted(set(re.findall(r"`((?:tests|e2e)/[\w/]+\.py)::(\w+)`", PAGE)))
ROWS = [
    line.strip("|").split("|")
    for line in PROMISES.splitlines()
    if line.startswith("| ") and not line.startswith(("| promise", "|---"))
]


@pytest.mark.parametrize(("file", "name"), TESTS, ids=lambda part: part)
def test_a_test_behind_a_promise_exists(file: str, name: str):
    assert re.search(rf"^(?:async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), (
        f"{file} has no {name}"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_each_promise_has_a_reason_and_a_test(row: list[str]):
    promise, reason, tests = row
    assert promise.strip()
    assert reason.strip()
    assert re.search(r"`(?:tests|e2e)/[\w/]+\.py::\w+`", tests), "name the test that shows it"


def test_there_are_promises_for_every_boundary():
    assert len(ROWS) >= 20
    assert len(TESTS) >= len(ROWS)


@pytest.mark.parametrize(
    "part", ["Actors", "Assets", "Trust boundaries", "What is code, and what is data", "What is not defended"]
)
def test_the_parts_that_a_reviewer_looks_for_are_there(part: str):
    assert f"\n## {part}\n" in PAGE


def test_security_md_has_the_way_to_report_and_leads_to_the_page():
    text = (ROOT / "SECURITY.md").read_text()
    assert "## Report a vulnerability" in text
    assert "](docs/reference/threat-model.md)" in text
