"""Runs of this user that live on this machine, found by the file that each keeps in its folder."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloaderjob.core import folders, supervision
from dataloaderjob.core.errors import DataLoaderJobError, InputError
from dataloaderjob.core.settings import read_key
from dataloaderjob.local.poller import Snapshot, sidecar_status

RUN_FILE = "run.json"
HOME_PREFIX = "dlj-run-"


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

    def snapshot(self) -> Snapshot:
        """What sidecar and supervisor report now; that one of them does not answer is a note."""
        sidecar = sidecar_status(str(self.about["socket"])) or {}
        try:
            supervisor = self.ask({"type": "status"})
        except (OSError, DataLoaderJobError) as exc:
            supervisor = {"notes": [f"the supervisor does not answer: {exc}"]}
        return Snapshot(at=time.monotonic(), sidecar=sidecar, supervisor=supervisor)


def live_runs() -> Iterator[LiveRun]:
    """All of this user's."""
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108  where runs have their folders
        for path in sorted(Path(base).glob(f"{HOME_PREFIX}*/{RUN_FILE}")):
            found = _read(path.parent)
            if found is not None:
                yield found


def runs(folder: str | None) -> list[LiveRun]:
    """The run of this folder if it lives, or all that live."""
    if folder is None:
        return list(live_runs())
    found = _read(Path(folder))
    return [] if found is None else [found]


def find(folder: str | None) -> LiveRun:
    """The run of this folder, or the only one there is. Raises InputError with those that can be chosen."""
    if folder is not None:
        found = _read(Path(folder))
        if found is None:
            raise InputError(f"a live run is needed in {folder}, none was found: see `dataloaderjob status`")
        return found
    live = list(live_runs())
    if len(live) == 1:
        return live[0]
    if not live:
        raise InputError("no run of yours lives on this machine: start one with `dataloaderjob run job.yaml`")
    which = ", ".join(f"{run.home} ({run.job})" for run in live)
    raise InputError(f"one run is needed, found {len(live)}: choose by --dir one of {which}")


def _read(home: Path) -> LiveRun | None:
    try:
        if not folders.is_own(home):
            return None
        about = json.loads((home / RUN_FILE).read_text())
        os.kill(int(about["pid"]), 0)
    except (OSError, ValueError, KeyError):
        return None
    return LiveRun(home, about)
