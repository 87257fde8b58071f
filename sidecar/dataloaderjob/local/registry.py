"""Runs of this user that live on this machine, found by the file that each keeps in its folder."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloaderjob.core import folders, supervision
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.settings import read_key
from dataloaderjob.local.cluster import HOME_PREFIX, RUN_FILE
from dataloaderjob.local.poller import sidecar_status


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run, or a private service, that answers."""

    home: Path
    about: dict[str, Any]

    @property
    def job(self) -> str:
        return str(self.about["job"])

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The supervisor's answer. Raises OSError, ProtocolError, ServiceError."""
        key = read_key(self.home / "key")
        return supervision.ask("127.0.0.1", int(self.about["port"]), key, job=self.job, message=message)

    def sidecar(self) -> dict[str, Any]:
        return sidecar_status(str(self.about["socket"])) or {}


def live_runs() -> Iterator[LiveRun]:
    """All of this user's."""
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108  where runs have their folders
        for path in sorted(Path(base).glob(f"{HOME_PREFIX}*/{RUN_FILE}")):
            found = _read(path.parent)
            if found is not None:
                yield found


def find(folder: str | None) -> LiveRun:
    """The run of this folder, or the only one there is. Raises InputError with those that can be chosen."""
    if folder is not None:
        found = _read(Path(folder))
        if found is None:
            raise InputError(f"a live run is needed in {folder}, none was found: see `dataloaderjob status`")
        return found
    runs = list(live_runs())
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise InputError("no run of yours lives on this machine: start one with `dataloaderjob run job.yaml`")
    which = ", ".join(f"{run.home} ({run.job})" for run in runs)
    raise InputError(f"one run is needed, found {len(runs)}: choose by --dir one of {which}")


def _read(home: Path) -> LiveRun | None:
    try:
        if not folders.is_own(home):
            return None
        about = json.loads((home / RUN_FILE).read_text())
        os.kill(int(about["pid"]), 0)
    except (OSError, ValueError, KeyError):
        return None
    return LiveRun(home, about)
