"""`dataloaderjob inject`: adds the sidecar to the pod templates in a file. The sidecar is then reviewed and committed
with the file, and queues such as Kueue count its resources."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from dataloaderjob import __version__
from dataloaderjob.api import KIND, DataLoaderJob, ManifestError
from dataloaderjob.api.base import Path, spell
from dataloaderjob.api.documents import BOM, Document, FilePart, parsed, value_at, within
from dataloaderjob.api.injection import LABEL, inject, injection
from dataloaderjob.api.load import decode, parse_job
from dataloaderjob.api.plain import Object
from dataloaderjob.api.pod_templates import FoundTemplate, pod_templates
from dataloaderjob.api.yaml_edits import CannotEdit, edited, same
from dataloaderjob.core.errors import InputError
from dataloaderjob.local.outputs import write_output

STDIN = "-"
SIDECAR_IMAGE = f"ghcr.io/dataloaderjob/sidecar:{__version__}"
"""The default image of the Helm chart."""
HINTS: Mapping[tuple[str, str], str] = {
    ("trainer.kubeflow.org", "TrainJob"): "its pods come from a runtime: inject the runtime",
    **{
        ("argoproj.io", kind): f"its templates are not pod templates: add the label {LABEL} to their metadata.labels"
        for kind in ("Workflow", "WorkflowTemplate", "ClusterWorkflowTemplate", "CronWorkflow")
    },
}  # fmt: skip
"""Kinds whose pod templates cannot be injected, by API group and name, each with the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of the command."""

    source: str
    """The file with pod templates; "-" for standard input."""
    manifest: str | None = None
    """The file with the DataLoaderJob; None if it is in the same file."""
    job: str | None = None
    """Name of the job for pod templates that do not have the label. If None, only templates that have the label are
    injected."""
    sidecar_image: str = SIDECAR_IMAGE
    """Sidecar image for manifests that name none."""
    pull_secrets: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """The result of an injection: the text with all sidecars, and a summary of the changes."""

    text: str
    changed: bool
    count: int
    """Number of pod templates that now have the sidecar."""
    notices: Sequence[str]


@dataclass(slots=True)
class _Work:
    """The state of the injection into one file."""

    request: Request
    jobs: Sequence[DataLoaderJob]
    notices: list[str]
    count: int = 0

    def document(self, document: Document) -> Any:
        """Returns the document with all sidecars."""
        if isinstance(document.data, list) and document.data:
            self.notices.append(
                f"line {document.line}: a list of objects is left unchanged: make it the items of an object with "
                "apiVersion: v1 and kind: List"
            )
        data = _unshared(document.data)
        found = pod_templates(data)
        for path, kind in found.unknown:
            self._unknown(value_at(data, path), f"line {_line(document, path)}: {kind}")
        self._misplaced(data, found.templates, document)
        for template in found.templates:
            if (name := self._job_of(template, document)) is not None:
                if document.problems:
                    raise ManifestError(self.request.source, list(document.problems))
                made = self._injected(data, template, name, document)
                data = _with_part(data, template.path, made)
                self.count += 1
        return data

    def _job_of(self, template: FoundTemplate, document: Document) -> str | None:
        labels = _labels(template.template)
        if LABEL not in labels:
            return None if template.helps else self.request.job
        if not isinstance(name := labels[LABEL], str) or not name:
            line = _line(document, (*template.path, "metadata", "labels", LABEL))
            found = "an empty text" if name == "" else json.dumps(name, default=str)
            raise InputError(
                f"{self.request.source}: line {line}: the label {LABEL} is {found}, not the name of a job: write the "
                "name, in quotes if it looks like a number or a boolean"
            )
        return name

    def _injected(self, data: Any, template: FoundTemplate, name: str, document: Document) -> dict[str, Any]:
        try:
            job = self._job(name, _namespace(data, template.path))
            pod = dict(template.template)
            metadata = pod.get("metadata") or {}
            if (
                LABEL not in _labels(pod)
                and isinstance(metadata, dict)
                and isinstance(metadata.get("labels") or {}, dict)
            ):
                pod["metadata"] = {**metadata, "labels": {**(metadata.get("labels") or {}), LABEL: name}}
            wanted = injection(job, image=self.request.sidecar_image, pull_secrets=self.request.pull_secrets)
            return inject(pod, wanted)
        except ValueError as exc:
            where = spell(template.path) or "the pod"
            raise InputError(
                f"{self.request.source}: line {_line(document, template.path)}, {where}: {exc}"
            ) from exc

    def _job(self, name: str, namespace: str | None) -> DataLoaderJob:
        named = [job for job in self.jobs if job.name == name]
        fitting = [job for job in named if namespace is None or job.metadata.namespace in (None, namespace)]
        fitting = [job for job in fitting if namespace and job.metadata.namespace == namespace] or fitting
        source = self.request.manifest or self.request.source
        if len(fitting) > 1:
            where = ", ".join(str(job.metadata.namespace) for job in fitting)
            raise InputError(
                f"{source} has {len(fitting)} DataLoaderJobs {name} for these pods (namespaces: {where}): give the "
                "pods the namespace of one of them, or remove the others"
            )
        if fitting:
            return fitting[0]
        if named:
            raise InputError(
                f"the pods are in namespace {namespace}, but DataLoaderJob {name} is in "
                f"{named[0].metadata.namespace}: a job serves only pods in its own namespace"
            )
        others = ", ".join(job.name for job in self.jobs)
        raise InputError(
            f"the job is {name}, but {source} has {f'only {others}' if others else f'no {KIND}'}: give the "
            "job's manifest with -j"
        )

    def _unknown(self, thing: Any, where: str) -> None:
        if not isinstance(thing, Mapping):
            return
        group = str(thing.get("apiVersion")).rpartition("/")[0]
        if not group or thing.get("kind") in (KIND, "CustomResourceDefinition"):
            return  # an object without pods, such as a Service
        if any(LABEL in _labels(part) for value in thing.values() for part in _parts(value)):
            self.notices.append(
                f"{where} is left unchanged: the cluster injects its pods when it creates them"
            )
        elif hint := HINTS.get((group, str(thing.get("kind")))):
            self.notices.append(f"{where} is left unchanged: {hint}")
        elif thing.get("kind") not in (KIND, "ConfigMap", "CustomResourceDefinition") and _runs_containers(
            thing
        ):
            self.notices.append(
                f"{where} is left unchanged, because the place of its pod templates is unknown. Add the label "
                f"{LABEL} to its pods, so that the cluster injects them"
            )

    def _misplaced(self, data: Any, templates: Sequence[FoundTemplate], document: Document) -> None:
        """Adds a notice if an object has the label but its pods do not."""
        with_own = [template for template in templates if template.path]
        if with_own and LABEL in _labels(data) and not any(LABEL in _labels(t.template) for t in with_own):
            self.notices.append(
                f"line {_line(document, ())}: the label {LABEL} is on the {data.get('kind')}, not on its pods: move it "
                f"to {spell(with_own[0].path)}.metadata.labels"
            )


def injected_text(text: str, request: Request, jobs: Sequence[DataLoaderJob] = ()) -> Injected:
    """Injects the sidecar into the pod templates in a text. `jobs`: the jobs in the request's manifest file. If the
    request names no manifest file, the jobs in the text are used.

    Raises InputError if a template cannot be injected, or if the text has no template to inject.
    """
    found = parsed(text, request.source)
    documents = [document for _, some in found for document in some]
    known = [*jobs, *(_jobs(documents, request.source) if request.manifest is None else ())]
    work = _Work(request, known, [])
    made, end, changed = "", 0, False
    for part, some in found:
        wanted = [work.document(document) for document in some]
        new = part.text
        if not same(wanted, [document.data for document in some]):
            new, changed = _edited(text, part, some, wanted, request.source), True
        made, end = made + text[end : part.start] + new, part.start + len(part.text)
    if not work.count:
        missing = (
            f"no pod template has the label {LABEL}: add it with the job's name as its value, or name the "
            "job with --job"
        )
        raise InputError("\n".join(f"{request.source}: {line}" for line in (*work.notices, missing)))
    return Injected(text=made + text[end:], changed=changed, count=work.count, notices=work.notices)


def jobs_in(text: str, source: str) -> list[DataLoaderJob]:
    """Returns all DataLoaderJobs in a text, including those in a List. Raises ManifestError."""
    return _jobs([document for _, some in parsed(text, source) for document in some], source)


def _jobs(documents: Sequence[Document], source: str) -> list[DataLoaderJob]:
    found = []
    for document in documents:
        for path, _ in pod_templates(document.data).unknown:
            part = within(document, path)
            if isinstance(part.data, Mapping) and part.data.get("kind") == KIND:
                found.append(parse_job(part, source))
    return found


def _edited(text: str, part: FilePart, documents: Sequence[Document], wanted: list[Any], source: str) -> str:
    try:
        return edited(part, documents, wanted)
    except CannotEdit as exc:
        line = text.count("\n", 0, part.start) + exc.line + 1
        raise InputError(f"{source}: line {line}: {exc.why}") from exc


def run(request: Request, output: str | None, *, in_place: bool) -> None:
    """Reads a file, injects its templates and writes the result. Raises InputError before anything is written."""
    if in_place and (output is not None or request.source == STDIN):
        raise InputError("--in-place changes the file given with -f: omit -o, and name a file")
    if request.source == request.manifest == STDIN:
        raise InputError("standard input can be only one of the files: name the other one")
    jobs = [] if request.manifest is None else jobs_in(_read(request.manifest), request.manifest)
    found = injected_text(_read(request.source), request, jobs)
    for notice in found.notices:
        sys.stderr.write(f"dataloaderjob: {request.source}: {notice}\n")
    target = request.source if in_place else output
    if target is None or target == STDIN:
        sys.stdout.flush()
        sys.stdout.buffer.write(found.text.encode())  # as in a file, whatever the terminal's encoding
        sys.stdout.buffer.flush()
    elif found.changed or not in_place:
        write_output(target, found.text)


def _read(source: str) -> str:
    """Returns a file's text, with its byte order mark if it has one."""
    try:
        content = sys.stdin.buffer.read() if source == STDIN else FilePath(source).read_bytes()
        return (BOM if content.startswith(BOM.encode()) else "") + decode(content, source)
    except OSError as exc:
        raise InputError(
            f"{source} cannot be read ({exc.strerror}): name a readable YAML or JSON file"
        ) from exc


