"""Attached pods while the operator is upgraded, while a node is lost, and with the policy in place of the webhook."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cluster import (
    CHART,
    OPERATOR,
    PLACE,
    RELEASE,
    ROOT,
    SIDECAR,
    SYSTEM,
    Cluster,
    Manifest,
    missing,
    own_cluster,
    run,
    until,
)
from collect import collect
from controllers import LABEL
from injected import SAMPLES, attached, events, plain_job, printed
from jobs import DIGEST, Job, changed
from next_release import CHANGES, CRD, change
from nodes import keep_operator_off, not_ready_since, start_again
from streams import longest_silence_s, stream_here

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
LONG = 480
"""Samples of a pod that takes a batch each second for two minutes."""
PACE_S = 0.25
MAX_GAP_S = 5.0
"""Between two batches."""
NEXT = "next"
"""Tag of the images after the upgrade, which are those of before."""
POLICIES_SINCE = 34
"""Minor version of Kubernetes from which the API server has the policies that the chart uses."""


class Trainer:
    """The one pod of a Job with the label."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name

    def pod(self) -> Manifest | None:
        found = self.cluster.list("pods", self.namespace, f"batch.kubernetes.io/job-name={self.name}")
        return found[0] if found else None

    def log(self, *options: str) -> str:
        pod = self.pod()
        name = "" if pod is None else pod["metadata"]["name"]
        return self.cluster.logs(name, self.namespace, "node", *options) if name else ""

    def takes_batches(self) -> bool:
        return "batch 5\n" in self.log()

    def digest(self, timeout_s: float = 240) -> str:
        found = until(
            lambda: DIGEST.findall(self.log()), timeout_s=timeout_s, what=f"the digest of {self.name}"
        )
        return str(found[-1])

    @contextmanager
    def without_a_gap(self, record_property: Callable[[str, object], None]) -> Iterator[None]:
        """Fails if batches stop for longer than MAX_GAP_S within the block. Records the longest gap."""
        began = datetime.now(UTC)
        yield
        gap_s = longest_silence_s(self.log("--timestamps"), began, datetime.now(UTC))
        record_property("longest_gap_s", round(gap_s, 1))
        assert gap_s < MAX_GAP_S, f"no batch for {gap_s:.1f} s"


def restarts(cluster: Cluster, namespace: str) -> dict[str, int]:
    """The restarts of all containers of each pod, by the pod's name and uid."""
    return {
        f"{pod['metadata']['name']} {pod['metadata']['uid']}": sum(
            container["restartCount"]
            for kind in ("initContainerStatuses", "containerStatuses")
            for container in pod["status"].get(kind, ())
        )
        for pod in cluster.list("pods", namespace)
    }


def injectors(cluster: Cluster) -> int:
    """The number of pods of the webhook, also of those that are ending, which may still answer."""
    return len(cluster.list("pods", SYSTEM, "app.kubernetes.io/name=dataloaderjob-injector"))


