"""The operator's process, for tests that watch it from outside."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from patience import PATIENCE_S
from ports import reserve_port
from warm import WarmProcess

from apiserver import ApiServer

ALL = 12
TRAINING = 2
"""Of these, trainers and what their sidecars read."""
"""Children of a job."""
ROOT = b"r" * 32
LIBRARIES = ("kopf", "kubernetes.aio.client", "aiohttp.web", "pydantic", "prometheus_client", "cel")
"""What the operator imports of others, which takes most of the time of its start."""
SOONER = Path(__file__).with_name("sooner.py")
BRISK = {
    "decide.decision.METRICS_EVERY_S": 5.0,
    "decide.health.AGAIN_S": 2.0,
    "decide.health.SETTLE_S": 1.0,
    "keys.AGAIN_S": 2.0,
    "observe.followed_objects.PERIOD_S": 2.0,
    "observe.ray_clusters.PERIOD_S": 2.0,
    "observe.supervisor_poller.METRICS_EVERY_S": 5.0,
    "observe.supervisor_poller.MIN_INTERVAL_S": 0.5,
    "observe.supervisor_poller.PERIOD_S": 2.0,
    "observe.supervisor_poller.RATES_SPAN_S": 2.0,
    "observe.supervisor_poller.UNSETTLED_PERIOD_S": 1.0,
    "observe.watch.AGAIN_S": 2.0,
    "pod_reports.MISSING_S": 2.0,
    "reconcile.UNWRITTEN_S": 5.0,
}
"""Intervals of the operator, a few times shorter: tests of units have the operator's own."""


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

    def __init__(
        self, server: ApiServer, folder: Path, url: str | None = None, *, waits: Mapping[str, float] = BRISK
    ) -> None:
        """`waits`: constants of the operator that are shorter here, as `sooner.py` takes them."""
        self._folder, self.port, self._waits = folder, reserve_port(), waits
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
        arguments = [
            str(SOONER), *(f"{name}={seconds}" for name, seconds in self._waits.items()), "--",
            "--sidecar-image", "example/sidecar:1", "--metrics-port", str(self.port), *options,
        ]  # fmt: skip
        if not any(option.startswith("--root-key") for option in options):
            arguments += ["--root-key", str(self._folder / "root")]
        with (self._folder / "log").open("ab") as log:
            self.process = WarmProcess(arguments, modules=LIBRARIES, env=env, stdout=log, stderr=log)

    def end(self, *, kill: bool = False) -> int:
        assert self.process is not None
        if kill:
            self.process.kill()
        else:
            self.process.terminate()
        return self.process.wait(20)
