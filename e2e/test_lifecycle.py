"""A job's life on a cluster: scaled, suspended, edited, its children deleted, the operator upgraded and gone."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from cluster import SYSTEM, Cluster, CommandFailed, Manifest, image_values, run, until
from jobs import FEEDERS, HEAD, TRAINER, Job, changed, job
from nodes import drain
from readme import UPGRADE, words

pytestmark = pytest.mark.timeout(600)
ALL = (HEAD, FEEDERS, TRAINER)


@pytest.fixture
def running(start) -> Job:
    """One that waits, with everything up."""
    made: Job = start(job("idle"))
    made.await_phase("Running", timeout_s=90)
    return made


def test_feeders_are_scaled_by_kubectl_and_the_supervisor_follows(running: Job):
    kubectl = running.cluster.kubectl
    kubectl("scale", "dlj", "idle", "-n", running.namespace, "--replicas=2")
    until(
        lambda: running.status()["feeders"].get("summary") == "2/2", timeout_s=60, what="2/2", also=running.why
    )  # fmt: skip
    path = f"/apis/dataloading.dev/v1alpha1/namespaces/{running.namespace}/dataloaderjobs/idle/scale"
    scale = json.loads(kubectl("get", "--raw", path))
    assert scale["status"]["replicas"] == 2
    found = running.cluster.list("pods", running.namespace, scale["status"]["selector"])
    assert len(found) == 2, "an autoscaler finds the feeders' pods by the selector"
    kubectl("scale", "dlj", "idle", "-n", running.namespace, "--replicas=1")
    until(lambda: len(running.pods(FEEDERS)) == 1, timeout_s=60, what="one feeder", also=running.why)
    until(lambda: running.status()["feeders"]["summary"] == "1/1", timeout_s=60, what="1/1", also=running.why)


@pytest.mark.slow
def test_suspended_job_has_no_pods_and_resumes(running: Job):
    running.cluster.patch("dlj", "idle", running.namespace, {"spec": {"suspend": True}})
    running.await_phase("Suspended", timeout_s=90)
    left = running.cluster.list("pods", running.namespace, "dataloading.dev/job=idle")
    assert not left
    assert running.condition("Suspended")["status"] == "True"
    running.cluster.patch("dlj", "idle", running.namespace, {"spec": {"suspend": False}})
    running.await_phase("Running", timeout_s=90)
    assert running.condition("Suspended")["status"] == "False"


def settings_of(running: Job, role: str) -> str:
    """The ConfigMap that pods of a role read, as kubectl names it."""
    which = f"-l=dataloading.dev/job=idle,dataloading.dev/role={role}"
    (found,) = running.cluster.kubectl(
        "get", "configmap", which, "-n", running.namespace, "-o", "name"
    ).split()
    return found


@pytest.mark.slow
def test_deleted_or_edited_children_are_restored(running: Job):
    kubectl, place = running.cluster.kubectl, ["-n", running.namespace]
    job = running.cluster.get("dlj", "idle", running.namespace)
    assert job is not None
    prefix = f"secret/idle-keys-{job['metadata']['uid'][:8]}-"
    listed = kubectl("get", "secrets", "-o", "name", *place).split()
    (secret,) = (name.removeprefix("secret/") for name in listed if name.startswith(prefix))
    kubectl("delete", f"secret/{secret}", *place)
    for child in (
        "service/idle-head",
        settings_of(running, "feeder"),
        "deployment/idle-feeders",
        "deployment/idle-head",
    ):
        kind, name = child.split("/")
        old = running.cluster.get(kind, name, running.namespace)
        assert old is not None, child

        def anew(kind=kind, name=name, uid=old["metadata"]["uid"]) -> bool:
            live = running.cluster.get(kind, name, running.namespace)
            return live is not None and live["metadata"]["uid"] != uid

        kubectl("delete", child, *place, "--wait=false")
        until(anew, timeout_s=10, what=f"{child} made anew", also=running.why)
    until(
        lambda: running.cluster.get("secret", secret, running.namespace) is not None, timeout_s=30,
        what="the Secret, which nobody watches, now that pods start", also=running.why,
    )  # fmt: skip
    kubectl("annotate", "deployment/idle-feeders", *place, "example.com/theirs=kept")
    running.cluster.patch("deployment", "idle-feeders", running.namespace, {"spec": {"replicas": 3}})

    def reverted() -> bool:
        live = running.cluster.get("deployment", "idle-feeders", running.namespace)
        return live is not None and live["spec"]["replicas"] == 1

    until(reverted, timeout_s=10, what="the number of feeders as the job says", also=running.why)
    live = running.cluster.get("deployment", "idle-feeders", running.namespace)
    assert live is not None
    assert live["metadata"]["annotations"]["example.com/theirs"] == "kept"
    running.await_phase("Running", timeout_s=180)


def test_new_image_rolls_feeders_and_an_immutable_field_is_refused(running: Job):
    before = running.uids(TRAINER)
    old = running.uids(FEEDERS)
    running.cluster.patch(
        "dlj", "idle", running.namespace, {"spec": {"feeders": {"image": "fashion-mnist:1"}}}
    )  # fmt: skip

    def rolled() -> bool:
        pods = running.pods(FEEDERS)
        return len(pods) == 1 and pods[0]["spec"]["containers"][0]["image"] == "fashion-mnist:1"

    until(rolled, timeout_s=90, what="feeders of the other image", also=running.why)
    assert not set(old) & set(running.uids(FEEDERS))
    assert running.uids(TRAINER) == before, "trainers go on"
    with pytest.raises(CommandFailed, match="trainer"):
        running.cluster.patch(
            "dlj", "idle", running.namespace, {"spec": {"trainers": {"job": {"replicas": 2}}}}
        )


@pytest.mark.slow
@pytest.mark.alone
def test_operator_can_be_upgraded_and_reinstalled_under_another_name(running: Job):
    cluster, before = running.cluster, running.uids(*ALL)
    version = ["--set", "podAnnotations.example=upgraded"]
    cluster.helm(*words(UPGRADE, "helm", "upgrade")[1:], *image_values(), *version)
    settings = settings_of(running, "feeder")
    cluster.kubectl("delete", settings, "-n", running.namespace)
    until(
        lambda: cluster.get(*settings.split("/"), running.namespace),
        timeout_s=20,
        what="a look of the new operator",
    )
    cluster.helm(*words(UPGRADE, "helm", "uninstall")[1:])
    assert running.uids(*ALL) == before
    assert running.live()["metadata"].get("deletionTimestamp") is None
    try:
        cluster.install("--take-ownership", release="other")
        cluster.kubectl("scale", "dlj", "idle", "-n", running.namespace, "--replicas=2")
        until(lambda: len(running.pods(FEEDERS)) == 2, timeout_s=60, what="a second feeder", also=running.why)
        assert set(before) <= set(running.uids(*ALL)), "the new operator replaced pods"
        until(
            lambda: running.status()["feeders"]["summary"] == "2/2",
            timeout_s=60,
            what="2/2",
            also=running.why,
        )
        assert running.condition("HeadReady")["status"] == "True", "it has the key of the job's links"
        cluster.helm("uninstall", "other", "-n", SYSTEM, "--wait")
        running.delete()
        running.await_nothing(timeout_s=90)
    finally:
        cluster.helm("uninstall", "other", "-n", SYSTEM, "--wait", "--ignore-not-found")
        cluster.install("--take-ownership")


def test_guaranteed_trainer_stays_guaranteed_under_a_quota_for_limits(
    operator: Cluster, namespace: str, start
):
    quota = {
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "limits"},
        "spec": {"hard": {f"{kind}.{what}": "50" + unit for kind in ("limits", "requests")
                          for what, unit in (("cpu", ""), ("memory", "Gi"))}},
    }  # fmt: skip
    operator.apply(namespace, quota)
    small = {"cpu": "100m", "memory": "1Gi"}
    manifest = changed(
        job("strict"),
        spec__trainers__job__template__spec__containers__0__resources={"limits": small},
        spec__feeders__resources={"requests": small, "limits": {"cpu": "1", "memory": "2Gi"}},
        spec__ray={
            "managed": {"head": {"resources": {"requests": small, "limits": {"cpu": "1", "memory": "2Gi"}}}}
        },
        spec__sidecar__resources={"limits": {"cpu": "100m"}},
    )
    strict = start(manifest)
    strict.await_phase("Running", timeout_s=120)
    (trainer,) = strict.pods(TRAINER)
    assert trainer["status"]["qosClass"] == "Guaranteed"


def ready_since(condition: Manifest, moment: datetime) -> bool:
    """Whether it was not before, and is again."""
    return condition["status"] == "True" and datetime.fromisoformat(condition["lastTransitionTime"]) >= moment


@pytest.mark.slow
@pytest.mark.alone
def test_job_recovers_when_its_head_is_killed_and_its_node_is_drained(running: Job):
    cluster, (head,) = running.cluster, running.pods(HEAD)
    node = head["spec"]["nodeName"]
    killed = datetime.now(UTC).replace(microsecond=0)
    run(["docker", "exec", node, "pkill", "-KILL", "-f", "dataloaderjob.pod.head"])

    def restarted() -> bool:
        found = [s for pod in running.pods(HEAD) for s in pod["status"]["containerStatuses"]]
        return any(s["name"] == "head" and s["restartCount"] for s in found)

    until(restarted, timeout_s=60, what="Ray's container anew", also=running.why)
    running.await_condition("Ready", lambda found: ready_since(found, killed), timeout_s=120)
    drained = datetime.now(UTC).replace(microsecond=0)
    try:
        drain(cluster, node, timeout_s=120)
        until(
            lambda: {pod["spec"].get("nodeName") for pod in running.pods(HEAD)} - {node, None},
            timeout_s=60, what="the head on another node", also=running.why,
        )  # fmt: skip
        running.await_condition("Ready", lambda found: ready_since(found, drained), timeout_s=120)
    finally:
        cluster.kubectl("uncordon", node)
