"""The certificates of a run on this machine whose manifest has `spec.loader.tls: true`. The run is its own certificate
authority."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from dataloaderjob.core import folders
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.generations import FILES, Schedule
from dataloaderjob.core.keys import PARTS_OF_PODS, Part

SEED_NBYTES = 32


def tls_folder(home: Path, part: Part) -> Path:
    """Returns the folder with a part's certificates."""
    return home / "tls" / part.value


def _now() -> datetime:
    return datetime.now(UTC)


class RunCertificates:
    """The writer of a run's certificates. It writes each generation of certificates when it is due."""

    def __init__(self, home: Path, clock: Callable[[], datetime] = _now) -> None:
        """Raises InputError if the library for certificates is not installed."""
        try:
            from dataloaderjob.core import certificates
        except ImportError as exc:
            raise InputError(
                "spec.loader.tls: true needs the package cryptography: install dataloaderjob[tls], or set "
                "spec.loader.tls: false"
            ) from exc
        self._certificates, self._home, self._clock = certificates, home, clock
        self._seed = os.urandom(SEED_NBYTES)
        self._schedule = Schedule(clock())

    def write(self) -> None:
        """Writes the files of the current generation unless they exist. Raises OSError."""
        generation = self._schedule.current(self._clock())
        for part in PARTS_OF_PODS:
            folder = tls_folder(self._home, part) / str(generation)
            if folder.exists():
                continue
            made = self._certificates.files(self._seed, part, generation, self._schedule)
            new = folder.parent / f"new-{generation}"
            new.mkdir(parents=True, mode=0o700, exist_ok=True)
            for name, content in zip(FILES, (made.authorities, made.certificate, made.key), strict=True):
                folders.write(new / name, content)
            new.rename(folder)  # atomic, so that no reader finds a part of the files
