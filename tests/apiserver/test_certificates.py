"""The Secrets with certificates of jobs with spec.loader.tls, on a real API server."""

from __future__ import annotations

import base64
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kubelet import write_volume
from manifests import ATTACHED, manifest
from operated import Operated
from processes_of_operator import BRISK, Operator, until

from apiserver import ApiServer, Refused
from dataloaderjob.api import KIND
from dataloaderjob.api.sidecar import KEY_VOLUME
from dataloaderjob.core.credentials import Credentials
from dataloaderjob_operator import names

PERIOD = timedelta(minutes=5)
TLS = {"spec.loader.tls": True}


@pytest.fixture
def job(server: ApiServer) -> Operated:
    return Operated(server, manifest(TLS))


def secret_name(job: Operated, generation: int) -> str:
    uid = job.get(KIND, job.name)["metadata"]["uid"]
    return names.certificate_secret(job.name, uid, b"r" * 32, generation)


def certificates(job: Operated) -> dict[str, dict[str, Any]]:
    found = job.server.request("GET", job.path("Secret"))["items"]
    return {item["metadata"]["name"]: item for item in found if "-tls-" in item["metadata"]["name"]}


def test_certificates_are_created_before_pods_and_belong_to_the_job(job: Operated, tmp_path: Path) -> None:
    job.settle()
    name, uid = secret_name(job, 0), job.get(KIND, job.name)["metadata"]["uid"]
    (secret,) = certificates(job).values()
    assert (secret["metadata"]["name"], secret["immutable"]) == (name, True)
    assert [owner["uid"] for owner in secret["metadata"]["ownerReferences"]] == [uid]
    pod = job.get("Deployment", f"{job.name}-feeders")["spec"]["template"]["spec"]
    volume = next(found for found in pod["volumes"] if found["name"] == KEY_VOLUME)
    write_volume(volume, {name: secret, job.key_secret: job.get("Secret", job.key_secret)}, tmp_path)
    assert Credentials(tmp_path / "tls").generation == 0


def test_next_certificates_are_created_when_due_and_nothing_else_changes(job: Operated) -> None:
    operator = job.operator()
    operator.setup = replace(operator.setup, tls_period=PERIOD)
    job.reconcile_with(operator)
    before, wait_s = job.children(), job.reconcile_with(operator)
    assert wait_s is not None
    assert wait_s <= PERIOD.total_seconds()
    operator.now = lambda: datetime.now(UTC) + PERIOD + timedelta(minutes=1)
    job.reconcile_with(operator)
    assert set(certificates(job)) == {secret_name(job, 0), secret_name(job, 1)}
    after = job.children()
    for kind, name in before:
        if kind in ("Secret", "Deployment", "Job"):
            version = [found[kind, name]["metadata"]["resourceVersion"] for found in (before, after)]
            assert version[0] == version[1], (kind, name)


def test_deleted_certificates_are_restored_with_the_same_bytes(job: Operated) -> None:
    job.settle()
    name = secret_name(job, 0)
    before = certificates(job)[name]["data"]
    job.delete("Secret", name)
    job.settle()
    assert certificates(job)[name]["data"] == before


def test_setting_cannot_change_under_a_job(job: Operated) -> None:
    with pytest.raises(Refused, match="a new job, because all of a job's pods start with the same setting"):
        job.edit(loader={"tls": False})


def test_sidecars_of_attached_pods_have_certificates_of_their_own(server: ApiServer) -> None:
    job = Operated(server, manifest({**TLS, **ATTACHED}))
    job.settle()
    found = certificates(job)["mnist-attach-tls-0"]
    assert set(found["data"]) == {"ca.crt", "sidecar.crt", "sidecar.key"}
    assert b"BEGIN CERTIFICATE" in base64.b64decode(found["data"]["sidecar.crt"])


def test_operator_renews_certificates_by_itself(server: ApiServer, job: Operated, tmp_path: Path) -> None:
    operator = Operator(server, tmp_path, waits={**BRISK, "options.LEAST_TLS_S": 1.0})
    operator.start("--namespace", job.namespace, "--tls-days", str(6 / 86_400))
    try:
        until(lambda: len(certificates(job)) == 1, 30, f"the first; its log: {operator.log}")
        version = certificates(job)[secret_name(job, 0)]["metadata"]["resourceVersion"]
        until(lambda: secret_name(job, 1) in certificates(job), 30, f"the second; its log: {operator.log}")
        until(lambda: secret_name(job, 2) in certificates(job), 30, f"the third; its log: {operator.log}")
    finally:
        operator.end()
    assert certificates(job)[secret_name(job, 0)]["metadata"]["resourceVersion"] == version
