"""Files that commands write. A file is replaced atomically, so that no reader finds a part of it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path

from dataloaderjob.core.errors import InputError


def write_output(target: str | Path, text: str) -> None:
    """Writes a file, and keeps its mode. A link's target is replaced, not the link. A device or a pipe is written to,
    not replaced. Raises InputError if that is impossible."""
    try:
        if _is_special(target):
            with open(target, "a", encoding="utf-8", newline="") as file:
                file.write(text)
        else:
            _replace(Path(target).resolve(), text)
    except OSError as exc:
        raise InputError(
            f"{target or 'an empty name'} cannot be written ({exc.strerror}): name a file in a folder that exists and "
            "that you may write to"
        ) from exc


def _is_special(target: str | Path) -> bool:
    if re.match(r"/dev/(?!shm/)|/proc/", str(target)):
        return True  # /dev/stdout may be a file to which a shell appends
    try:
        return not stat.S_ISREG(os.stat(target).st_mode)
    except FileNotFoundError:
        return False


def _replace(path: Path, text: str) -> None:
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o7777 if path.exists() else 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found
