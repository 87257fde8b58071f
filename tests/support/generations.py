"""Generations of a job's certificates as files, with a clock that a test moves."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dataloaderjob.core import certificates
from dataloaderjob.core.credentials import FILES, Credentials
from dataloaderjob.core.generations import PERIOD, Schedule
from dataloaderjob.core.keys import Part
from dataloaderjob.local.certificates import tls_folder


class Generations:
    """The certificates of a job that began `age` ago, in `home`. The first generation is there at once."""

    def __init__(self, home: Path, *, seed: bytes = b"s" * 32, age: timedelta = timedelta()) -> None:
        self.home, self.seed = home, seed
        self.schedule = Schedule(datetime.now(UTC) - age)
        self.add(0)

    def add(self, generation: int, parts: tuple[Part, ...] = tuple(Part)) -> None:
        for part in parts:
            made = certificates.files(self.seed, part, generation, self.schedule)
            new = tls_folder(self.home, part) / f"new-{generation}"
            new.mkdir(parents=True)
            for name, content in zip(FILES, (made.authorities, made.certificate, made.key), strict=True):
                (new / name).write_bytes(content)
            new.rename(new.parent / str(generation))

    def remove(self, generation: int) -> None:
        for part in Part:
            shutil.rmtree(tls_folder(self.home, part) / str(generation))

    def of(self, part: Part) -> Credentials:
        return Credentials(tls_folder(self.home, part))


TWO_PERIODS = 2 * PERIOD
