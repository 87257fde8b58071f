"""Disruptions, queues and lost nodes on a real API server, where the objects are what Kubernetes makes of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from manifests import manifest
from operated import MERGE, Operated

from apiserver import ApiServer
from dataloaderjob.api import KIND
from dataloaderjob_operator import names

AT = "2026-01-01T00:00:00Z"
FIRST, SECOND = "mnist-trainers-0", "mnist-trainers-1"


@pytest.fixture
def job(server: ApiServer) -> Operated:
    made = Operated(server, manifest({"spec.trainers.job.failurePolicy": {"maxRestarts": 0}}))
    made.settle()
    return made


def trainer_pod(job: Operated, status: dict[str, Any], finalizers: tuple[str, ...] = ()) -> str:
    """A pod of the first attempt on a node, with this status."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": FIRST, "controller": True}
    owner["uid"] = job.get("Job", FIRST)["metadata"]["uid"]
    labels = {**names.labels(job.name, names.Role.TRAINER), names.LABEL_ATTEMPT: "0"}
    metadata = {"name": f"{FIRST}-0-abcde", "labels": labels, "ownerReferences": [owner]}
    spec = {"containers": [{"name": "trainer", "image": "i"}], "restartPolicy": "Never", "nodeName": "n-7"}
    folder = job.path("Pod")
    made = {"metadata": {**metadata, "finalizers": list(finalizers)}, "spec": spec}
    job.server.request("POST", folder, made)
    path = f"{folder}/{metadata['name']}"
    job.server.request("PATCH", f"{path}/status", {"status": status}, content_type=MERGE)
    return path


def conditions(**states: str) -> list[dict[str, Any]]:
    return [{"type": kind, "status": state, "lastTransitionTime": AT} for kind, state in states.items()]


def phase(job: Operated) -> str:
    return str(job.get(KIND, job.name)["status"]["phase"])


def test_drained_trainers_are_replaced_without_counting_a_failure(job: Operated) -> None:
    target = {
        **conditions(DisruptionTarget="True")[0],
        "reason": "EvictionByEvictionAPI",
        "message": "drained",
    }
    trainer_pod(job, {"phase": "Failed", "conditions": [target]})
    job.ends(FIRST, "Failed")
    job.settle()
    found = job.get(KIND, job.name)["status"]["trainers"]
    assert (found["restarts"], found["failures"], found["disruptions"]) == (1, 0, 1)
    assert ("Job", SECOND) in job.children()


def test_job_suspended_by_another_controller_queues_until_admitted(job: Operated) -> None:
    job.patch("Job", FIRST, {"spec": {"suspend": True}}, manager="kueue")
    job.settle()
    assert phase(job) == "Queued"
    assert job.conditions()["TrainersReady"]["reason"] == "JobSuspended"
    assert job.get("Job", FIRST)["spec"]["suspend"], "the operator leaves that to who has done it"
    job.patch("Job", FIRST, {"spec": {"suspend": False}}, manager="kueue")
    job.settle()
    assert phase(job) == "Starting"
    assert job.get(KIND, job.name)["status"]["scheduledTime"]


def test_pod_stuck_in_deletion_delays_the_next_attempt_by_90_seconds(job: Operated) -> None:
    silent = conditions(Ready="False", ContainersReady="True", DisruptionTarget="True")
    path = trainer_pod(job, {"phase": "Running", "conditions": silent}, ("example.com/never",))
    job.server.request("DELETE", path)
    job.ends(FIRST, "Failed")
    operator, now = job.operator(), datetime.now(UTC)
    for _ in range(3):
        job.reconcile_with(operator)
    assert job.get("Job", FIRST)["metadata"]["deletionTimestamp"], "it waits for its pod"
    assert ("Job", SECOND) not in job.children()
    operator.now = lambda: now + timedelta(seconds=90)
    for _ in range(3):
        job.reconcile_with(operator)
    assert {("Job", FIRST), ("Job", SECOND)} <= set(job.children())
