"""The repository's documents: commands that they show, links that they make."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("make", "dataloaderjob", "python", "torchrun")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)[^)]*\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A command in a document."""

    document: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}: {shlex.join(self.words)}"


def documents() -> list[Path]:
    """All Markdown files that are read here, not those that benchmarks write."""
    found = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("bench/**/*.md"),
    ]
    return sorted(found)


def manifest_of(page: Path, kind: str) -> dict[str, Any]:
    """Returns the only manifest of that kind on a page."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in map(yaml.safe_load, blocks) if block.get("kind") == kind]
    return dict(found)


def commands() -> list[Shown]:
    """Commands in shell blocks and in `backticks` that begin with one of PROGRAMS."""
    return sorted({shown for path in documents() for shown in _of(path)}, key=str)


def links(document: Path) -> list[str]:
    """Targets within the repository."""
    return _LINK.findall(document.read_text())


def _of(path: Path) -> Iterator[Shown]:
    text = path.read_text()
    for language, body in _FENCE.findall(text):
        if language == "sh":
            for line in body.splitlines():
                yield from _parse(path, line)
    for span in _SPAN.findall(_FENCE.sub("", text)):
        yield from _parse(path, span)


def _parse(path: Path, line: str) -> Iterator[Shown]:
    for part in re.split(r"&&|>|;", line)[:1]:
        words = shlex.split(part, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if len(words) > 1 and words[0] in PROGRAMS:
            yield Shown(document=path, words=tuple(words))
