"""The page of what an operator has to stand names tests that exist."""

from __future__ import annotations

import re

import pytest
from documents import ROOT

NAMED = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / "docs/internals/operator-checks.md").read_text())


def test_the_page_names_tests():
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_test_that_is_named_exists(file, name):
    assert f"\ndef {name}(" in (ROOT / file).read_text()
