"""Parsing of DataLoaderJob manifests. Every problem is reported with its line number, and nothing is guessed.

Duplicate YAML keys and keys that are not strings are also problems.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from dataloaderjob.api.base import ONE_MACHINE, spell
from dataloaderjob.api.documents import Document, parse_documents
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


def parse_job(document: Document, source: str) -> DataLoaderJob:
    """Builds the DataLoaderJob that a document describes. Raises ManifestError."""
    return _build(document, source)


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
