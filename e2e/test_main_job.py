"""The main job on a cluster, its manifest as it is printed."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from cluster import Cluster, until
from connections import Recorder
from jobs import FEEDERS, HEAD, TRAINER, Job
from networks import Snapshot
from readme import FIRST_JOB, words

from dataloaderjob.api.ray import RayTuning

pytestmark = pytest.mark.timeout(1200)
GCS, SUPERVISOR, MASTER = 6379, 6400, 29500


def test_documented_manifest_completes_with_the_digest_of_a_local_run(
    local_digest: str, operator: Cluster, namespace: str, tmp_path: Path
):
    nodes = [node["metadata"]["name"] for node in operator.list("nodes", namespace)]
    with Recorder(nodes, tmp_path) as recorder:
        snapshot = runs_to_complete(operator, namespace, local_digest)
    recording = recorder.recording()
    assert snapshot.shut(recording) == []
    needed = {
        ("feeder", "head", GCS), ("trainer", "head", SUPERVISOR), ("feeder", "head", SUPERVISOR),
        ("operator", "head", SUPERVISOR), ("trainer", "trainer", MASTER), ("trainer", "kube-dns", 53),
    }  # fmt: skip
    assert needed <= snapshot.ways(recording), "what was recorded is not what the job does"


def runs_to_complete(operator: Cluster, namespace: str, local_digest: str) -> Snapshot:
    operator.kubectl(*words(FIRST_JOB, "kubectl", "apply")[1:], "-n", namespace)
    job = Job(operator, namespace, "fashion-mnist")
    until(job.phase, timeout_s=10, every_s=0.1, what="a first phase")
    live = job.live()
    first = datetime.fromisoformat(live["status"]["startTime"])
    assert first - datetime.fromisoformat(live["metadata"]["creationTimestamp"]) <= timedelta(seconds=2)
    assert live["status"]["observedGeneration"] == live["metadata"]["generation"]
    watching = operator.background(*words(FIRST_JOB, "kubectl", "get"), "-n", namespace)
    operator.kubectl(
        "wait", "--for=condition=Ready", "dlj/fashion-mnist", "-n", namespace, "--timeout=120s", timeout_s=130
    )
    pods_are_closed(job)
    snapshot = Snapshot.take(operator)
    until(
        lambda: float(job.status()["loader"]["gbPerSecond"] or 0) > 0,
        timeout_s=90,
        what="metrics",
        also=job.why,
    )
    header, line = operator.kubectl("get", "dlj", "-n", namespace).splitlines()
    assert header.split() == [
        "NAME",
        "PHASE",
        "FEEDERS",
        "TRAINERS",
        "GB/S",
        "STALL%",
        "INPUT",
        "AGE",
        "REASON",
    ]
    assert line.split()[:4] == ["fashion-mnist", "Running", "2/2", "2/2"]
    in_force = job.status()["ray"]
    assert in_force["version"], in_force
    assert in_force["workerRegisterTimeoutSeconds"] == RayTuning().worker_register_timeout_seconds
    job.await_phase("Complete", timeout_s=600)
    time.sleep(1)  # for the watch to print it
    watching.terminate()
    seen = [
        line.split()[1]
        for line in watching.communicate(timeout=10)[0].splitlines()
        if "fashion-mnist" in line
    ]
    assert [phase for phase in ("Starting", "Running", "Complete") if phase in seen] == [
        "Starting",
        "Running",
        "Complete",
    ]
    assert job.digest() == local_digest
    until(
        lambda: not job.pods(HEAD) and not job.pods(FEEDERS),
        timeout_s=10,
        what="head and feeders leave at once",
    )
    for pod in job.pods(TRAINER):
        (sidecar,) = pod["status"]["initContainerStatuses"]
        assert sidecar["state"]["terminated"]["exitCode"] == 0
        ended = [c["state"]["terminated"]["exitCode"] for c in pod["status"]["containerStatuses"]]
        assert (pod["status"]["phase"], ended) == ("Succeeded", [0])
    job.delete()
    job.await_nothing()
    return snapshot


OURS = {"head", "supervisor", "feeder"}


def pods_are_closed(job: Job) -> None:
    """No token of the cluster, no root file system to write to, nothing run as root."""
    for pod in (*job.pods(HEAD), *job.pods(FEEDERS), *job.pods(TRAINER)):
        assert pod["spec"]["automountServiceAccountToken"] is False
        volumes = [volume for volume in pod["spec"]["volumes"] if "projected" in volume]
        assert not volumes, f"{pod['metadata']['name']} has a token: {volumes}"
        ours = pod["spec"].get("initContainers", []) if "trainer" in pod["metadata"]["name"] else []
        for container in (*ours, *(c for c in pod["spec"]["containers"] if c["name"] in OURS)):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, container["name"]
