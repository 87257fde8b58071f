"""Settings of pods on a real API server: nobody changes them, and they go when nothing reads them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from manifests import manifest
from operated import SETUP, Operated

from apiserver import ApiServer, Refused
from dataloaderjob_operator.objects.pods import map_of

LATER = replace(SETUP, version="2.0", sidecar_image="example/sidecar:2", cluster_domain="other.domain")
ROLES = ("head", "feeder", "trainer")


@pytest.fixture
def job(server: ApiServer) -> Operated:
    made = Operated(server, manifest())
    made.settle()
    return made


def settings(job: Operated, role: str) -> tuple[str, dict[str, str]]:
    """Name and files of a role's only settings."""
    (found,) = (
        child
        for (kind, _), child in job.children().items()
        if kind == "ConfigMap" and child["metadata"]["labels"]["dataloading.dev/role"] == role
    )
    return found["metadata"]["name"], found["data"]


@pytest.mark.parametrize("role", ["feeder", "trainer"])
def test_settings_used_by_running_pods_are_immutable(job: Operated, role: str) -> None:
    name, files = settings(job, role)
    with pytest.raises(Refused, match="immutable"):
        job.patch("ConfigMap", name, {"data": {next(iter(files)): "{}"}})


def test_edited_head_settings_are_restored(job: Operated) -> None:
    name, files = settings(job, "head")
    job.patch("ConfigMap", name, {"data": {"head.json": "{}", "feeders": "99"}})
    job.settle()
    assert settings(job, "head") == (name, files)


def test_edit_applies_from_the_next_attempt_and_removes_old_settings(job: Operated) -> None:
    name, _ = settings(job, "trainer")
    job.edit(loader={"memoryPerProcess": "3Gi"}, trainers={"job": {"failurePolicy": {"backoffSeconds": 0}}})
    job.settle()
    assert settings(job, "trainer")[0] == name
    job.ends("mnist-trainers-0", "Failed")
    job.settle()
    found, files = settings(job, "trainer")
    assert found != name
    assert json.loads(files["sidecar.json"])["shared_memory_nbytes"] == 3 << 30
    assert map_of(job.get("Job", "mnist-trainers-1")["spec"]["template"]) == found


def test_old_feeder_settings_stay_until_their_feeders_are_replaced(
    job: Operated,
) -> None:
    name, _ = settings(job, "feeder")
    job.edit(feeders={"processesPerPod": 3, "minAvailable": 0})
    for _ in range(3):
        job.reconcile()
    kept = {key for key in job.children() if key[0] == "ConfigMap"}
    assert (("ConfigMap", name) in kept, len(kept)) == (True, 4)
    job.settle()
    assert settings(job, "feeder")[0] != name


def specs(job: Operated) -> dict[tuple[str, str], object]:
    """What pods are made of and read."""
    return {key: child.get("spec") or child.get("data") for key, child in job.children().items()}


def test_operator_upgrade_and_rollback_leave_a_running_job_unchanged(
    job: Operated,
) -> None:
    before = specs(job)
    job.settle(setup=LATER)
    assert specs(job) == before
    job.settle()
    assert specs(job) == before


def test_job_made_by_an_older_operator_can_be_scaled_by_a_newer_one(job: Operated) -> None:
    before = {role: settings(job, role)[0] for role in ROLES}
    job.settle(setup=LATER)
    job.edit(feeders={"replicas": 3, "minAvailable": 0})
    job.settle(setup=LATER)
    assert {role: settings(job, role)[0] for role in ROLES} == before
    assert settings(job, "head")[1]["feeders"] == "3"
