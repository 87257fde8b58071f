"""The root key and the Secrets of jobs, on a real API server."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from manifests import manifest
from operated import Operated
from processes_of_operator import ALL, Operator, until

from apiserver import ApiServer, Refused
from dataloaderjob.api import KIND
from dataloaderjob_operator import names
from dataloaderjob_operator.keys import NoRootKey, root_key
from dataloaderjob_operator.objects.settings import JOB_KEY


@pytest.fixture
def job(server: ApiServer) -> Operated:
    return Operated(server, manifest())


@pytest.fixture
def operator(server: ApiServer, job: Operated, tmp_path: Path) -> Iterator[Operator]:
    """One that makes its root key in the job's namespace."""
    made = Operator(server, tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.end(kill=True)


def start(operator: Operator, job: Operated) -> None:
    operator.start(
        "--root-key-secret", "root", "--namespace", job.namespace, "--own-namespace", job.namespace,
        "--own-label", "a=b",
    )  # fmt: skip


def there(job: Operated, name: str) -> dict[str, Any] | None:
    try:
        return job.get("Secret", name)
    except Refused:
        return None


def test_operators_starting_together_agree_on_one_root_key(job: Operated) -> None:
    client = job.operator().api

    async def together() -> list[bytes]:
        return await asyncio.gather(*(root_key(client, job.namespace, "root") for _ in range(5)))

    found = job.run(together())
    assert len(set(found)) == 1
    assert len(found[0]) >= names.ROOT_NBYTES
    secret = job.get("Secret", "root")
    assert (base64.b64decode(secret["data"]["root"]), secret["immutable"]) == (found[0], True)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({}, "it has no root"),
        ({"root": base64.b64encode(b"short").decode()}, "at least 32 bytes, found 5"),
    ],
)
def test_invalid_root_key_secret_is_reported_and_left_unchanged(
    job: Operated, data: dict[str, str], why: str
) -> None:
    job.server.request("POST", job.path("Secret"), {"metadata": {"name": "root"}, "data": data})
    with pytest.raises(NoRootKey, match=why):
        job.run(root_key(job.operator().api, job.namespace, "root"))
    assert job.get("Secret", "root").get("data", {}) == data


def test_job_key_survives_an_operator_restart(job: Operated, operator: Operator) -> None:
    start(operator, job)
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {operator.log}")
    key = job.get("Secret", job.key_secret)["data"]
    root = base64.b64decode(job.get("Secret", "root")["data"]["root"])
    uid = job.get(KIND, job.name)["metadata"]["uid"]
    assert base64.b64decode(key[JOB_KEY]) == names.job_key(root, uid)
    operator.end(kill=True)
    job.delete("Secret", job.key_secret)
    start(operator, job)
    until(lambda: there(job, job.key_secret), 30, f"the Secret; its log: {operator.log}")
    assert job.get("Secret", job.key_secret)["data"] == key


def test_deleted_secret_is_restored_once_a_pod_is_scheduled(job: Operated, operator: Operator) -> None:
    start(operator, job)
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {operator.log}")
    before = job.get("Secret", job.key_secret)["data"]
    job.delete("Secret", job.key_secret)
    assert there(job, job.key_secret) is None
    job.pod(names.Role.FEEDER, {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    })  # fmt: skip
    until(lambda: there(job, job.key_secret), 25, f"the Secret; its log: {operator.log}")
    assert job.get("Secret", job.key_secret)["data"] == before


def test_secret_of_an_earlier_job_of_the_same_name_is_not_reused(job: Operated) -> None:
    """The garbage collector may not have come to it yet, and it cannot be changed."""
    operator = job.operator()
    job.reconcile_with(operator)
    old = job.key_secret
    for kind, name in job.children():
        if kind != "Secret":
            job.delete(kind, name)
    job.collect_garbage()
    job.delete(KIND, "mnist")
    job.server.request("POST", job.path(KIND), manifest())
    for _ in range(3):
        job.reconcile_with(operator)
    assert job.key_secret != old
    uid = job.get(KIND, "mnist")["metadata"]["uid"]
    made = job.get("Secret", job.key_secret)
    assert base64.b64decode(made["data"][JOB_KEY]) == names.job_key(b"r" * 32, uid)
