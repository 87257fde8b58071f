"""The settings and the key of a sidecar in an attached pod. The sidecar rereads both while no supervisor answers.

They are in a ConfigMap and a Secret, whose names depend on the job's name alone. A pod may therefore start with the
files of an earlier job of the same name. The kubelet replaces the files while the sidecar is running. The settings also
report the end of the job: the pod outlives its job, and its trainer must not wait forever.
"""

from __future__ import annotations

import json
from pathlib import Path

from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.core.settings import SidecarSettings, read_key

AGAIN_S = 2.0
"""Minimum interval between two reads of the files."""


class Attachment:
    """The files with which an attached pod's sidecar was started."""

    def __init__(self, path: Path, settings: SidecarSettings, key: bytes) -> None:
        self._path, self._job, self._key_path, self._key = path, settings.job, settings.key_path, key
        self._due = 0.0
        self.ended = settings.ended
        """The reason why the job has ended; empty while the job is running."""
        self.outdated = ""
        """The reason why the sidecar must be restarted; empty if no restart is needed."""

    def look(self, now: float) -> bool:
        """Rereads the files, at most once per AGAIN_S. Returns True if `ended` or `outdated` has changed. Ignores files
        that cannot be read, perhaps because they are being replaced."""
        if now < self._due:
            return False
        self._due = now + AGAIN_S
        before = self.ended, self.outdated
        try:
            found = json.loads(self._path.read_text())
            job, ended = str(found["job"]), str(found.get("ended") or "")
            key = read_key(self._key_path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, DataLoaderJobError):
            return False
        self.ended = ended if job == self._job else ""
        if job != self._job:
            self.outdated = f"its settings were for {self._job}, and are now for {job}"
        elif key != self._key:
            self.outdated = "the job's key has changed"
        return (self.ended, self.outdated) != before
