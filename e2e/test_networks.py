"""Other networks than a pod's own of IPv4: the node's, and a cluster that has IPv6 alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import RELEASE, ROOT, SYSTEM, Cluster, missing, own_cluster
from collect import collect
from jobs import FEEDERS, HEAD, TRAINER, Job, changed
from streams import stream, stream_here

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def test_job_on_the_host_network_completes(operator: Cluster, namespace: str, start):
    operator.kubectl(
        "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=privileged", "--overwrite"
    )
    hosted: Job = start(
        changed(
            stream("hosted"),
            spec__networkPolicy={"mode": "None"},
            spec__trainers__job__replicas=2,
            spec__trainers__job__template__spec__hostNetwork=True,
            spec__feeders__template={"spec": {"hostNetwork": True}},
        )
    )
    hosted.await_phase("Running", timeout_s=180)
    addresses = {
        address["address"]
        for node in operator.list("nodes", namespace)
        for address in node["status"]["addresses"]
        if address["type"] == "InternalIP"
    }
    pods = (*hosted.pods(FEEDERS), *hosted.pods(TRAINER))
    assert {pod["status"]["podIP"] for pod in pods} <= addresses
    assert len({pod["spec"]["nodeName"] for pod in hosted.pods(TRAINER)}) == 2, "one trainer pod on each node"
    hosted.await_phase("Complete", timeout_s=240)
    assert hosted.digest() == stream_here()


def without_ipv6() -> str:
    """Why this machine cannot have such a cluster; empty if nothing is known."""
    switch = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    if not switch.exists():
        return "this row needs IPv6, and this machine's kernel has none"
    if switch.read_text().strip() == "1":
        return "this row needs IPv6, and it is switched off: sysctl net.ipv6.conf.all.disable_ipv6=0"
    return ""


@pytest.fixture
def ipv6(tmp_path: Path) -> Iterator[Cluster]:
    """A small cluster of its own, with the chart installed."""
    if why := missing() or without_ipv6():
        pytest.fail(why, pytrace=False)
    # docker need not publish ports at ::1, where kind has its API server otherwise.
    networking = {"ipFamily": "ipv6", "apiServerAddress": "127.0.0.1"}
    with own_cluster("v6", tmp_path, {"networking": networking}) as made:
        yield made


def test_job_on_an_ipv6_only_cluster_completes(ipv6: Cluster):
    ipv6.kubectl("create", "namespace", "six")
    ipv6.kubectl("label", "namespace", "six", "pod-security.kubernetes.io/enforce=restricted")
    ipv6.apply("six", changed(stream("six"), spec__trainers__job__replicas=2, spec__feeders__replicas=2))
    six = Job(ipv6, "six", "six")
    try:
        six.await_phase("Running", timeout_s=240)
        addresses = [pod["status"]["podIP"] for role in (HEAD, FEEDERS, TRAINER) for pod in six.pods(role)]
        assert len(addresses) == 5
        assert all(":" in address for address in addresses), addresses
        six.await_phase("Complete", timeout_s=240)
        assert six.digest() == stream_here()
        assert RELEASE in ipv6.helm("list", "-n", SYSTEM, "--short").split()
    except BaseException:
        collect(ipv6, "six", ROOT / "e2e" / "artifacts" / "ipv6")
        raise
