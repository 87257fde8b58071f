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
from dataloaderjob_operator.keys import NoRootKey, Roots, root_key
from dataloaderjob_operator.objects.pods import secret_of
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


ENCODED = base64.b64encode(b"n" * 32).decode()


def test_previous_root_key_is_read_from_the_same_secret(job: Operated) -> None:
    data = {"root": ENCODED, "previous": base64.b64encode(b"o" * 48).decode()}
    job.server.request("POST", job.path("Secret"), {"metadata": {"name": "root"}, "data": data})
    assert job.run(root_key(job.operator().api, job.namespace, "root")) == Roots(b"n" * 32, b"o" * 48)


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

    async def together() -> list[Roots]:
        return await asyncio.gather(*(root_key(client, job.namespace, "root") for _ in range(5)))

    roots = job.run(together())
    found = [each.current for each in roots]
    assert len(set(found)) == 1
    assert {each.previous for each in roots} == {None}
    assert len(found[0]) >= names.ROOT_NBYTES
    secret = job.get("Secret", "root")
    assert (base64.b64decode(secret["data"]["root"]), secret["immutable"]) == (found[0], True)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({}, "it has no field root"),
        ({"root": base64.b64encode(b"short").decode()}, "at least 32 bytes, but has 5"),
        ({"root": ENCODED, "previous": base64.b64encode(b"old").decode()}, "at least 32 bytes, but has 3"),
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


def ended(job: Operated, workloads: set[tuple[str, str]]) -> bool:
    """True once these are gone, with the help of a garbage collector."""
    job.collect_garbage()
    return not workloads & set(job.children())


def test_root_key_is_rotated_under_a_running_job(job: Operated, operator: Operator) -> None:
    start(operator, job)
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {operator.log}")
    name, before = job.key_secret, job.get("Secret", job.key_secret)["data"]
    pods = {key: child["spec"]["template"] for key, child in job.children().items() if key[0] == "Deployment"}
    old = job.get("Secret", "root")["data"]["root"]
    operator.end()
    job.delete("Secret", "root")
    rotated = {"metadata": {"name": "root"}, "data": {"root": ENCODED, "previous": old}}
    job.server.request("POST", job.path("Secret"), rotated)
    job.delete("Secret", name)
    start(operator, job)
    until(lambda: there(job, name), 30, f"the Secret; its log: {operator.log}")
    assert job.get("Secret", name)["data"] == before
    assert {key: job.get(*key)["spec"]["template"] for key in pods} == pods, "no pod is replaced"
    job.edit(suspend=True)
    until(lambda: ended(job, set(pods)), 30, f"the end of its pods; its log: {operator.log}")
    job.edit(suspend=False)
    until(lambda: set(pods) <= set(job.children()), 30, f"its pods; its log: {operator.log}")
    uid = job.get(KIND, job.name)["metadata"]["uid"]
    new = names.key_secret(job.name, uid, b"n" * 32)
    made = job.get("Secret", new)["data"]
    assert base64.b64decode(made[JOB_KEY]) == names.job_key(b"n" * 32, uid)
    assert {secret_of(job.get(*key)["spec"]["template"]) for key in pods} == {new}


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
