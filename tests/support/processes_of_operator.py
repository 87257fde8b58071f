"""The operator's process, for tests that watch it from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from apiserver import ApiServer

ALL = 7
"""Children of a job."""


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)
    return found


class Operator:
    """A process that can be killed and started again."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self._folder = folder
        (folder / "root").write_bytes(b"r" * 32)
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "s", "cluster": {"server": server.url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "u", "user": {"token": server.token}}],
            "contexts": [{"name": "c", "context": {"cluster": "s", "user": "u"}}],
        }  # fmt: skip
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def start(self, *options: str) -> None:
        env = {**os.environ, "KUBECONFIG": str(self._folder / "kubeconfig")}
        command = [
            sys.executable, "-m", "dataloaderjob_operator", "--root-key", str(self._folder / "root"),
            "--sidecar-image", "example/sidecar:1", *options,
        ]  # fmt: skip
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def end(self, *, kill: bool = False) -> int:
        assert self.process is not None
        if kill:
            self.process.kill()
        else:
            self.process.terminate()
        return self.process.wait(20)
