"""What the chart's roles for people let them do, by an API server's word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from manifests import manifest
from operated import Operated

from apiserver import ApiServer, Refused
from chart import render
from dataloaderjob.api import KIND

RBAC = "/apis/rbac.authorization.k8s.io/v1"
MERGE = "application/merge-patch+json"


@pytest.fixture
def job(server: ApiServer) -> Operated:
    return Operated(server, manifest())


@pytest.fixture
def roles(server: ApiServer) -> Iterator[dict[str, str]]:
    """The names of the two, by what they are for. No controller is there that adds them to the cluster's own."""
    found = {
        name.rpartition("-")[2]: thing for (kind, name), thing in render().items() if kind == "ClusterRole"
    }
    made = {purpose: found[purpose] for purpose in ("view", "edit")}
    for role in made.values():
        server.request("POST", f"{RBAC}/clusterroles", role)
    yield {purpose: role["metadata"]["name"] for purpose, role in made.items()}
    for role in made.values():
        server.request("DELETE", f"{RBAC}/clusterroles/{role['metadata']['name']}")


def person(server: ApiServer, namespace: str, *bound: str) -> ApiServer:
    """Somebody who has these ClusterRoles in the namespace."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    server.request("POST", accounts, {"metadata": {"name": "ada"}})
    for role in bound:
        binding = {
            "metadata": {"name": role},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": "ada", "namespace": namespace}],
        }
        server.request("POST", f"{RBAC}/namespaces/{namespace}/rolebindings", binding)
    body = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {}}
    return replace(
        server, token=str(server.request("POST", f"{accounts}/ada/token", body)["status"]["token"])
    )


def test_user_without_a_role_sees_no_job(server: ApiServer, job: Operated) -> None:
    with pytest.raises(Refused, match="forbidden"):
        person(server, job.namespace).request("GET", job.path(KIND))


def test_viewer_reads_jobs_and_changes_nothing(
    server: ApiServer, job: Operated, roles: dict[str, str]
) -> None:
    viewer = person(server, job.namespace, roles["view"])
    assert [item["metadata"]["name"] for item in viewer.request("GET", job.path(KIND))["items"]] == ["mnist"]
    with pytest.raises(Refused, match="forbidden"):
        viewer.request("POST", job.path(KIND), manifest({"metadata.name": "other"}))
    with pytest.raises(Refused, match="forbidden"):
        viewer.request("DELETE", job.path(KIND, "mnist"))


def test_editor_creates_scales_and_deletes_jobs_but_writes_no_status(
    server: ApiServer, job: Operated, roles: dict[str, str]
) -> None:
    editor = person(server, job.namespace, roles["view"], roles["edit"])
    editor.request("POST", job.path(KIND), manifest({"metadata.name": "other"}))
    scale = {"spec": {"replicas": 3}}
    editor.request("PATCH", f"{job.path(KIND, 'other')}/scale", scale, content_type=MERGE)
    assert job.get(KIND, "other")["spec"]["feeders"]["replicas"] == 3
    with pytest.raises(Refused, match="forbidden"):
        editor.request("PATCH", f"{job.path(KIND, 'other')}/status", {"status": {}}, content_type=MERGE)
    editor.request("DELETE", job.path(KIND, "other"))
