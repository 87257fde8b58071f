"""The files from which a process has imported, and a check that they are unchanged. Imports nothing of ours."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def record(path: Path) -> None:
    """Records the files of this process, each with its modification time and size. Raises OSError."""
    files = {
        str(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps({file: _state(file) for file in sorted(files)}))
    part.rename(path)


def is_current(path: Path) -> bool:
    """True if every file is unchanged since `record`; False if nothing was recorded."""
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
