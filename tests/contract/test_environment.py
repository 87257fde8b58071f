"""One table has all environment variables of ours; docs/reference/environment.md is made of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import generate
import pytest
from documents import ROOT

from dataloaderjob.core import places

VARIABLE = re.compile(r"\bDATALOADERJOB_[A-Z_]*[A-Z]\b")
PACKAGES = (ROOT / "sidecar/dataloaderjob", ROOT / "operator/dataloaderjob_operator")
SOURCES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
TABLE = Path(places.__file__).resolve()
NAMES = [row[0] for row in generate.VARIABLES]


def strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_variable_table_matches_the_code():
    assert {name for path in SOURCES for text in strings(path) for name in VARIABLE.findall(text)} == set(
        NAMES
    )


def test_variables_are_spelt_only_in_the_table():
    assert [
        path for path in SOURCES for text in strings(path) if VARIABLE.fullmatch(text) and path != TABLE
    ] == []


@pytest.mark.parametrize("row", generate.VARIABLES, ids=NAMES)
def test_each_variable_has_a_writer_a_reader_and_a_meaning(row):
    assert len(row) == 5
    assert all(row)
    assert NAMES.count(row[0]) == 1
