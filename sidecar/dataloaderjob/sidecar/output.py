"""The lines that the sidecar and its receivers write to their standard error."""

from __future__ import annotations

import os

from dataloaderjob.core.texts import clean


def log(text: str) -> None:
    """Writes one line to standard error in a single, unbuffered call, because receivers share the file descriptor."""
    os.write(2, f"[sidecar] {clean(text)}\n".encode())
