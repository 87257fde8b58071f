"""Jobs that name a RayCluster, on a real API server with the operator's process; the test makes KubeRay's objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from manifests import manifest
from operated import MERGE, Operated
from other_kinds import definition
from processes_of_operator import ROOT, Operator, until
from supervisor_alone import SupervisorAlone

from apiserver import ApiServer
from dataloaderjob.api import KIND
from dataloaderjob.core.supervision import EXIT_RAY_REFUSED
from dataloaderjob_operator import names
from dataloaderjob_operator.names import LABEL_JOB, LABEL_ROLE, Role
from dataloaderjob_operator.objects.settings import SUPERVISOR_PORT

WAITS = "WaitsForRayCluster"
VERSIONS = "the Ray cluster of spec.ray.external runs Ray 2.44.1 on Python 3.9.1, this job has Ray 2.60.0"


@pytest.fixture
def operator(server: ApiServer, tmp_path: Path) -> Iterator[Operator]:
    """Not started yet. In the test's own namespace it has no jobs of other tests to look after."""
    made = Operator(server, tmp_path)
    yield made
    if made.process is not None:
        made.end(kill=True)


def on(server: ApiServer, operator: Operator, cluster: str = "shared") -> Operated:
    """A job on a RayCluster, and the operator of its namespace."""
    token = {"name": "shared"}
    job = Operated(server, manifest({"spec.ray.external": {"rayCluster": cluster, "tokenSecretRef": token}}))
    operator.start("--namespace", job.namespace)
    return job


def ready(job: Operated, reason: str, text: str = "") -> str:
    """The message of Ready once it has this reason and text."""

    def reported() -> str | None:
        found = job.conditions().get("Ready", {}) if "status" in job.get(KIND, job.name) else {}
        message = str(found.get("message", ""))
        return message if found.get("reason") == reason and text in message else None

    return str(until(reported, 30, f"Ready with {reason}"))


def make_service(job: Operated, name: str, port: int = 6379) -> None:
    ports = [{"name": "client", "port": 10001}, {"name": "gcs-server", "port": port}]
    body = {"metadata": {"name": name}, "spec": {"clusterIP": "None", "ports": ports}}
    job.server.request("POST", f"/api/v1/namespaces/{job.namespace}/services", body)


def status_of_ray(job: Operated) -> dict[str, Any]:
    return dict(job.get(KIND, job.name)["status"].get("ray") or {})


def test_job_waits_for_a_ray_cluster_and_starts_with_its_service(
    server: ApiServer, operator: Operator
) -> None:
    job = on(server, operator)
    assert ready(job, WAITS, "neither RayCluster") == (
        "neither RayCluster shared nor its head's Service shared-head-svc exists in the job's namespace: create the "
        "RayCluster, or correct spec.ray.external.rayCluster"
    )
    assert job.get(KIND, job.name)["status"]["phase"] == "Queued"
    assert not any(kind == "Deployment" for kind, _ in job.named())
    path = f"/api/v1/namespaces/{job.namespace}/events?fieldSelector=reason=NotReady"
    (event,) = until(lambda: server.request("GET", path)["items"], 5, "an event about the job")
    assert event["message"].startswith(f"{WAITS}: neither RayCluster shared")
    make_service(job, "shared-head-svc")
    until(lambda: ("Deployment", "mnist-head") in job.named(), 30, f"the supervisor's pod; {operator.log}")
    assert ("Deployment", "mnist-feeders") not in job.named()
    found = status_of_ray(job)
    assert (found["address"], found["rayCluster"]) == (f"shared-head-svc.{job.namespace}.svc:6379", "shared")


