"""ARCHITECTURE.md and the page on protocols name files that exist, and the table of changes has no row without one."""

from __future__ import annotations

import re

import pytest
from documents import ROOT

BASES = (ROOT, ROOT / "sidecar/dataloaderjob", ROOT / "operator/dataloaderjob_operator")
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PATH = re.compile(r"`([\w.*/-]+(?:\.(?:py|md|toml|yaml|json|tpl)|/)|[\w./-]*Dockerfile[\w.]*)`")
ROWS = re.findall(
    r"^\| (?!change|---)(.*?) \| (.*) \|$", TEXT.split("## Which file for which change")[1], re.MULTILINE
)


PAGES = [TEXT, (ROOT / "docs/internals/protocols.md").read_text()]


@pytest.mark.parametrize("path", sorted({path for page in PAGES for path in PATH.findall(page)}))
def test_a_path_that_is_named_exists(path):
    assert any(list(base.glob(path)) for base in BASES)


@pytest.mark.parametrize(("change", "where"), ROWS, ids=[change for change, _ in ROWS])
def test_each_change_has_a_file_to_open(change, where):
    assert PATH.search(where)
