"""Causes that only events have, on a real API server: the test writes what controllers and nodes would."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from manifests import manifest
from operated import MERGE, Operated
from processes_of_operator import ALL, TRAINING, Operator, until

from apiserver import ApiServer, Refused
from dataloaderjob.api import KIND
from dataloaderjob_operator.names import LABEL_JOB, LABEL_ROLE, Role

QUOTA = (
    'Error creating: pods "mnist-trainers-0-0-x7k2p" is forbidden: exceeded quota: team, requested: cpu=64'
)
MOUNT = 'MountVolume.SetUp failed for volume "data" : secret "data" not found'
WITHIN_S = 30.0
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
POLICY = {
    "matchConstraints": {
        "resourceRules": [
            {
                "apiGroups": ["dataloading.dev"], "apiVersions": ["*"], "operations": ["UPDATE"],
                "resources": ["dataloaderjobs/status"],
            }
        ]
    },
    "validations": [{"expression": "false", "message": "no status today"}],
}  # fmt: skip
"""With it nobody can write the status of a job."""


@pytest.fixture
def operator(server: ApiServer, tmp_path: Path) -> Iterator[Operator]:
    """Not started yet."""
    made = Operator(server, tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.end(kill=True)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def report(job: Operated, about: dict[str, Any], reason: str, message: str, kind: str = "Warning") -> None:
    """An event, as a controller or a kubelet sends it."""
    metadata = about["metadata"]
    event = {
        "metadata": {"generateName": f"{metadata['name']}."},
        "involvedObject": {
            "kind": about["kind"], "name": metadata["name"], "namespace": job.namespace, "uid": metadata["uid"],
        },
        "type": kind, "reason": reason, "message": message, "count": 1, "firstTimestamp": now(), "lastTimestamp": now(),
        "source": {"component": "test"},
    }  # fmt: skip
    job.server.request("POST", f"/api/v1/namespaces/{job.namespace}/events", event)


def stuck_pod(job: Operated, role: str) -> dict[str, Any]:
    """One that has a node, which does not start it."""
    name, labels = f"mnist-{role}-x", {LABEL_JOB: job.name, LABEL_ROLE: role}
    spec = {"containers": [{"name": role, "image": "i:1"}], "nodeName": "n"}
    path = f"/api/v1/namespaces/{job.namespace}/pods"
    metadata = {"name": name, "labels": labels, "ownerReferences": [job.owner(Role(role))]}
    made = job.server.request("POST", path, {"metadata": metadata, "spec": spec})
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now()}
    waiting = {"name": role, "image": "i:1", "imageID": "", "ready": False, "restartCount": 0}
    waiting["state"] = {"waiting": {"reason": "ContainerCreating"}}
    status = {"phase": "Pending", "conditions": [placed], "containerStatuses": [waiting]}
    job.server.request(
        "PATCH", f"{path}/{name}/status", {"status": status}, content_type="application/merge-patch+json"
    )
    return {**made, "kind": "Pod"}


def because(job: Operated, kind: str, reason: str) -> str:
    """The condition's message once it has that reason."""

    def reported() -> str | None:
        found = job.conditions().get(kind, {}) if "status" in job.get(KIND, job.name) else {}
        return found.get("message", "") if found.get("reason") == reason else None

    return str(until(reported, WITHIN_S, f"{kind} with {reason}"))


def looked_after(operator: Operator, job: Operated) -> Operated:
    """Starts the operator in the job's namespace, where it has no jobs of other tests to look after."""
    operator.start("--log-format", "json", "--namespace", job.namespace)
    return job


@contextlib.contextmanager
def statuses_refused(job: Operated) -> Iterator[None]:
    """A policy of the cluster refuses each status of a job in this namespace."""
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": job.namespace}}}
    binding = {"policyName": job.namespace, "validationActions": ["Deny"], "matchResources": here}
    made = {"validatingadmissionpolicies": POLICY, "validatingadmissionpolicybindings": binding}
    for kind, spec in made.items():
        job.server.request("POST", f"{ADMISSION}/{kind}", {"metadata": {"name": job.namespace}, "spec": spec})

    def in_force() -> bool:
        path, status = f"{job.path(KIND, job.name)}/status?dryRun=All", {"status": {"selector": "a"}}
        try:
            job.server.request("PATCH", path, status, content_type=MERGE)
        except Refused:
            return True
        return False

    try:
        until(in_force, 30, "the policy in force")
        yield
    finally:
        for kind in made:
            job.server.request("DELETE", f"{ADMISSION}/{kind}/{job.namespace}")


def up(job: Operated, *deployments: str) -> None:
    for name in deployments:
        job.patch("Deployment", name, {"status": {"replicas": 1, "readyReplicas": 1}}, "status")


