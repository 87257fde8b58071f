"""A Ray cluster that no job started, and runs whose feeders are placed there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from local_runs import Project
from supervised import Head, up, with_support

from dataloaderjob.core.settings import RayTasks

CPUS = 8


class ForeignHead(Head):
    """A head with CPUs, as `ray start --head` starts it, and without anything of ours."""

    def marks(self) -> dict[str, str]:
        return {}

    def auth(self) -> dict[str, str]:
        """What a user sets to be this cluster's client."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_path)}

    def sessions(self) -> list[Path]:
        """What jobs have left in the folders of Ray's sessions."""
        return [path for path in self.folder.glob("session_2*/dataloaderjob/*") if path.exists()]


@contextmanager
def foreign_head(env: Mapping[str, str] | None = None, *, cpus: int = CPUS) -> Iterator[ForeignHead]:
    """A head that is up. `env`: variables of its processes."""
    with tempfile.TemporaryDirectory(prefix="dlj", ignore_cleanup_errors=True) as folder:
        made = ForeignHead(
            Path(folder) / "ray", num_feeders=0, tasks=RayTasks(cpus=cpus),
            env={**os.environ, "PYTHONPATH": with_support(), **(env or {})},
        )  # fmt: skip
        with up(made):
            yield made


def on(head: ForeignHead, folder: Path, *args: Any, **spec: Any) -> Project:
    """A project whose feeders are placed on this cluster."""
    folder.mkdir(exist_ok=True)
    return Project(folder, *args, ray={"external": {"address": head.address}}, **spec)
