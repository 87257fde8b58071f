"""Injected files, as the API server takes them: each object, and each pod template as a pod, strictly."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from injecting import FILES, JOB_FILE
from other_kinds import definition

from apiserver import ApiServer, Refused
from dataloaderjob.api.pod_templates import pod_templates
from dataloaderjob.local.injecting import Request, injected_text, jobs_in

TEAM = "injected-files"
FOREIGN = {
    ("jobset.x-k8s.io", "v1alpha2", "JobSet"): "jobsets",
    ("trainer.kubeflow.org", "v1alpha1", "ClusterTrainingRuntime"): "clustertrainingruntimes",
    ("kubeflow.org", "v1", "PyTorchJob"): "pytorchjobs",
    ("ray.io", "v1", "RayJob"): "rayjobs",
    ("batch.volcano.sh", "v1alpha1", "Job"): "jobs",
}
"""Kinds of other projects: their definitions here accept any spec, and the pods are checked as pods."""
OWN = {
    "Pod": "api/v1/pods", "Job": "apis/batch/v1/jobs", "CronJob": "apis/batch/v1/cronjobs",
    "Deployment": "apis/apps/v1/deployments", "StatefulSet": "apis/apps/v1/statefulsets",
    "ConfigMap": "api/v1/configmaps", "ServiceAccount": "api/v1/serviceaccounts",
}  # fmt: skip


@pytest.fixture(scope="module")
def foreign(server: ApiServer) -> Iterator[ApiServer]:
    """The API server with the kinds of other projects, and a namespace that is restricted."""
    for (group, version, kind), plural in FOREIGN.items():
        with contextlib.suppress(Refused):  # of another file's tests on this server, with the same schema
            server.define(definition(kind, plural, group, version))
    for name in (TEAM, f"{TEAM}-restricted"):
        labels = {"pod-security.kubernetes.io/enforce": "restricted"} if name != TEAM else {}
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
    yield server
    for (group, _, _), plural in FOREIGN.items():
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        server.request("DELETE", f"{path}/{plural}.{group}")


def injected(text: str, path: Path) -> str:
    job = "bert" if path.name == "training-runtime.yaml" else None
    request = Request(source=path.name, manifest=JOB_FILE.name, job=job)
    return injected_text(text, request, jobs_in(JOB_FILE.read_text(), JOB_FILE.name)).text


def dry_run(server: ApiServer, thing: dict[str, Any], namespace: str = TEAM) -> dict[str, Any]:
    """Creates an object for a moment. An unknown field is an error."""
    group, _, version = thing["apiVersion"].rpartition("/")
    if (plural := FOREIGN.get((group, version, thing["kind"]))) is not None:
        root = f"apis/{group}/{version}"
    else:
        root, _, plural = OWN[thing["kind"]].rpartition("/")
    made = {**thing, "metadata": {**thing["metadata"], "namespace": namespace}}
    path = f"/{root}/namespaces/{namespace}/{plural}?dryRun=All&fieldValidation=Strict"
    return server.request("POST", path, made)


def objects(text: str) -> Iterator[dict[str, Any]]:
    for document in filter(None, yaml.safe_load_all(text)):
        yield from document["items"] if document["kind"] == "List" else [document]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_api_server_accepts_each_injected_file_once_and_twice(path: Path, foreign: ApiServer) -> None:
    once = injected(path.read_text(), path)
    twice = injected(once, path)
    for one, other in zip(objects(once), objects(twice), strict=True):
        first, second = (without_times(dry_run(foreign, copy.deepcopy(thing))) for thing in (one, other))
        assert first == second


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_api_server_accepts_each_injected_template_as_a_pod(path: Path, foreign: ApiServer) -> None:
    found = [
        template.template
        for thing in objects(injected(path.read_text(), path))
        for template in pod_templates(thing).templates
    ]
    assert found
    for template in found:
        spec = {"restartPolicy": "Never", **template["spec"]}
        known = {volume["name"] for volume in spec.get("volumes", ())}
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            for mount in container.get("volumeMounts", ()):  # of a StatefulSet's own claims
                if mount["name"] not in known:
                    known.add(mount["name"])
                    spec["volumes"] = [*spec.get("volumes", ()), {"name": mount["name"], "emptyDir": {}}]
        metadata = {**template.get("metadata", {}), "name": "p"}
        made = dry_run(foreign, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        expected = "Guaranteed" if path.name == "guaranteed.yaml" else "Burstable"
        if made["spec"].get("initContainers"):
            assert made["status"]["qosClass"] == expected


def test_restricted_namespace_takes_the_injected_pod_and_not_a_looser_one(foreign: ApiServer) -> None:
    path = next(path for path in FILES if path.name == "restricted.yaml")
    (thing,) = objects(injected(path.read_text(), path))
    assert dry_run(foreign, thing, f"{TEAM}-restricted")
    thing["spec"]["initContainers"][0]["securityContext"].pop("capabilities")
    with pytest.raises(Refused, match='violates PodSecurity "restricted'):
        dry_run(foreign, thing, f"{TEAM}-restricted")


def without_times(thing: dict[str, Any]) -> dict[str, Any]:
    """The object without what is new in each creation; a Job's labels have its uid."""
    text = json.dumps(thing).replace(str(thing["metadata"]["uid"]), "UID")
    made: dict[str, Any] = json.loads(text)
    for name in ("creationTimestamp", "managedFields"):
        made["metadata"].pop(name, None)
    return made
