"""The files that a process has imported, and a check that they are unchanged. This module imports no other module of
this package."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def record(path: Path) -> None:
    """Writes a list of the files that this process has imported to `path`, each with its modification time and size.
    Raises OSError."""
    files = {
        str(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))
    }
    part = path.with_suffix(".part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(part, flags, 0o600), "w") as out:
        json.dump({file: _state(file) for file in sorted(files)}, out)
    part.rename(path)


def is_current(path: Path) -> bool:
    """Returns True if every file is unchanged since `record`. Returns False if nothing was recorded."""
    try:
        found = json.loads(path.read_text())
        return all(_state(file) == state for file, state in found.items())
    except (OSError, ValueError):
        return False


def _state(file: str) -> list[int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size]
