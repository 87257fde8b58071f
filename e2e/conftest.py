"""One cluster for all tests, made and deleted here; a namespace of its own for each test."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import RELEASE, ROOT, SYSTEM, Cluster, Manifest, missing
from collect import collect
from jobs import Job

pytest_plugins = ["durations"]
ARTIFACTS = ROOT / "e2e" / "artifacts"
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if gone := missing():
        pytest.fail(gone, pytrace=False)
    kubeconfig = tmp_path_factory.mktemp("cluster") / "kubeconfig"
    if name := os.environ.get("E2E_CLUSTER"):
        yield Cluster.existing(name, kubeconfig)
        return
    made = Cluster.create(f"dataloaderjob-{os.getpid()}", kubeconfig)
    try:
        yield made
    finally:
        made.delete()


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the chart installed, in a namespace that enforces `restricted`."""
    _restricted(cluster, SYSTEM)
    if RELEASE not in cluster.helm("list", "-n", SYSTEM, "--short").split():
        cluster.install()
    yield cluster
    cluster.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait", "--ignore-not-found")


@pytest.fixture
def namespace(operator: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """One that enforces `restricted`, and is deleted after the test with all that is in it."""
    test = request.node.name.removeprefix("test_")
    short = re.sub(r"[^a-z0-9]+", "-", test.lower()).strip("-")[:50].strip("-")
    name = f"{short}-{zlib.crc32(test.encode()):08x}"  # tests with parameters begin alike
    _restricted(operator, name)
    yield name
    if request.node.stash.get(FAILED, False):
        collect(operator, name, ARTIFACTS / name)
    operator.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


def _restricted(cluster: Cluster, name: str) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.apply(
        "default", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    )


@pytest.fixture
def start(operator: Cluster, namespace: str) -> Callable[[Manifest], Job]:
    """Applies a job and returns it; it goes with its namespace."""

    def apply(manifest: Manifest) -> Job:
        operator.apply(namespace, manifest)
        return Job(operator, namespace, manifest["metadata"]["name"])

    return apply


@pytest.fixture(scope="session")
def local_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the main job, as its manifest is printed, run on this machine without Kubernetes."""
    import main_job

    return main_job.run_here(Path(tmp_path_factory.mktemp("local")))
