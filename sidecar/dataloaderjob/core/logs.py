"""Logging in this package's processes: one line for each record, even if the record contains untrusted text."""

from __future__ import annotations

import logging

from dataloaderjob.core.texts import clean, clean_lines

MAX_TRACEBACK_CHARS = 32_000


class LineFormatter(logging.Formatter):
    """A formatter that writes a record as one line, and a traceback as indented lines below it. So untrusted text
    cannot look like a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's own name
        record.message = clean(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        return _indented(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(stack_info)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in clean_lines(text, MAX_TRACEBACK_CHARS).splitlines())


def log_lines(pattern: str) -> None:
    """Sends this process's log to standard error. `pattern` is the format of a line."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(pattern))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
