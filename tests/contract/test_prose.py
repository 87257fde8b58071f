"""Rules of CONTRIBUTING.md for text that people read, as far as a test can hold them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "sidecar" / "dataloaderjob", ROOT / "operator" / "dataloaderjob_operator"]
MODULES = [path for package in PACKAGES for path in sorted(package.rglob("*.py")) if path.stat().st_size]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "charts").rglob("NOTES.txt")]
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
EXCEPT = {"CHANGELOG.md", "CONTRIBUTING.md"}
"""They name what was renamed, and what not to write."""


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Of modules, classes and functions, and those below a name."""
    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(ast.Constant(str())):
                    yield statement.value


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
def test_no_string_of_the_code_has_a_word_that_was_replaced(path: Path) -> None:
    strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
    assert [text for text in strings if isinstance(text, str) and OLD_WORDS.search(text)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_document_has_a_word_that_was_replaced(path: Path) -> None:
    assert path.name in EXCEPT or OLD_WORDS.findall(path.read_text()) == []


def test_a_fragment_is_found_below_a_name_and_in_a_method() -> None:
    text = 'A = 1\n"""Of a row."""\nclass B:\n    def c(self):\n        """By name."""\n'
    assert fragments(text) == ["line 2: Of a row.", "line 5: By name."]
