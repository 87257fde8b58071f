"""A kind cluster and what the tests do with it, by the programs that a user has: kind, docker, kubectl, helm.

Variables: NODE_IMAGE (kind's, for another version of Kubernetes), REGISTRY and TAG of the images, E2E_CLUSTER (name of
a cluster that is there already, with the images; it is left as it is).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from dataloaderjob import __version__

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "dataloaderjob"
EXAMPLE = ROOT / "examples" / "fashion-mnist"
CONFIG = Path("e2e/kind.yaml")
"""kind's, of the cluster that most tests share."""
REGISTRY = os.environ.get("REGISTRY") or "ghcr.io/dataloaderjob"
TAG = os.environ.get("TAG") or __version__
OPERATOR, SIDECAR, FEEDER = (f"{REGISTRY}/{part}:{TAG}" for part in ("operator", "sidecar", "feeder"))
TRAINER = "fashion-mnist:1"
IMAGES = (OPERATOR, SIDECAR, FEEDER, TRAINER)
SYSTEM = "dataloaderjob-system"
RELEASE = "dataloaderjob"
PLACE = "example.com/place"
"""Label of the workers: `trainers` and `feeders`."""
NEEDED = {
    "docker": "https://docs.docker.com/engine/install/",
    "kind": "https://kind.sigs.k8s.io",
    "kubectl": "https://kubernetes.io/docs/tasks/tools/",
    "helm": "https://helm.sh/docs/intro/install/",
}
Manifest = dict[str, Any]
T = TypeVar("T")
NOTHING_TO_READ = ("is waiting to start", "is not available", "NotFound")
"""Errors of `kubectl logs` (1.34) about a pod none of whose containers has an output: new, between two containers, or
gone."""


class CommandFailed(Exception):
    """A program ended with an exit code that is not 0; the message has what it printed."""


def run(words: Sequence[str], *, stdin: str | None = None, timeout_s: float = 120.0, env: Any = None) -> str:
    """What the program printed. Raises CommandFailed."""
    done = subprocess.run(
        list(words), input=stdin, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    if done.returncode:
        raise CommandFailed(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def missing() -> str:
    """Which program is needed and not there, with where to get it; empty if all are."""
    gone = [f"{name} ({where})" for name, where in NEEDED.items() if shutil.which(name) is None]
    return f"needed for tests on a cluster, and not there: {', '.join(gone)}" if gone else ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """One that runs."""

    name: str
    kubeconfig: Path

    @classmethod
    def create(cls, name: str, kubeconfig: Path, *, config: Path = CONFIG, workers: int = 2) -> Cluster:
        """One with the images on all of its workers: two minutes. Raises CommandFailed."""
        image = ["--image", os.environ["NODE_IMAGE"]] if os.environ.get("NODE_IMAGE") else []
        run([*create_words(name, config), "--kubeconfig", str(kubeconfig), *image], timeout_s=600)
        cluster = cls(name, kubeconfig)
        try:
            nodes = [f"{name}-worker", *(f"{name}-worker{n}" for n in range(2, workers + 1))]
            run([*load_words(name), f"--nodes={','.join(nodes)}"], timeout_s=900)
        except BaseException:
            cluster.delete()
            raise
        return cluster

    @classmethod
    def existing(cls, name: str, kubeconfig: Path) -> Cluster:
        kubeconfig.write_text(run(["kind", "get", "kubeconfig", "--name", name]))
        return cls(name, kubeconfig)

    def delete(self) -> None:
        run(
            ["kind", "delete", "cluster", "--name", self.name, "--kubeconfig", str(self.kubeconfig)],
            timeout_s=300,
        )

    def kubectl(self, *words: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
        """Raises CommandFailed."""
        return run(["kubectl", *words], stdin=stdin, timeout_s=timeout_s, env=self._env())

    def background(self, *words: str) -> subprocess.Popen[str]:
        """A program that goes on; its output is for `communicate`."""
        return subprocess.Popen(
            list(words), stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **self._env()}
        )  # fmt: skip

    def script(self, text: str, timeout_s: float = 120.0) -> str:
        """Runs lines of bash, and ends at the first that fails."""
        return run(["bash", "-euc", text], timeout_s=timeout_s, env=self._env())

    def helm(self, *words: str, timeout_s: float = 300.0) -> str:
        """Raises CommandFailed."""
        return run(["helm", *words], timeout_s=timeout_s, env=self._env())

    def install(self, *options: str, release: str = RELEASE) -> str:
        """The chart with the images under test, as `helm install --wait`. Raises CommandFailed."""
        return self.helm(*install_words(release)[1:], *image_values(), *options)

    def node(self, place: str) -> str:
        """Name of the worker with this label, which is its container's too."""
        return (
            self.kubectl("get", "nodes", "-l", f"{PLACE}={place}", "-o", "name").strip().removeprefix("node/")
        )

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Manifest]:
        words = ["get", kind, "-n", namespace, "-o", "json", *(["-l", selector] if selector else [])]
        return list(json.loads(self.kubectl(*words))["items"])

    def get(self, kind: str, name: str, namespace: str) -> Manifest | None:
        """None if it is not there."""
        text = self.kubectl("get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found")
        return dict(json.loads(text)) if text.strip() else None

    def apply(self, namespace: str, *manifests: Manifest) -> None:
        """Raises CommandFailed with what the API server refused."""
        self.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump_all(manifests))

    def patch(self, kind: str, name: str, namespace: str, change: Manifest) -> None:
        self.kubectl("patch", kind, name, "-n", namespace, "--type=merge", "-p", json.dumps(change))

    def logs(self, pod: str, namespace: str, container: str | None = None, *options: str) -> str:
        """Empty while nothing of the pod has started, and when it has gone."""
        which = [*(["-c", container] if container else ["--all-containers"]), *options]
        try:
            return self.kubectl("logs", pod, "-n", namespace, *which)
        except CommandFailed as exc:
            if any(words in str(exc) for words in NOTHING_TO_READ):
                return ""
            raise

    def _env(self) -> dict[str, str]:
        return {"KUBECONFIG": str(self.kubeconfig)}


