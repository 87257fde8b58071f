"""How the operator logs: JSON or text, each line about a job with its name, namespace, uid and generation."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from enum import StrEnum

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from dataloaderjob.api import KIND

OF_KOPF = ("k8s_ref", "k8s_skip", "settings")
"""What kopf hangs on its records; `settings` is an object of its own."""
_ABOUT: ContextVar[Mapping[str, object] | None] = ContextVar("about", default=None)


class Format(StrEnum):
    JSON = "json"
    TEXT = "text"


@contextlib.contextmanager
def about(namespace: str, job: str) -> Iterator[None]:
    """Whatever is logged inside is about this job."""
    token = _ABOUT.set({"job": job, "namespace": namespace})
    try:
        yield
    finally:
        _ABOUT.reset(token)


def more(**fields: object) -> None:
    """What else is known of it, until the end of `about`."""
    _ABOUT.set({**(_ABOUT.get() or {}), **fields})


def configure(kind: Format) -> None:
    """All loggers of the process, kopf's too, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(kind))
    handler.addFilter(mark)
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.captureWarnings(True)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # else a line for each event of a watch


def formatter(kind: Format) -> logging.Formatter:
    if kind is Format.TEXT:
        return _TextFormatter("%(levelname)s %(name)s: %(message)s")
    return JsonFormatter(
        "%(levelname)s %(name)s %(message)s", rename_fields={"levelname": "level", "name": "logger"},
        timestamp="time", reserved_attrs=[*RESERVED_ATTRS, *OF_KOPF],
    )  # fmt: skip


class _TextFormatter(logging.Formatter):
    """With the job in brackets."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's own name
        job = getattr(record, "job", None)
        text = super().formatMessage(record)
        return text if job is None else f"{text} [{getattr(record, 'namespace', '')}/{job}]"


def mark(record: logging.LogRecord) -> bool:
    """Puts the job that a record is about into it."""
    fields: dict[str, object] = dict(_ABOUT.get() or {})
    ref = getattr(record, "k8s_ref", None)
    if isinstance(ref, Mapping):
        if ref.get("kind") == KIND:
            fields |= {"job": ref.get("name"), "namespace": ref.get("namespace"), "uid": ref.get("uid")}
        else:
            fields["object"] = f"{ref.get('kind')} {ref.get('namespace')}/{ref.get('name')}"
    for name, value in fields.items():
        if not hasattr(record, name):
            setattr(record, name, value)
    return True
