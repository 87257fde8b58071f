"""What the processes of one run of the tests have in common: one cluster, and whose turn it is to use it.

Several tests use the cluster at a time, each in a namespace of its own. One that shakes what all of them need, such as
a node, the operator or the API server, is marked `alone` and has the cluster for itself.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Rows = list[pytest.Item]


class Shared:
    """A folder that all processes of a run know."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def once(self, name: str, make: Callable[[], str]) -> str:
        """What the first process has made; the others wait for it. Raises what `make` raised, in them as Failed."""
        done, failed = self.folder / f"{name}.done", self.folder / f"{name}.failed"
        with self._locked(f"{name}.lock", fcntl.LOCK_EX):
            if done.exists():
                return done.read_text()
            if failed.exists():
                pytest.fail(f"{name} could not be made: {failed.read_text()}", pytrace=False)
            try:
                made = make()
            except BaseException as exc:
                failed.write_text(str(exc))
                raise
            done.write_text(made)
            return made

    def made(self, name: str) -> str | None:
        """What `once` gave, None if it gave nothing."""
        done = self.folder / f"{name}.done"
        return done.read_text() if done.exists() else None

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        """The cluster for this block: beside others, or alone.

        Who waits to be alone holds the gate, so that those who come later wait, too.
        """
        with (self.folder / "turn.lock").open("w") as held:
            with self._locked("gate.lock", fcntl.LOCK_EX):
                fcntl.flock(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield

    @contextmanager
    def _locked(self, name: str, how: int) -> Iterator[None]:
        with (self.folder / name).open("w") as held:
            fcntl.flock(held, how)
            yield


def uses_cluster(row: pytest.Item) -> bool:
    return "cluster" in getattr(row, "fixturenames", ())


def is_alone(row: pytest.Item) -> bool:
    return row.get_closest_marker("alone") is not None


def in_order(rows: Rows) -> Rows:
    """As two processes take them, two rows each at first.

    The first makes the cluster. Meanwhile the other has the rows that need none, then the one that runs the main job on
    this machine. Rows that are alone come last, so that hardly anybody waits for them.
    """
    alone = [row for row in rows if is_alone(row)]
    beside = [row for row in rows if not is_alone(row)]
    quick = [row for row in beside if not uses_cluster(row) and row.get_closest_marker("slow") is None]
    rest = [row for row in beside if row not in quick]
    plain = [row for row in rest if "local_digest" not in getattr(row, "fixturenames", ())]
    main = [row for row in rest if row not in plain]
    return [*plain[:2], *quick, *main, *plain[2:], *alone]
