"""The chart's admission policy gives the same pods as the renderer, in an API server with the feature gate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from injecting import FOLDER, container, pod, requesting
from injector import IMAGE, Installed
from processes_of_operator import until

from apiserver import ApiServer, api_server
from dataloaderjob.api import API_VERSION, PLURAL
from dataloaderjob.api.injection import for_policy, inject, injection
from dataloaderjob.api.load import parse_object

GATE = (
    "--feature-gates=MutatingAdmissionPolicy=true",
    "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
)
CRD = Path(__file__).resolve().parents[2] / "crds" / "dataloaderjobs.yaml"


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("gated"), *GATE) as running:
        running.define(yaml.safe_load(CRD.read_text()))
        yield running


@pytest.fixture(scope="module")
def installed(gated: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    values = (
        "--set",
        "injection.mode=policy",
        "--api-versions",
        "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy",
    )
    made = Installed(gated, tmp_path_factory.mktemp("policy"), *values)
    job(made, "bert")
    until(lambda: injected(made), 30, "the policy is in force")
    bare = {**pod(), "metadata": {"labels": {"dataloading.dev/inject": "nobody"}}}
    until(lambda: not made.accepts(bare), 30, "the guard is in force")
    return made


def job(made: Installed, name: str, **spec: Any) -> dict[str, Any]:
    """Creates a job with the status that the operator writes."""
    live = made.job(name, **spec)
    parts = for_policy(injection(parse_object(live), image=IMAGE, pull_secrets=("registry",)))
    live["status"] = {"injection": parts}
    path = f"/apis/{API_VERSION}/namespaces/{made.namespace}/{PLURAL}/{name}/status"
    return made.server.request("PUT", path, live)


def injected(made: Installed) -> bool:
    return made.accepts(pod()) and "initContainers" in made.create(pod())["spec"]


PODS = {
    "plain": pod(),
    "with a GPU and a helper": pod(container("log"), container("train", **requesting(nvidia_com__gpu="1"))),
    "a device without a limit": pod(
        container("a", **requesting(cpu="1")), container("b", **requesting(aws_amazon_com__neuron="1")),
    ),
    "guaranteed": pod(container("train", **requesting(cpu="1", memory="1Gi"))),
    "guaranteed in other units": pod(
        container("train", resources={
            "requests": {"cpu": "1000m", "memory": "1024Mi"}, "limits": {"cpu": "1", "memory": "1Gi"},
        })
    ),
    "burstable with an init container": pod(
        container("train", **requesting(cpu="1", memory="1Gi")), initContainers=[container("wait")],
    ),
    "root": pod(securityContext={"runAsUser": 0}),
    "with lists of its own": pod(
        container(
            "train", volumeMounts=[{"name": "d", "mountPath": "/d"}],
            env=[
                {"name": "A", "value": "1"}, {"name": "DATALOADERJOB_PREFETCH", "value": "7"},
                {"name": "DATALOADERJOB_SOCKET", "value": "/mine"},
                {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            ],
        ),
        volumes=[{"name": "d", "emptyDir": {}}], initContainers=[container("wait")],
        imagePullSecrets=[{"name": "mine"}],
    ),
    "with the pull secret": pod(imagePullSecrets=[{"name": "registry"}]),
    "with annotations": {
        **pod(), "metadata": {"labels": {"dataloading.dev/inject": "bert"}, "annotations": {"a/b": "c"}},
    },
    "on the node's network": pod(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet"),
    "as a file of a user": yaml.safe_load((FOLDER / "restricted.yaml").read_text()),
}  # fmt: skip


@pytest.mark.parametrize("thing", PODS.values(), ids=PODS)
def test_policy_and_file_give_the_same_pod(thing: dict[str, Any], installed: Installed) -> None:
    live = installed.server.request(
        "GET", f"/apis/{API_VERSION}/namespaces/{installed.namespace}/{PLURAL}/bert"
    )
    live.pop("status")
    wanted = injection(parse_object(live), image=IMAGE, pull_secrets=("registry",))
    by_policy, by_file = installed.create(thing), installed.create(inject(thing, wanted))
    for made in (by_policy, by_file):
        for name in ("name", "uid", "creationTimestamp", "managedFields"):
            made["metadata"].pop(name)
    assert by_policy == by_file


def test_named_container_is_the_policys_too(installed: Installed) -> None:
    job(
        installed,
        "named",
        trainers={"attach": {"container": "b"}},
        sidecar={"securityContext": {"runAsUser": 7}},
    )
    thing = pod(container("a"), container("b"), securityContext={"runAsUser": 0})
    thing["metadata"] = {"labels": {"dataloading.dev/inject": "named"}}
    until(lambda: installed.accepts(thing), 30, "the API server has seen the job")
    made = installed.create(thing)["spec"]
    assert [len(c.get("env", [])) for c in made["containers"]] == [0, 3]
    assert made["initContainers"][0]["securityContext"]["runAsUser"] == 7


REFUSED = {
    "ambiguous": pod(container("a"), container("b")),
    "the node's DNS": pod(hostNetwork=True),
    "another job": {**pod(), "metadata": {"labels": {"dataloading.dev/inject": "nobody"}}},
}


@pytest.mark.parametrize("thing", REFUSED.values(), ids=REFUSED)
def test_pod_that_the_policy_leaves_out_is_refused_by_the_guard(
    thing: dict[str, Any], installed: Installed
) -> None:
    assert "and the pod has 0 sidecars" in installed.refusal(thing)


def test_job_without_a_status_is_waited_for(installed: Installed) -> None:
    installed.job("early")
    thing = {**pod(), "metadata": {"labels": {"dataloading.dev/inject": "early"}}}
    assert "asks for the sidecar of DataLoaderJob early" in installed.refusal(thing)


def test_pod_that_is_injected_already_is_left_alone(installed: Installed) -> None:
    made = installed.create(inject(pod(), injection(parse_object(installed.server.request(
        "GET", f"/apis/{API_VERSION}/namespaces/{installed.namespace}/{PLURAL}/bert"
    )), image="mirror:1")))  # fmt: skip
    assert [c["image"] for c in made["spec"]["initContainers"]] == ["mirror:1"]
