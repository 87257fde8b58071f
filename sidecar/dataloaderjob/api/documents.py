"""YAML documents with the line of every field; duplicate and odd keys are problems, not surprises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from dataloaderjob.api.base import Path, spell
from dataloaderjob.api.problems import ManifestError, Problem

MAX_NODES = 100_000
"""Values in a document, aliases counted at each use: a few lines of aliases can say billions."""
MAX_DEPTH = 64
_MERGE = "tag:yaml.org,2002:merge"
_STRING = "tag:yaml.org,2002:str"


class _Loader(yaml.SafeLoader):
    """YAML as Kubernetes reads it: a date is a string."""

    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML's way to say it
        first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document of a file."""

    data: Any
    lines: Mapping[Path, int]
    """Line of every key and list entry, from 1."""
    line: int | None
    """Line on which the document begins."""
    problems: tuple[Problem, ...]
    """Keys that are given twice or are no strings."""


def parse_documents(text: str, source: str) -> list[Document]:
    """All documents that are not empty. Raises ManifestError where the text is not YAML."""
    documents = []
    try:
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"):
                continue
            scan = _Scan(source)
            scan.visit(node, (), 0)
            data = loader.construct_document(node)
            documents.append(
                Document(
                    data=data, lines=scan.lines, line=node.start_mark.line + 1, problems=tuple(scan.problems)
                )
            )
    except ManifestError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise ManifestError(source, [_not_yaml(exc)]) from exc
    return documents


class _Scan:
    """One walk over a document's nodes."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []
        self._visited = 0

    def visit(self, node: yaml.Node, path: Path, depth: int) -> None:
        """Raises ManifestError where the document is too large or contains itself."""
        self._visited += 1
        line = node.start_mark.line + 1
        if self._visited > MAX_NODES or depth > MAX_DEPTH:
            found = f"more than {MAX_NODES} values" if depth <= MAX_DEPTH else f"more than {MAX_DEPTH} levels"
            problem = Problem(path="", found=found, use="fewer aliases (*name), none to itself", line=line)
            raise ManifestError(self.source, [problem])
        self.lines.setdefault(path, line)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, (*path, index), depth + 1)
        elif isinstance(node, yaml.MappingNode):
            self._visit_mapping(node, path, depth)

    def _visit_mapping(self, node: yaml.MappingNode, path: Path, depth: int) -> None:
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == _MERGE:
                self.visit(value, path, depth + 1)
                continue
            name = key.value if isinstance(key, yaml.ScalarNode) else "a key"
            here = (*path, str(name))
            if not isinstance(key, yaml.ScalarNode) or key.tag != _STRING:
                self._refuse(here, f"the key {name}, which is no string", "the key in quotes", line)
            elif name in first:
                self._refuse(here, f"the key a second time (first at line {first[name]})", "it once", line)
            first.setdefault(str(name), line)
            self.lines[here] = line
            self.visit(value, here, depth + 1)

    def _refuse(self, path: Path, found: str, use: str, line: int) -> None:
        self.problems.append(Problem(path=spell(path), found=found, use=use, line=line))


def _not_yaml(exc: Exception) -> Problem:
    mark = getattr(exc, "problem_mark", None)
    what = getattr(exc, "problem", None) or str(exc).split("\n")[0]
    context = getattr(exc, "context", None)
    found = f"text that is not YAML ({f'{context}, ' if context else ''}{what})"
    use = (
        "spaces, not tabs" if "'\\t'" in what else "valid YAML: look at indentation, quotes and colons there"
    )
    return Problem(path="", found=found, use=use, line=mark.line + 1 if mark else None)
