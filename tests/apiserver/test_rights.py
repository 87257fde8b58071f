"""The rights that the chart gives are enough for the operator, and no more than it uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from manifests import manifest
from operated import Operated
from processes_of_operator import ALL, Operator, until

from apiserver import ApiServer, Refused
from chart import render

OPS = "ops-of-the-chart"


@pytest.fixture
def job(server: ApiServer) -> Operated:
    return Operated(server, manifest())


def account(server: ApiServer, job: Operated) -> str:
    """A token of the chart's service account, which may work in the job's namespace only."""
    found = render("--set", f"namespaces={{{job.namespace}}}", namespace=OPS)
    for path, body in (
        ("/api/v1/namespaces", {"metadata": {"name": OPS}}),
        (f"/api/v1/namespaces/{OPS}/serviceaccounts", found["ServiceAccount", "r-operator"]),
        (f"/apis/rbac.authorization.k8s.io/v1/namespaces/{job.namespace}/roles", found["Role", "r-operator"]),
        (
            f"/apis/rbac.authorization.k8s.io/v1/namespaces/{job.namespace}/rolebindings",
            found["RoleBinding", "r-operator"],
        ),
    ):
        server.request("POST", path, body)
    path = f"/api/v1/namespaces/{OPS}/serviceaccounts/r-operator/token"
    answer = server.request(
        "POST", path, {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {}}
    )
    return str(answer["status"]["token"])


def test_a_role_in_one_namespace_is_enough_for_a_job_there(
    server: ApiServer, job: Operated, tmp_path: Path
) -> None:
    limited = replace(server, token=account(server, job))
    for forbidden in (f"/api/v1/namespaces/{job.namespace}/secrets", "/api/v1/namespaces", "/api/v1/pods"):
        with pytest.raises(Refused, match="forbidden"):
            limited.request("GET", forbidden)
    operator = Operator(limited, tmp_path)
    operator.start("--namespace", job.namespace)
    try:
        until(lambda: len(job.children()) == ALL, 30, f"children; it said {operator.log}")
        job.edit(suspend=True)
        until(lambda: len(job.children()) < ALL or job.collect_garbage(), 20, "pods released")
        job.edit(suspend=False, feeders={"replicas": 2})
        until(
            lambda: job.collect_garbage() or len(job.children()) == ALL,
            30,
            f"children again; it said {operator.log}",
        )
        assert "forbidden" not in operator.log
    finally:
        operator.end(kill=True)