def next_chart(cluster: Cluster, folder: Path) -> list[str]:
    """The words of helm for a chart with a field more in the definition, and images with another tag."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart)
    ((_, found, instead),) = [row for row in CHANGES if row[0] == CRD]
    change(chart / Path(CRD).relative_to("charts/dataloaderjob"), found, instead)
    words = [str(chart), "--reuse-values"]
    for value, image in (("image", OPERATOR), ("sidecarImage", SIDECAR)):
        repository = image.rpartition(":")[0]
        words += ["--set", f"{value}.tag={NEXT}"]
        for place in ("trainers", "feeders"):
            tag = ["ctr", "--namespace=k8s.io", "images", "tag", "--force", image, f"{repository}:{NEXT}"]
            run(["docker", "exec", cluster.node(place), *tag])
    return words


@pytest.mark.nightly
def test_upgrade_of_the_operator_leaves_attached_pods_their_batches(
    operator: Cluster, namespace: str, tmp_path: Path, record_property
) -> None:
    before, after = (Trainer(operator, namespace, name) for name in ("before", "after"))
    operator.apply(namespace, attached("bert"))
    operator.apply(namespace, plain_job("before", of="bert", samples=LONG, pace_s=PACE_S))
    until(before.takes_batches, timeout_s=240, what="batches", also=Job(operator, namespace, "bert").why)
    words, counted = next_chart(operator, tmp_path), restarts(operator, namespace)
    assert len(counted) == 3, "the head, a feeder and the attached pod"
    try:
        with before.without_a_gap(record_property):
            operator.helm("upgrade", RELEASE, *words, "-n", SYSTEM, "--wait")
            definition = operator.kubectl("get", "crd", "dataloaderjobs.dataloading.dev", "-o", "json")
            assert "ofTheNextRelease" in definition
            until(lambda: injectors(operator) == 2, timeout_s=60, what="none of the old injectors")
            operator.apply(namespace, plain_job("after", of="bert"))
            assert after.digest() == stream_here(SAMPLES)
        pod = after.pod()
        assert pod is not None
        assert pod["spec"]["initContainers"][0]["image"].endswith(f":{NEXT}"), "injected after the upgrade"
        assert before.digest() == stream_here(LONG)
        now = restarts(operator, namespace)
        assert {name: now.get(name) for name in counted} == counted
    finally:
        operator.helm("rollback", RELEASE, "-n", SYSTEM, "--wait")


@pytest.fixture
def lost(operator: Cluster) -> Iterator[str]:
    """A worker without the operator. The test stops it, and it is started again afterwards."""
    node = operator.node("trainers")
    keep_operator_off(operator, node)
    yield node
    start_again(operator, node)


@pytest.mark.nightly
def test_lost_node_of_an_attached_pod_takes_no_batch_from_the_others(
    operator: Cluster, namespace: str, lost: str, record_property
) -> None:
    elsewhere = {"spec": {"nodeSelector": {PLACE: "feeders"}}}
    bert = changed(
        attached("bert"),
        spec__feeders__template=elsewhere,
        spec__ray__managed__head__template=elsewhere,
    )
    operator.apply(namespace, bert)
    trainers = {"stays": "feeders", "goes": "trainers"}
    for name, place in trainers.items():
        paced = {"samples": LONG, "pace_s": PACE_S, "nodeSelector": {PLACE: place}}
        operator.apply(namespace, plain_job(name, of="bert", **paced))
    stays, goes = (Trainer(operator, namespace, name) for name in trainers)
    job = Job(operator, namespace, "bert")
    until(lambda: stays.takes_batches() and goes.takes_batches(), timeout_s=240, what="batches", also=job.why)
    with stays.without_a_gap(record_property):
        run(["docker", "stop", "--time=1", lost])
        until(lambda: not_ready_since(operator, lost), timeout_s=120, what=f"{lost} not ready")
        told = job.await_condition("SidecarsReady", lambda found: found["reason"] == "NodeUnreachable")
        record_property("told", told["message"])
        assert lost in told["message"], told
        assert job.condition("TrainersReady")["reason"] == "NodeUnreachable", job.why()
        assert (job.phase(), job.condition("Ready")["status"]) == ("Serving", "True"), job.why()
    assert stays.digest() == stream_here(LONG)


def without_policies() -> str:
    """The reason why the nodes' version of Kubernetes cannot run this test; empty if it can."""
    image = os.environ.get("NODE_IMAGE", "")
    found = re.search(r":v1\.(\d+)", image)
    old = found is not None and int(found[1]) < POLICIES_SINCE
    return f"{image} has no MutatingAdmissionPolicy of v1beta1" if old else ""


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Cluster]:
    """A small cluster of its own with MutatingAdmissionPolicies, and the chart as it is installed there by default."""
    if why := missing():
        pytest.fail(why, pytrace=False)
    if why := without_policies():
        pytest.skip(why)
    gates = {
        "featureGates": {"MutatingAdmissionPolicy": True},
        "runtimeConfig": {"admissionregistration.k8s.io/v1beta1": "true"},
    }
    with own_cluster("policy", tmp_path, gates) as made:
        yield made


def test_policy_injects_pods_without_a_webhook_on_a_cluster(gated: Cluster) -> None:
    place = "policy"
    gated.kubectl("create", "namespace", place)
    gated.kubectl("label", "namespace", place, "pod-security.kubernetes.io/enforce=restricted")
    assert not gated.list("mutatingwebhookconfigurations", SYSTEM)
    gated.apply(place, plain_job("bert"))
    try:
        told = until(lambda: events(gated, place, "FailedCreate"), timeout_s=60, what="the guard's refusal")
        assert f"names DataLoaderJob {place}/bert, and this operator has no such job" in told[0]["message"]
        gated.apply(place, attached("bert"))
        assert printed(gated, place, "bert") == stream_here(SAMPLES)
        (pod,) = gated.list("pods", place, f"{LABEL}=bert")
        assert pod["spec"]["initContainers"][0]["restartPolicy"] == "Always"
    except BaseException:
        collect(gated, place, ROOT / "e2e" / "artifacts" / "policy")
        raise
