"""One cluster for all tests, made and deleted here; a namespace of its own for each test.

Tests run in one process or in several (`-n 2`), which share the cluster and what is installed on it.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import RELEASE, ROOT, SYSTEM, Cluster, Manifest, missing
from collect import collect
from jobs import Job
from sharing import Shared, in_order, is_alone, uses_cluster

pytest_plugins = ["durations"]
ARTIFACTS = ROOT / "e2e" / "artifacts"
FAILED = pytest.StashKey[bool]()
SHARED = pytest.StashKey[Shared]()


def pytest_configure(config: pytest.Config) -> None:
    theirs = getattr(config, "workerinput", {}).get("shared")
    config.stash[SHARED] = Shared(Path(theirs or tempfile.mkdtemp(prefix="dataloaderjob-e2e-")))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """A process that runs tests gets to know the folder."""
    node.workerinput["shared"] = str(node.config.stash[SHARED].folder)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The process that has the others run deletes what they made, once they have ended."""
    if hasattr(session.config, "workerinput"):
        return
    shared = session.config.stash[SHARED]
    if (name := shared.made("cluster")) is not None:
        cluster = Cluster(name, shared.kubeconfig)
        if name != os.environ.get("E2E_CLUSTER"):
            cluster.delete()
        elif shared.made("operator") is not None:
            cluster.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait", "--ignore-not-found")
    shutil.rmtree(shared.folder, ignore_errors=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("nightly"):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = in_order(items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """A test's time runs from its turn on."""
    if not uses_cluster(item):
        return (yield)
    with item.config.stash[SHARED].turn(alone=is_alone(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config) -> Shared:
    return pytestconfig.stash[SHARED]


@pytest.fixture(scope="session")
def cluster(shared: Shared) -> Cluster:
    if gone := missing():
        pytest.fail(gone, pytrace=False)

    def make() -> str:
        if name := os.environ.get("E2E_CLUSTER"):
            return Cluster.existing(name, shared.kubeconfig).name
        return Cluster.create(f"dataloaderjob-{os.getpid()}", shared.kubeconfig).name

    return Cluster(shared.once("cluster", make), shared.kubeconfig)


@pytest.fixture(scope="session")
def operator(shared: Shared, cluster: Cluster) -> Cluster:
    """The cluster with the chart installed, in a namespace that enforces `restricted`."""

    def install() -> str:
        _restricted(cluster, SYSTEM)
        if RELEASE not in cluster.helm("list", "-n", SYSTEM, "--short").split():
            cluster.install()
        return RELEASE

    shared.once("operator", install)
    return cluster


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
def local_digest(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the main job, as its manifest is printed, run on this machine without Kubernetes."""
    import main_job

    return shared.once("digest", lambda: main_job.run_here(Path(tmp_path_factory.mktemp("local"))))
