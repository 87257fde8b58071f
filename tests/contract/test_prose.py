"""Rules of CONTRIBUTING.md for text that people read, as far as a test can hold them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from prose import MOST_WORDS, docstrings, findings, in_document, in_python

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "sidecar" / "dataloaderjob", ROOT / "operator" / "dataloaderjob_operator"]
MODULES = [path for package in PACKAGES for path in sorted(package.rglob("*.py")) if path.stat().st_size]
DOCUMENTS = [
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "charts").rglob("NOTES.txt"))
    if path.name != "benchmark-results.md"  # tables of figures, whose texts bench has
]
PREPOSITIONS = {
    *(
        "above",
        "after",
        "against",
        "among",
        "as",
        "at",
        "before",
        "behind",
        "beside",
        "between",
        "beyond",
        "by",
    ),
    *(
        "during",
        "for",
        "from",
        "in",
        "instead",
        "into",
        "like",
        "of",
        "on",
        "onto",
        "over",
        "per",
        "since",
        "than",
    ),
    *("through", "to", "under", "until", "with", "within", "without"),
}
OLD_WORDS = re.compile(
    r"\b(rings?|ringSize|reasks?|roster|ledger|outbox|workshop|tenancy|offspring|worked off|looked at so often)\b",
    re.IGNORECASE,
)
TESTS = [path for folder in ("tests", "e2e", "gpu") for path in sorted((ROOT / folder).rglob("test_*.py"))]
MOST_NAME = 70
"""Characters of a test function's name."""
EXCEPT = {"CHANGELOG.md", "CONTRIBUTING.md"}
"""They name what was renamed, and what not to write."""


def fragments(text: str) -> list[str]:
    found = []
    for docstring in docstrings(ast.parse(text)):
        words = str(docstring.value).split()
        if words and words[0].strip("`,.:;").lower() in PREPOSITIONS:
            found.append(f"line {docstring.lineno}: {' '.join(words[:8])}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_docstring_needs_the_line_above_to_be_a_sentence(path: Path) -> None:
    assert fragments(path.read_text()) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_string_of_the_code_uses_a_replaced_word(path: Path) -> None:
    strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
    assert [text for text in strings if isinstance(text, str) and OLD_WORDS.search(text)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_document_uses_a_replaced_word(path: Path) -> None:
    assert path.name in EXCEPT or OLD_WORDS.findall(path.read_text()) == []


def test_fragment_is_found_after_an_attribute_and_in_a_method() -> None:
    text = 'A = 1\n"""Of a row."""\nclass B:\n    def c(self):\n        """By name."""\n'
    assert fragments(text) == ["line 2: Of a row.", "line 5: By name."]


@pytest.mark.parametrize("path", [*MODULES, *DOCUMENTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_text_for_people_keeps_the_rules_of_contributing(path: Path) -> None:
    assert path.name in EXCEPT or [str(one) for one in findings(path)] == []


BAD = {
    1: '"""Whether it is still in use."""',
    2: '"""The loss is told to the supervisor."""',
    3: '"""A home. What an earlier one sends is as good."""',
    4: '"""The ranks, of which each takes a part."""',
    5: '"""It ends after so many batches."""',
    6: '"""The epoch is gone on with."""',
}


@pytest.mark.parametrize("rule", BAD)
def test_each_rule_finds_its_example_and_accepts_a_plain_sentence(rule: int) -> None:
    assert rule in {one.rule for one in in_python(BAD[rule])}
    assert in_python('"""Returns the lease, which ends with the batch."""') == []


def test_long_sentence_in_a_document_is_found_and_code_is_skipped() -> None:
    sentence = " ".join(["word"] * (MOST_WORDS + 1)) + ".\n"
    assert [one.rule for one in in_document(f"# Title\n\n{sentence}")] == [9]
    assert in_document(f"```\n{sentence}```\n\nShort.\n") == []


def test_no_test_function_has_a_name_longer_than_70_characters() -> None:
    found = {
        f"{path.relative_to(ROOT)}::{node.name}"
        for path in TESTS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_") and len(node.name) > MOST_NAME
    }
    assert found == set()