def test_quota_refusing_pods_is_reported_until_pods_start(server: ApiServer, operator: Operator) -> None:
    job = looked_after(operator, Operated(server, manifest()))
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {operator.log}")
    up(job, "mnist-head", "mnist-feeders")
    report(job, {**job.get("Job", "mnist-trainers-0"), "kind": "Job"}, "FailedCreate", QUOTA)
    message = because(job, "SidecarsReady", "PodsRefused")
    assert message == (
        "Job mnist-trainers-0: a pod is forbidden: exceeded quota: team, requested: cpu=64; change "
        "this pod's resources in spec.trainers.job.template or spec.sidecar.resources"
    )
    assert because(job, "Ready", "PodsRefused") == message
    path = f"/api/v1/namespaces/{job.namespace}/events?fieldSelector=reason=NotReady"
    (event,) = until(lambda: server.request("GET", path)["items"], 5, "an event about the job")
    assert event["message"] == f"PodsRefused: {message}"
    times = {"startTime": "2026-01-01T00:00:00Z"}
    job.patch("Job", "mnist-trainers-0", {"status": {**times, "active": 1}}, "status")
    because(job, "SidecarsReady", "PodsStart")


def test_failed_volume_mount_is_reported_until_the_volume_is_mounted(
    server: ApiServer, operator: Operator
) -> None:
    job = looked_after(operator, Operated(server, manifest({"spec.feeders.minAvailable": 1})))
    until(lambda: len(job.children()) == ALL - TRAINING, 30, f"children; its log: {operator.log}")
    pod = stuck_pod(job, "feeder")
    report(job, pod, "FailedMount", MOUNT)
    assert because(job, "FeedersReady", "VolumeNotMounted") == f"pod mnist-feeder-x: {MOUNT}"
    until(lambda: now() > pod["metadata"]["creationTimestamp"], 5, "a later second")
    report(job, pod, "Pulling", "Pulling image", kind="Normal")
    because(job, "FeedersReady", "PodsStart")


def test_operator_serves_probes_and_metrics_and_logs_json_about_jobs(
    server: ApiServer, operator: Operator
) -> None:
    job = looked_after(operator, Operated(server, manifest()))
    until(lambda: operator.ask("/readyz")[0] == 200, 30, f"readiness; its log: {operator.log}")
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {operator.log}")
    assert operator.ask("/healthz") == (200, "ok\n")
    assert operator.ask("/else")[0] == 404
    until(lambda: "dataloaderjob_operator_watches 7.0" in operator.ask("/metrics")[1], 10, "all watches open")
    text = operator.ask("/metrics")[1]
    for line in (
        'dataloaderjob_operator_api_writes_total{kind="Deployment",verb="apply"}',
        'dataloaderjob_operator_jobs{phase="Starting"}',
        'dataloaderjob_operator_watch_event_age_seconds{kind="DataLoaderJob"}',
        "dataloaderjob_operator_build_info{",
        "dataloaderjob_operator_reconcile_duration_seconds_bucket{",
        "dataloaderjob_operator_process_resident_memory_bytes",
    ):
        assert line in text
    assert operator.end() == 0
    lines = [json.loads(line) for line in operator.log.splitlines()]
    (started,) = [
        line for line in lines if line["message"].startswith("Started") and line["namespace"] == job.namespace
    ]
    live = job.get(KIND, job.name)["metadata"]
    assert (started["job"], started["uid"], started["generation"]) == ("mnist", live["uid"], 1)
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert {line["logger"].partition(".")[0] for line in lines} == {"dataloaderjob_operator", "kopf"}


def test_refused_status_is_counted_and_then_named_by_healthz(server: ApiServer, operator: Operator) -> None:
    job = looked_after(operator, Operated(server, manifest()))
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {operator.log}")
    unwritten = "dataloaderjob_operator_statuses_unwritten"
    with statuses_refused(job):
        job.edit(feeders={"replicas": 3})
        until(lambda: f"{unwritten} 1.0" in operator.ask("/metrics")[1], 30, "the metric")
        assert operator.ask("/healthz") == (200, "ok\n"), "it may pass"
        until(lambda: operator.ask("/healthz")[1] != "ok\n", 30, "a remark")
        status, text = operator.ask("/healthz")
        assert status == 200, "a new process would do no better"
        assert re.fullmatch(rf"ok\ncannot write the status of {'/'.join(job.key)} for \d+ s\n", text)
    job.edit(feeders={"replicas": 4})
    until(lambda: operator.ask("/healthz") == (200, "ok\n"), 90, "no remark, now that it can be written")
    until(lambda: job.get(KIND, job.name)["status"]["feeders"]["desired"] == 4, 30, "the status")
    assert f"{unwritten} 0.0" in operator.ask("/metrics")[1]