def _labels(thing: Any) -> Object:
    for name in ("metadata", "labels"):
        thing = thing.get(name) if isinstance(thing, Mapping) else None
    return thing if isinstance(thing, Mapping) else {}


def _namespace(data: Any, path: Path) -> str | None:
    """Returns the namespace of the object that contains the part at `path`; None if the object names none."""
    found = None
    for part in (*path, None):
        metadata = data.get("metadata") if isinstance(data, Mapping) else None
        if isinstance(metadata, Mapping) and metadata.get("namespace"):
            found = str(metadata["namespace"])
        data = None if part is None else data[part]
    return found


def _unshared(value: Any) -> Any:
    """Copies a value. Parts that a YAML alias repeats become separate copies."""
    if isinstance(value, Mapping):
        return {name: _unshared(inner) for name, inner in value.items()}
    return [_unshared(inner) for inner in value] if isinstance(value, list) else value


def _with_part(data: Any, path: Path, value: Any) -> Any:
    """Sets a part of a document, and returns the document. If the path is empty, returns `value`."""
    if not path:
        return value
    value_at(data, path[:-1])[path[-1]] = value
    return data


def _runs_containers(thing: Any) -> bool:
    return any(
        isinstance(part, Mapping)
        and (isinstance(part.get("containers"), list) or isinstance(part.get("image"), str))
        for part in _parts(thing)
    )


def _parts(thing: Any) -> Iterator[Any]:
    yield thing
    inner = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, list) else ()
    for part in inner:
        yield from _parts(part)


def _line(document: Document, path: Path) -> int | None:
    return document.lines.get(path, document.line)
