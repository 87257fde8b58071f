"""What the processes of one run of the tests have in common: clusters, and whose turn it is to use one.

Several tests use a cluster at a time, each in a namespace of its own. One that shakes what all of them need, such as a
node, the operator or the API server, is marked `alone` and has its cluster for itself.
"""

from __future__ import annotations

import fcntl
import os
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

    def made(self, kind: str) -> list[str]:
        """What `once` gave under this name, and under those that begin so."""
        return [done.read_text() for done in sorted(self.folder.glob(f"{kind}*.done"))]

    def kubeconfig(self, cluster: str) -> Path:
        return self.folder / f"kubeconfig-{cluster}"

    @contextmanager
    def turn(self, cluster: int, *, alone: bool) -> Iterator[None]:
        """The cluster of this number for this block: beside others, or alone.

        Who waits to be alone holds the gate, so that those who come later wait, too.
        """
        with (self.folder / f"turn-{cluster}.lock").open("w") as held:
            with self._locked(f"gate-{cluster}.lock", fcntl.LOCK_EX):
                fcntl.flock(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield

    @contextmanager
    def _locked(self, name: str, how: int) -> Iterator[None]:
        with (self.folder / name).open("w") as held:
            fcntl.flock(held, how)
            yield


def number_of_cluster() -> int:
    """Which one this process uses, of the `E2E_CLUSTERS` that there are."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return process % int(os.environ.get("E2E_CLUSTERS", "1"))


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
