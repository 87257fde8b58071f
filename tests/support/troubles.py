"""Datasets and functions that go wrong, each in its own way. Feeders import this module, too."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from batches import Numbers


class CorruptImage(Exception):
    """The user's own, with arguments and an attribute of its own."""

    def __init__(self, path: str, *, offset: int) -> None:
        super().__init__(f"{path} is corrupt at {offset}")
        self.path, self.offset = path, offset


class Fails(Numbers):
    """Sample `at` raises what `make` returns."""

    def __init__(self, make: Any, at: int = 17) -> None:
        super().__init__(40)
        self.make, self.at = make, at

    def __getitem__(self, i: int) -> Any:
        if i == self.at:
            raise self.make()
        return super().__getitem__(i)


class Gives(Numbers):
    """Sample `at` is what `make` returns."""

    def __init__(self, make: Any, at: int = 17) -> None:
        super().__init__(40)
        self.make, self.at = make, at

    def __getitem__(self, i: int) -> Any:
        return self.make() if i == self.at else i


class ExitsOnce(Numbers):
    """Sample 17 ends its process the first time."""

    def __init__(self, marker: Path) -> None:
        super().__init__(40)
        self.marker = marker

    def __getitem__(self, i: int) -> Any:
        if i == 17 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


class BadState(Numbers):
    """Pickles, and does not unpickle."""

    def __getstate__(self) -> dict[str, Any]:
        return {"n": self.n}

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise OSError(2, "No such file or directory", "/data/index.bin")


class Nested(Numbers):
    """Iterates loaders of its own, within a feeder."""

    def __getitem__(self, i: int) -> Any:
        from dataloaderjob import DataLoader

        own = sum(len(list(DataLoader(Numbers(4), batch_size=2, num_workers=n))) for n in (0, None))
        return own + (len(list(DataLoader(Numbers(4), num_workers=1))) if i == 17 else 0)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Thing:
    """A class that may travel pickled."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and other.value == self.value

    __hash__ = None
