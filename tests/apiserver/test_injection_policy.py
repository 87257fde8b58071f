"""The chart's admission policy gives the same pods as the renderer, in an API server with the feature gate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from injecting import FOLDER, bert, container, pod, requesting
from injector import GATE, IMAGE, POLICY, Installed
from processes_of_operator import until
from second_webhook import second_webhook, without

from apiserver import ApiServer, api_server
from dataloaderjob.api import API_VERSION, PLURAL
from dataloaderjob.api.injection import CannotInject, inject, injection
from dataloaderjob.api.load import parse_object

CRD = Path(__file__).resolve().parents[2] / "crds" / "dataloaderjobs.yaml"


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("gated"), *GATE) as running:
        running.define(yaml.safe_load(CRD.read_text()))
        yield running


@pytest.fixture(scope="module")
def installed(gated: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    made = Installed(gated, tmp_path_factory.mktemp("policy"), *POLICY)
    job(made, "bert")
    until(made.injects, 30, "the policy is in force")
    bare = {**pod(), "metadata": {"labels": {"dataloading.dev/inject": "nobody"}}}
    until(lambda: not made.accepts(bare), 30, "the guard is in force")
    return made


def job(made: Installed, name: str, **spec: Any) -> dict[str, Any]:
    """Creates a job with the status that the operator writes."""
    return made.publish(made.job(name, **spec), pull_secrets=("registry",))


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
    "with a GPU beside none": pod(
        container("a", **requesting(nvidia_com__gpu="0")), container("b", **requesting(nvidia_com__gpu="1")),
    ),
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


def test_pods_of_a_job_with_tls_pass_the_guard(installed: Installed) -> None:
    job(installed, "sealed", loader={"tls": True})
    thing = {**pod(), "metadata": {"labels": {"dataloading.dev/inject": "sealed"}}}
    until(lambda: installed.accepts(thing), 30, "the API server has seen the job")
    (key,) = [v for v in installed.create(thing)["spec"]["volumes"] if v["name"] == "dataloaderjob-key"]
    assert key["projected"]["sources"][0]["secret"]["name"] == "sealed-attach"
    foreign = inject(thing, bert())
    assert "the sidecar is not that of DataLoaderJob sealed" in installed.refusal(foreign)


DEVICES = requesting(nvidia_com__gpu="1")
REFUSED = {
    "ambiguous": pod(container("a"), container("b")),
    "two with a GPU": pod(container("a", **DEVICES), container("b", **DEVICES)),
    "the node's DNS": pod(hostNetwork=True),
    "the sidecar's folder": pod(
        container("a", volumeMounts=[{"name": "d", "mountPath": "/run/dataloaderjob/"}]),
        volumes=[{"name": "d", "emptyDir": {}}],
    ),
    "the sidecar's name": pod(container("dataloaderjob-sidecar")),
    "the sidecar's volume": pod(volumes=[{"name": "dataloaderjob-run", "emptyDir": {}}]),
    "the node's DNS by name": pod(dnsPolicy="Default"),
    "the sidecar's port": pod(container("a", ports=[{"containerPort": 9400}])),
    "the sidecar's port in a sidecar": pod(
        initContainers=[container("a", restartPolicy="Always", ports=[{"containerPort": 9400}])]
    ),
    "Windows": pod(os={"name": "windows"}),
    "two, and no GPU": pod(container("a", **requesting(nvidia_com__gpu="0")), container("b")),
}  # fmt: skip


@pytest.mark.parametrize("thing", REFUSED.values(), ids=REFUSED)
def test_pod_that_the_policy_cannot_inject_is_refused_as_a_file_is(
    thing: dict[str, Any], installed: Installed
) -> None:
    with pytest.raises(CannotInject) as found:
        inject(thing, bert())
    wanted = f"cannot add the sidecar of DataLoaderJob {installed.namespace}/bert: {found.value}"
    assert installed.refusal(thing).endswith(f"denied request: {wanted}")


def test_container_that_the_pod_lacks_is_named_by_the_refusal(installed: Installed) -> None:
    job(installed, "missing", trainers={"attach": {"container": "c"}})
    thing = labeled("missing", container("a"), container("b"))
    wanted = "spec.trainers.attach.container is c, but the pod's containers are a, b: name one of them"
    until(lambda: wanted in installed.refusal(thing), 30, "the API server has seen the job")


def test_job_that_does_not_exist_is_named_with_the_remedy(installed: Installed) -> None:
    wanted = (
        f"the label dataloading.dev/inject names DataLoaderJob {installed.namespace}/nobody, and this operator has no"
        " such job: create it, or remove the label"
    )
    assert wanted in installed.refusal(labeled("nobody"))


def test_job_with_trainers_of_its_own_is_named_with_the_remedy(installed: Installed) -> None:
    own = {"trainers": {"job": {"template": {"spec": {"containers": [container("t")]}}}}}
    installed.job("own", **own)
    with pytest.raises(CannotInject) as found:
        bert(**own)
    wanted = str(found.value).replace("DataLoaderJob bert", "DataLoaderJob own")
    until(lambda: wanted in installed.refusal(labeled("own")), 30, "the API server has seen the job")


def test_job_without_a_status_is_waited_for(installed: Installed) -> None:
    installed.job("early")
    wanted = "the operator has not rendered the sidecar yet: create the pod again in a few seconds"
    until(lambda: wanted in installed.refusal(labeled("early")), 30, "the API server has seen the job")


def test_job_that_is_over_is_named_with_the_remedy(installed: Installed) -> None:
    live = installed.job("over")
    live["status"] = {"phase": "Complete"}
    path = f"/apis/{API_VERSION}/namespaces/{installed.namespace}/{PLURAL}/over/status"
    installed.server.request("PUT", path, live)
    wanted = f"DataLoaderJob {installed.namespace}/over: the job is Complete: create a new job"
    until(lambda: wanted in installed.refusal(labeled("over")), 30, "the API server has seen the job")


def test_reason_in_a_template_is_taken_from_a_pod_that_is_injected(installed: Installed) -> None:
    thing = pod()
    thing["metadata"] = {
        **thing["metadata"],
        "annotations": {"dataloading.dev/not-injected": "an old reason"},
    }
    assert list(installed.create(thing)["metadata"]["annotations"]) == ["dataloading.dev/injected"]


def test_sidecar_that_another_webhook_strips_is_refused_with_the_remedy(
    installed: Installed, tmp_path: Path
) -> None:
    patch = without("restartPolicy", "startupProbe")
    with second_webhook(installed.server, "zz", installed.namespace, tmp_path, patch, "Never") as patched:
        until(lambda: (installed.accepts(pod()) or True) and patched, 30, "the other webhook is asked")
        text = "the sidecar of DataLoaderJob bert has lost its restartPolicy Always"
        assert text in installed.refusal(pod())


def labeled(name: str, *containers: dict[str, Any]) -> dict[str, Any]:
    return {**pod(*containers), "metadata": {"labels": {"dataloading.dev/inject": name}}}


def test_pod_that_is_injected_already_is_left_alone(installed: Installed) -> None:
    made = installed.create(inject(pod(), injection(parse_object(installed.server.request(
        "GET", f"/apis/{API_VERSION}/namespaces/{installed.namespace}/{PLURAL}/bert"
    )), image="mirror:1")))  # fmt: skip
    assert [c["image"] for c in made["spec"]["initContainers"]] == ["mirror:1"]