def test_address_is_the_one_in_the_status_of_the_ray_cluster(server: ApiServer, operator: Operator) -> None:
    server.define(definition("RayCluster", "rayclusters", "ray.io", "v1"))
    job = on(server, operator)
    clusters = f"/apis/ray.io/v1/namespaces/{job.namespace}/rayclusters"
    made = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "shared"}, "spec": {}}
    server.request("POST", clusters, made)
    assert "RayCluster shared exists" in ready(job, WAITS, "exists, but its head's Service shared-head-svc")
    status = {"status": {"head": {"serviceName": "own-name", "serviceIP": "10.96.0.9"}}}
    server.request("PATCH", f"{clusters}/shared/status", status, content_type=MERGE)
    make_service(job, "own-name", 6380)
    until(lambda: ("Deployment", "mnist-head") in job.named(), 30, f"the supervisor's pod; {operator.log}")
    assert status_of_ray(job)["address"] == f"own-name.{job.namespace}.svc:6380"


def test_pod_of_the_supervisor_stays_until_it_has_ended_the_actors(
    server: ApiServer, operator: Operator, tmp_path: Path
) -> None:
    job = on(server, operator)
    make_service(job, "shared-head-svc")
    until(lambda: ("Deployment", "mnist-head") in job.named(), 30, f"the supervisor's pod; {operator.log}")
    uid, address = job.get(KIND, job.name)["metadata"]["uid"], "127.0.0.47"
    supervisor = SupervisorAlone(
        tmp_path / "s", job=names.unique(*job.key, uid), key=names.job_key(ROOT, uid), host=address,
        port=SUPERVISOR_PORT,
    )  # fmt: skip
    supervisor.has_ray()
    supervisor.ready(0)
    job.patch("Deployment", "mnist-head", {"status": {"replicas": 1, "readyReplicas": 1}}, "status")
    job.ready_head(address)

    def is_leaving() -> bool:
        """No garbage collector completes the deletion here."""
        return "deletionTimestamp" in job.get("Deployment", "mnist-head")["metadata"]

    until(lambda: job.get(KIND, job.name)["status"]["feeders"]["ready"] == 1, 30, f"feeders; {operator.log}")
    job.ends("mnist-trainers-0", "Complete")
    until(lambda: job.get(KIND, job.name)["status"]["phase"] == "Complete", 30, "the end")
    until(lambda: supervisor.is_to_end, 10, f"the request; {operator.log}")
    assert not is_leaving()
    supervisor.ends_feeders()
    until(is_leaving, 10, f"the pod's end; {operator.log}")


def test_cluster_of_other_versions_fails_the_job_by_name(server: ApiServer, operator: Operator) -> None:
    job = on(server, operator)
    make_service(job, "shared-head-svc")
    until(lambda: ("Deployment", "mnist-head") in job.named(), 30, f"the supervisor's pod; {operator.log}")
    path = f"/api/v1/namespaces/{job.namespace}/pods"
    labels = {LABEL_JOB: job.name, LABEL_ROLE: Role.HEAD.value}
    metadata = {"name": "mnist-head-x", "labels": labels, "ownerReferences": [job.owner(Role.HEAD)]}
    containers = [{"name": "head", "image": "i:1"}]
    server.request("POST", path, {"metadata": metadata, "spec": {"containers": containers, "nodeName": "n"}})
    ended = {"terminated": {"exitCode": EXIT_RAY_REFUSED, "reason": "Error", "message": VERSIONS}}
    container = {
        "name": "head",
        "image": "i:1",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": ended,
    }
    status = {"status": {"phase": "Running", "containerStatuses": [container]}}
    server.request("PATCH", f"{path}/mnist-head-x/status", status, content_type=MERGE)
    until(lambda: job.conditions().get("Failed", {}).get("status") == "True", 30, operator.log)
    failed = job.conditions()["Failed"]
    assert (failed["reason"], failed["message"]) == ("RayVersionMismatch", VERSIONS)
    events = f"/api/v1/namespaces/{job.namespace}/events?fieldSelector=reason=Failed"
    (event,) = until(lambda: server.request("GET", events)["items"], 5, "an event about the job")
    assert VERSIONS in event["message"]
