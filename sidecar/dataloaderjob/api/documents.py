"""Reading of YAML and JSON files as documents, with the line number of every value. Pure."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import yaml

from dataloaderjob.api.base import Path, spell
from dataloaderjob.api.problems import ManifestError, Problem

MAX_ALIASED = 100_000
"""Maximum number of values in a document that aliases repeat. An alias counts each time it is used, because a few lines
of aliases can stand for billions of values."""
MAX_DEPTH = 64
BOM = "\ufeff"
MERGE = "tag:yaml.org,2002:merge"
_STRING = "tag:yaml.org,2002:str"
_NOT_RESOLVED = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")


class Loader(yaml.SafeLoader):
    """A loader that reads YAML as Kubernetes does, with dates and a lone `=` as strings. An alias becomes a node of its
    own, which has the alias's position and the values of its anchor."""

    yaml_implicit_resolvers = {  # noqa: RUF012  declared as in PyYAML
        first: [(tag, regexp) for tag, regexp in resolvers if tag not in _NOT_RESOLVED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if not self.check_event(yaml.AliasEvent):
            return super().compose_node(parent, index)
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        found: Any = copy.copy(super().compose_node(parent, index))
        found.start_mark, found.end_mark, found.is_alias = event.start_mark, event.end_mark, True
        return cast("yaml.Node", found)


def is_alias(node: yaml.Node) -> bool:
    return getattr(node, "is_alias", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document of a file."""

    data: Any
    lines: Mapping[Path, int]
    """Line number of every key and list entry, starting at 1."""
    line: int | None
    """Line on which the document begins."""
    problems: tuple[Problem, ...]
    """Keys that occur twice or are not strings."""
    node: yaml.Node | None = None
    """The parsed text; None if the document does not come from a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A part of a file that is edited by itself: a JSON value, or the whole file if it is YAML."""

    start: int
    """Offset of the part in the file."""
    text: str
    is_json: bool


_FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Checker(_FastLoader):  # type: ignore[misc]
    """A loader with the values of `Loader`, by libyaml if PyYAML was built with it. It is another parser, and ten times
    as fast."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def values(part: FilePart) -> list[Any]:
    """Returns the values of all non-empty documents. Raises yaml.YAMLError, and ValueError for JSON or for a value such
    as a number that is too long."""
    if part.is_json:
        return [json.loads(part.text)]
    text = readable(part)
    try:
        found = list(yaml.load_all(text, Checker))
    except yaml.YAMLError:  # libyaml refuses an escape such as "\ud83d"
        found = list(yaml.load_all(text, Loader))
    return [value for value in found if value is not None]


def parts(text: str) -> list[FilePart]:
    """Splits a file into its parts, without a byte order mark. A JSON file may contain several values one after
    another, as kubectl accepts."""
    first = 1 if text.startswith(BOM) else 0
    found, position = [], first
    decoder = json.JSONDecoder()
    if text[first:].lstrip().startswith(("{", "[")):
        while rest := text[position:].lstrip():
            start = len(text) - len(rest)
            try:
                _, position = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                break
            found.append(FilePart(start=start, text=text[start:position], is_json=True))
        else:
            return found
    return [FilePart(start=first, text=text[first:], is_json=False)]


def readable(part: FilePart) -> str:
    """Returns a text of the same length that PyYAML can read. Kubernetes accepts tabs between the words of a line, and
    in JSON anywhere. It also accepts all characters in JSON strings."""
    if part.is_json:
        return _UNREADABLE.sub(" ", part.text)
    return part.text if _reads(part.text) else _TABS.sub(lambda tabs: " " * len(tabs.group()), part.text)


_UNREADABLE = re.compile("[\t\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_TABS = re.compile(r"(?<=[^\s])[ \t]*\t[ \t]*")
"""Tabs after the first word of a line. PyYAML refuses those outside of strings."""


def _reads(text: str) -> bool:
    """Checks whether PyYAML accepts the tabs of a text."""
    if "\t" not in text:
        return True
    try:
        for _ in yaml.scan(text, Loader):
            pass
    except yaml.YAMLError as exc:
        return "'\\t'" not in str(getattr(exc, "problem", ""))
    return True


def parse_documents(text: str, source: str, first_line: int = 1) -> list[Document]:
    """Returns all non-empty documents. `first_line` is the text's first line in the file.

    Raises ManifestError if the text is not YAML.
    """
    documents = []
    try:
        loader = Loader(text)
        while loader.check_node():
            node = loader.get_node()
            if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"):
                continue
            scan = _Scan(source, first_line)
            scan.visit(node, ())
            # To construct a mapping with merges changes its node.
            data = loader.construct_document(copy.deepcopy(node) if scan.has_merges else node)
            documents.append(
                Document(
                    data=data,
                    lines=scan.lines,
                    line=node.start_mark.line + first_line,
                    problems=tuple(scan.problems),
                    node=node,
                )
            )
    except ManifestError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise ManifestError(source, [_not_yaml(exc, first_line, text)]) from exc
    return documents


class _Scan:
    """One walk over a document's nodes."""

    def __init__(self, source: str, first_line: int) -> None:
        self.source = source
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []
        self.has_merges = False
        self._first_line = first_line
        self._aliased = 0

    def visit(self, node: yaml.Node, path: Path, depth: int = 0, *, aliased: bool = False) -> None:
        """Visits a node and everything below it. Raises ManifestError if the document is too deep, or if aliases make
        it too large."""
        line = node.start_mark.line + self._first_line
        aliased = aliased or is_alias(node)
        self._aliased += aliased
        if depth > MAX_DEPTH or self._aliased > MAX_ALIASED:
            levels = f"more than {MAX_DEPTH} levels"
            found = levels if depth > MAX_DEPTH else f"more than {MAX_ALIASED} values that aliases repeat"
            use = "fewer aliases (*name), and none that refers to itself" if aliased else "fewer levels"
            raise ManifestError(self.source, [Problem(path="", found=found, use=use, line=line)])
        self.lines.setdefault(path, line)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, (*path, index), depth + 1, aliased=aliased)
        elif isinstance(node, yaml.MappingNode):
            self._visit_mapping(node, path, depth, aliased=aliased)

    def _visit_mapping(self, node: yaml.MappingNode, path: Path, depth: int, *, aliased: bool) -> None:
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + self._first_line
            if key.tag == MERGE:
                self.has_merges = True
                self.visit(value, path, depth + 1, aliased=aliased)
                continue
            name = key.value if isinstance(key, yaml.ScalarNode) else "a key"
            here = (*path, str(name))
            if not isinstance(key, yaml.ScalarNode) or key.tag != _STRING:
                self._refuse(here, f"the key {name}, which is not a string", "the key in quotes", line)
            elif name in first:
                self._refuse(here, f"the key a second time (first at line {first[name]})", "it once", line)
            first.setdefault(str(name), line)
            self.lines[here] = line
            self.visit(value, here, depth + 1, aliased=aliased)

    def _refuse(self, path: Path, found: str, use: str, line: int) -> None:
        self.problems.append(Problem(path=spell(path), found=found, use=use, line=line))


def _not_yaml(exc: Exception, first_line: int, text: str) -> Problem:
    mark = getattr(exc, "problem_mark", None)
    what = getattr(exc, "problem", None) or str(exc).split("\n")[0]
    context = getattr(exc, "context", None)
    found = f"text that is not YAML ({f'{context}, ' if context else ''}{what})"
    if "{{" in text:
        use = "the output of helm template: this file has placeholders in braces"
    elif "'\\t'" in what:
        use = "spaces, not tabs"
    else:
        use = "valid YAML: check the indentation, quotes and colons there"
    return Problem(path="", found=found, use=use, line=mark.line + first_line if mark else None)


def parsed(text: str, source: str) -> list[tuple[FilePart, list[Document]]]:
    """Returns the parts of a file and their documents. Raises ManifestError."""
    found = []
    for part in parts(text):
        documents = parse_documents(readable(part), source, text.count("\n", 0, part.start) + 1)
        if part.is_json:  # YAML reads 1e1 as a string, and a pair of surrogates as two characters
            documents = [replace(document, data=json.loads(part.text)) for document in documents]
        found.append((part, documents))
    return found


def value_at(data: Any, path: Path) -> Any:
    for step in path:
        data = data[step]
    return data


def within(document: Document, path: Path) -> Document:
    """Returns a part of a document as a document."""
    if not path:
        return document
    data = value_at(document.data, path)
    lines = {place[len(path) :]: line for place, line in document.lines.items() if place[: len(path)] == path}
    own = tuple(problem for problem in document.problems if problem.path.startswith(spell(path)))
    return Document(data=data, lines=lines, line=lines.get((), document.line), problems=own)
