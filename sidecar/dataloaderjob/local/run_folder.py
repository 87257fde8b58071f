"""The folder of one service on this machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from dataloaderjob.core import folders, places
from dataloaderjob.core.errors import InputError, ServiceUnavailable
from dataloaderjob.core.ipc import MAX_PATH_NBYTES
from dataloaderjob.local.status import HOME_PREFIX


def make_home(*, ray: bool) -> Path:
    """Creates a private folder for the service, with a path short enough for sockets. Raises InputError if none can be
    created."""
    limit = MAX_PATH_NBYTES - len("/s")
    if ray:
        from dataloaderjob.providers.ray.node import MAX_FOLDER_NBYTES

        limit = MAX_FOLDER_NBYTES - len("/r99")
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108  mkdtemp creates a private folder in it
        if len(os.fsencode(base)) + len(f"/{HOME_PREFIX}xxxxxxxx") <= limit:
            with contextlib.suppress(OSError, ServiceUnavailable):
                folders.check_above(Path(base), places.REMEDY)
                home = Path(tempfile.mkdtemp(prefix=HOME_PREFIX, dir=base))
                folders.mark(home)
                return home
    raise InputError(
        "a run requires a writable folder in which others cannot rename files, and whose path has at most "
        f"{limit - len(f'/{HOME_PREFIX}xxxxxxxx')} bytes, but neither {tempfile.gettempdir()} nor /tmp is such a "
        "folder: set TMPDIR to one"
    )
