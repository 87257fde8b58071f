"""Parsing of DataLoaderJob manifests. Every problem is reported with its line number, and nothing is guessed.

Duplicate YAML keys and keys that are not strings are also problems.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import ValidationError

from dataloaderjob.api.base import ONE_MACHINE, Path, spell
from dataloaderjob.api.job import API_VERSION, KIND, DataLoaderJob
from dataloaderjob.api.problems import (
    ManifestError,
    Problem,
    Shape,
    describe,
    line_of,
    near_misses,
    translate,
    without_unknown,
)

MAX_NODES = 100_000
"""Maximum number of values in a document. An alias counts each time it is used, because a few lines of aliases can
stand for billions of values."""
MAX_DEPTH = 64
_MERGE = "tag:yaml.org,2002:merge"
_STRING = "tag:yaml.org,2002:str"


class Loader(yaml.SafeLoader):
    """A loader that reads YAML as Kubernetes does, with dates as strings."""

    yaml_implicit_resolvers = {  # noqa: RUF012  declared as in PyYAML
        first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


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


def parse_documents(text: str, source: str) -> list[Document]:
    """Returns all non-empty documents. Raises ManifestError if the text is not YAML."""
    documents = []
    try:
        loader = Loader(text)
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
        """Visits a node and everything below it. Raises ManifestError if the document is too large, or if a node
        contains itself."""
        self._visited += 1
        line = node.start_mark.line + 1
        if self._visited > MAX_NODES or depth > MAX_DEPTH:
            found = f"more than {MAX_NODES} values" if depth <= MAX_DEPTH else f"more than {MAX_DEPTH} levels"
            problem = Problem(
                path="", found=found, use="fewer aliases (*name), and none that refers to itself", line=line
            )
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
                self._refuse(here, f"the key {name}, which is not a string", "the key in quotes", line)
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
        "spaces, not tabs"
        if "'\\t'" in what
        else ("valid YAML: check the indentation, quotes and colons there")
    )
    return Problem(path="", found=found, use=use, line=mark.line + 1 if mark else None)


MAX_NBYTES = 1 << 20
"""Maximum size of a manifest. A larger object would not fit into etcd either."""


def load_manifest(path_or_text: str | os.PathLike[str], *, one_machine: bool = False) -> DataLoaderJob:
    """Reads a manifest from a path, or from the string itself if the string contains a line break or `key: value`. With
    `one_machine`, the manifest may lack fields that only a cluster needs, such as an image.

    Raises ManifestError (an InputError) that lists every problem.
    """
    if isinstance(path_or_text, str) and _is_text(path_or_text):
        return parse_manifest(path_or_text, one_machine=one_machine)
    path = FilePath(path_or_text)
    return parse_manifest(_read(path), source=str(path), one_machine=one_machine)


def parse_manifest(
    text: str | bytes, *, source: str = "manifest", one_machine: bool = False
) -> DataLoaderJob:
    """Parses a manifest. Raises ManifestError, whose message begins with `source`."""
    if isinstance(text, bytes):
        text = decode(text, source)
    documents = parse_documents(text, source)
    if not documents:
        raise _whole(source, "an empty file", f"a manifest that begins with apiVersion: {API_VERSION}")
    if len(documents) > 1:
        kinds = ", ".join(f"{_kind(d.data)} at line {d.line}" for d in documents[:5])
        raise _whole(
            source,
            f"{len(documents)} YAML documents ({kinds})",
            f"a file with only the {KIND}, without ---",
            line=documents[1].line,
        )
    return _build(documents[0], source, one_machine=one_machine)


def parse_jobs(text: str, source: str) -> list[DataLoaderJob]:
    """Parses all DataLoaderJobs in a text, and ignores other documents in it. Raises ManifestError."""
    return [
        _build(document, source)
        for document in parse_documents(text, source)
        if isinstance(document.data, Mapping) and document.data.get("kind") == KIND
    ]


def parse_object(data: Mapping[str, Any], *, source: str = "object") -> DataLoaderJob:
    """Builds a DataLoaderJob from plain values, such as those that the API server sends. Raises ManifestError."""
    return _build(Document(data=data, lines={}, line=None, problems=()), source)


def parse_live(
    data: Mapping[str, Any], *, source: str = "object"
) -> tuple[DataLoaderJob, tuple[Problem, ...]]:
    """Builds a DataLoaderJob from an object that an API server has accepted. Also returns problems for fields that seem
    to be misspelled, or that this release does not know.

    The API server has checked the fields, so a field that the models lack comes from a later release's definition. It
    is omitted and reported as a problem. Metadata fields of a later Kubernetes version are omitted silently. Raises
    ManifestError if the models cannot read the rest.
    """
    kept, unknown = without_unknown(Shape(DataLoaderJob), data)
    doubts = [
        Problem(path=spell(path), found="a field from another release", use="the operator from that release")
        for path in unknown
        if path[0] != "metadata"
    ]
    doubts += near_misses(DataLoaderJob, kept, lines={})
    return _build(Document(data=kept, lines={}, line=None, problems=()), source, strict=False), tuple(doubts)


def _build(
    document: Document, source: str, *, strict: bool = True, one_machine: bool = False
) -> DataLoaderJob:
    problems = list(document.problems)
    if not isinstance(document.data, Mapping):
        raise _whole(
            source, describe(document.data), "a mapping with apiVersion, kind, metadata and spec", line=1
        )
    wrong = _wrong_type(document)
    if wrong:
        raise ManifestError(source, problems + wrong)
    if strict:
        problems += near_misses(DataLoaderJob, document.data, lines=document.lines)
    try:
        job = DataLoaderJob.model_validate(
            document.data, by_alias=True, by_name=False, context={ONE_MACHINE: one_machine}
        )
    except ValidationError as exc:
        reported = {problem.path for problem in problems}
        more = translate(exc, DataLoaderJob, lines=document.lines)
        problems += [problem for problem in more if problem.path not in reported]
        raise ManifestError(source, problems) from exc
    if problems:
        raise ManifestError(source, problems)
    return job


def _wrong_type(document: Document) -> list[Problem]:
    """Reports an object of another kind or API version, whose other problems do not matter."""
    return [
        Problem(
            path=key, found=describe(document.data.get(key)), use=right, line=line_of((key,), document.lines)
        )
        for key, right in (("apiVersion", API_VERSION), ("kind", KIND))
        if document.data.get(key) != right
    ]


def _read(path: FilePath) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_NBYTES + 1)
    except FileNotFoundError as exc:
        raise _whole(str(path), "no such file", "the path of a DataLoaderJob manifest") from exc
    except IsADirectoryError as exc:
        raise _whole(str(path), "a folder", "the path of the manifest in it") from exc
    except (OSError, ValueError) as exc:
        raise _whole(str(path), f"a file that cannot be read ({exc})", "a readable manifest") from exc
    if len(content) > MAX_NBYTES:
        raise _whole(str(path), "more than 1 MiB", "a manifest without data or code")
    return content


def decode(content: bytes, source: str) -> str:
    """Decodes a file. Raises ManifestError if it is not UTF-8."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise _whole(source, "UTF-16", "UTF-8: save the file in that encoding")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = content.count(b"\n", 0, exc.start) + 1
        found = f"byte 0x{content[exc.start]:02x}, which is not UTF-8"
        raise _whole(source, found, "UTF-8: save the file in that encoding", line=line) from exc


def _is_text(value: str) -> bool:
    return not value.strip() or "\n" in value or ": " in value or value.lstrip().startswith("{")


def _kind(data: object) -> str:
    kind = data.get("kind") if isinstance(data, Mapping) else None
    return kind if isinstance(kind, str) else "one without a kind"


def _whole(source: str, found: str, use: str, *, line: int | None = None) -> ManifestError:
    return ManifestError(source, [Problem(path="", found=found, use=use, line=line)])
