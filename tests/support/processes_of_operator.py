"""The operator's process, for tests that watch it from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from patience import PATIENCE_S
from ports import reserve_port

from apiserver import ApiServer

ALL = 12
TRAINING = 2
"""Of these, trainers and what their sidecars read."""
"""Children of a job."""
ROOT = b"r" * 32


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    seconds = max(seconds, PATIENCE_S)
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)
    return found


def kubeconfig(server: ApiServer, folder: Path, url: str | None = None) -> Path:
    """Written to the folder, for whoever has the server's token. `url`: of a way to the server, in place of its own."""
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "s", "cluster": {"server": url or server.url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "u", "user": {"token": server.token}}],
        "contexts": [{"name": "c", "context": {"cluster": "s", "user": "u"}}],
    }  # fmt: skip
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


class Operator:
    """A process that can be killed and started again."""

    def __init__(self, server: ApiServer, folder: Path, url: str | None = None) -> None:
        self._folder, self.port = folder, reserve_port()
        (folder / "root").write_bytes(ROOT)
        self._kubeconfig = kubeconfig(server, folder, url)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def ask(self, path: str) -> tuple[int, str]:
        """Status and text of an answer of its own port; 0 while nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            return exc.code, exc.read().decode()
        except OSError:
            return 0, ""

    def start(self, *options: str) -> None:
        env = {**os.environ, "KUBECONFIG": str(self._kubeconfig)}
        command = [
            sys.executable, "-m", "dataloaderjob_operator", "--sidecar-image", "example/sidecar:1",
            "--metrics-port", str(self.port), *options,
        ]  # fmt: skip
        if not any(option.startswith("--root-key") for option in options):
            command += ["--root-key", str(self._folder / "root")]
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def end(self, *, kill: bool = False) -> int:
        assert self.process is not None
        if kill:
            self.process.kill()
        else:
            self.process.terminate()
        return self.process.wait(20)
