"""The children that the operator builds are objects that the API server takes, with every field known to it."""

from __future__ import annotations

from typing import Any

import pytest
from manifests import manifest

from apiserver import ApiServer, Refused
from chart import render
from dataloaderjob.api import parse_object
from dataloaderjob_operator import objects
from dataloaderjob_operator.kinds import KINDS

OWN = objects.OwnPod(namespace="ops", labels={"app": "operator"})
SETUP = objects.OperatorConfig(
    version="1.0", sidecar_image="example/sidecar:1", root_key=b"r" * 32, operator=OWN
)
TRAINER = "spec.trainers.job.template.spec"
FEEDER = "spec.feeders.template.spec"
VOLUME = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
MOUNT = {"name": "data", "mountPath": "/data"}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="minimal"),
        pytest.param({"spec.networkPolicy.mode": "Strict"}, id="strict"),
        pytest.param(
            {"spec.trainers.job.processesPerPod": 4, "spec.trainers.job.replicas": 2}, id="torchrun"
        ),
        pytest.param(
            {"spec.sidecar.resources": {"limits": {"memory": "4Gi", "cpu": 1}}}, id="sidecar-limits"
        ),
        pytest.param(
            {
                f"{FEEDER}.containers": [
                    {"name": "feeder", "volumeMounts": [MOUNT]},
                    {"name": "h", "image": "h:1"},
                ],
                f"{FEEDER}.volumes": [VOLUME],
                f"{TRAINER}.volumes": [VOLUME],
                f"{TRAINER}.containers[0].volumeMounts": [MOUNT],
                f"{TRAINER}.initContainers": [{"name": "fetch", "image": "f:1"}],
                f"{TRAINER}.tolerations": [{"operator": "Exists"}],
            },
            id="templates",
        ),
        pytest.param(
            {
                "spec.data.volumes": [VOLUME],
                "spec.data.volumeMounts": [MOUNT],
                "spec.data.env": [{"name": "ROOT", "value": "/data"}],
                "spec.data.envFrom": [{"secretRef": {"name": "bucket"}}],
                "spec.sidecar.env": [{"name": "A", "value": "1"}],
                "spec.sidecar.securityContext": {"runAsUser": 7},
            },
            id="data",
        ),
    ],
)
def test_api_server_accepts_all_children(server: ApiServer, changes: dict[str, Any]) -> None:
    job = parse_object(manifest({"metadata.uid": "u-1", "metadata.namespace": "default", **changes}))
    for child in [*objects.base(job, SETUP), *objects.feeding(job, SETUP), *objects.training(job, SETUP, 0)]:
        path = f"{KINDS[child['kind']].path('default')}/{child['metadata']['name']}"
        made = server.request(
            "PATCH", f"{path}?fieldManager=test&force=true&fieldValidation=Strict&dryRun=All", child,
            content_type="application/apply-patch+yaml",
        )  # fmt: skip
        assert made["metadata"]["ownerReferences"] == child["metadata"]["ownerReferences"]


def test_api_server_refuses_another_container_named_supervisor(server: ApiServer) -> None:
    """One that took the place of the operator's would get the job's key."""
    mine = {"spec.ray.managed.head.template.spec.containers": [{"name": "supervisor", "image": "mine:1"}]}
    job = parse_object(manifest({"metadata.uid": "u-1", "metadata.namespace": "default", **mine}))
    (head,) = [child for child in objects.feeding(job, SETUP) if child["metadata"]["name"] == "mnist-head"]
    path = f"{KINDS['Deployment'].path('default')}/mnist-head?fieldManager=test&force=true&dryRun=All"
    with pytest.raises(Refused, match="supervisor"):
        server.request("PATCH", path, head, content_type="application/apply-patch+yaml")


@pytest.mark.parametrize("options", [[], ["--set", "namespaces={a,b}"]], ids=["cluster", "namespaces"])
def test_api_server_accepts_the_charts_network_policy(server: ApiServer, options: list[str]) -> None:
    policy = render(*options, namespace="default")["NetworkPolicy", "r-operator"]
    path = KINDS["NetworkPolicy"].path("default")
    made = server.request("POST", f"{path}?fieldValidation=Strict&dryRun=All", policy)
    assert made["spec"]["policyTypes"] == ["Ingress", "Egress"]