@contextlib.contextmanager
def own_cluster(name: str, folder: Path, config: Mapping[str, Any]) -> Iterator[Cluster]:
    """A small cluster for one test, with the chart installed. `config`: what differs from kind.yaml."""
    made = yaml.safe_load(CONFIG.read_text())
    path = folder / "kind.yaml"
    path.write_text(yaml.safe_dump({**made, **config, "nodes": made["nodes"][:2]}))
    cluster = Cluster.create(
        f"dataloaderjob-{name}-{os.getpid()}", folder / "kubeconfig", config=path, workers=1
    )
    try:
        cluster.kubectl("create", "namespace", SYSTEM)
        cluster.install()
        yield cluster
    finally:
        cluster.delete()


def create_words(name: str, config: Path = CONFIG) -> list[str]:
    return ["kind", "create", "cluster", "--name", name, "--config", str(config), "--wait", "180s"]


def load_words(name: str) -> list[str]:
    return ["kind", "load", "docker-image", "--name", name, *IMAGES]


def install_words(release: str) -> list[str]:
    where = ["--namespace", SYSTEM, "--create-namespace"]
    return ["helm", "install", release, "charts/dataloaderjob", *where, "--wait"]


def image_values() -> list[str]:
    """Values of the chart that have it run the images under test, where those are not the chart's own."""
    found: list[str] = []
    if f"{REGISTRY}:{TAG}" == f"ghcr.io/dataloaderjob:{__version__}":
        return found
    for value, name in (("image", OPERATOR), ("sidecarImage", SIDECAR), ("feederImage", FEEDER)):
        repository, _, tag = name.rpartition(":")
        found += ["--set", f"{value}.repository={repository}", "--set", f"{value}.tag={tag}"]
    return found


def until(
    look: Callable[[], T | None],
    *,
    timeout_s: float,
    what: str,
    every_s: float = 0.5,
    also: Callable[[], str] = str,
) -> T:
    """The first answer that is true. Raises AssertionError with `what` was waited for and what was seen last."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}. {also()}")
        time.sleep(every_s)
