"""The rules of CONTRIBUTING.md for English, as patterns, and what they find in Python files and documents."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOST_WORDS = 25
"""In a sentence of a document."""
OPENINGS = re.compile(r"(What|Whether|How|Where|Who|Those|So)\b")
"""Rule 1: no docstring begins with one of these."""
RULES: dict[int, tuple[re.Pattern[str], str]] = {
    2: (
        re.compile(r"\b(told(?! apart)|says so|tells? of|ha(?:s|ve) the words)\b", re.IGNORECASE),
        "use the precise verb: reported, rejected, warned, logged, quoted",
    ),
    3: (
        re.compile(r"(?:^|(?<=[.!] )|(?<=\n))What\b(?![^.!]*\?)"),
        "put the subject first",
    ),
    4: (re.compile(r"\b(of which|of whom|by which|by whom|that of)\b", re.IGNORECASE), "split the sentence"),
    5: (re.compile(r"\b(so many|as many|so long)\b", re.IGNORECASE), "name the quantity"),
    6: (
        re.compile(
            r"\b(?:go(?:es|ne|ing)? on with|anew|com(?:es?|ing) to nothing|came to nothing"
            r"|(?<!what )(?:is|are) there\b(?! (?:an?|any|no|more|room)\b)(?![^.!]*\?))",
            re.IGNORECASE,
        ),
        "say resume, rebuild, exist, yield nothing",
    ),
}


class Finding(NamedTuple):
    line: int
    rule: int
    text: str

    def __str__(self) -> str:
        advice = RULES[self.rule][1] if self.rule in RULES else ADVICE[self.rule]
        return f"line {self.line}: rule {self.rule}, {advice}: {self.text}"


ADVICE = {
    1: "open with what the thing is or does, not with What, Whether, How, Where, Who, Those, So",
    9: f"at most {MOST_WORDS} words in a sentence",
}


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Of modules, classes and functions, and those below a name."""
    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(ast.Constant(str())):
                    yield statement.value


def in_python(text: str) -> list[Finding]:
    """Findings in docstrings, and in other strings of four words and more: messages, help, descriptions."""
    tree = ast.parse(text)
    documented = list(docstrings(tree))
    found = [
        Finding(one.lineno, 1, _start(str(one.value))) for one in documented if OPENINGS.match(str(one.value))
    ]
    known = {id(one) for one in documented}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(str(text)) if id(node) in known or len(text.split()) > 3:
                found += _matches(text, node.lineno)
    return sorted(found)


def in_document(text: str) -> list[Finding]:
    """Findings in a document of Markdown, code left out; sentences that are too long, those of tables left out."""
    prose = re.sub(r"^```.*?^```|<!--.*?-->|^#.*?$", _blank, text, flags=re.DOTALL | re.MULTILINE)
    found = _matches(re.sub(r"`[^`\n]*`", "`x`", prose), 1)
    for paragraph in re.finditer(r"(?:^(?!\s*$)[^|\n].*\n?)+", prose, re.MULTILINE):
        line = prose.count("\n", 0, paragraph.start()) + 1
        for sentence in sentences(paragraph.group()):
            if len(sentence.split()) > MOST_WORDS:
                found.append(Finding(line, 9, _start(sentence)))
    return sorted(found)


def sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph or a list, whose items end one, too."""
    items = re.split(r"\n\s*(?:[-*]|\d+\.)\s+", "\n" + paragraph)
    flat = [re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`x`", " ".join(item.split()))) for item in items]
    return [sentence for item in flat for sentence in re.split(r"(?<=[.!?])\s+", item) if sentence]


def findings(path: Path) -> list[Finding]:
    text = path.read_text()
    return in_python(text) if path.suffix == ".py" else in_document(text)


def _matches(text: str, line: int) -> list[Finding]:
    return [
        Finding(line + text.count("\n", 0, one.start()), rule, _start(text[max(0, one.start() - 20) :]))
        for rule, (pattern, _) in RULES.items()
        for one in pattern.finditer(text)
    ]


def _start(text: str) -> str:
    return " ".join(text.split())[:100]


def _blank(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")
