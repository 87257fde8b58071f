"""The one renderer of injected pods: what it adds, to which container, and what it leaves alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from injecting import IMAGE, bert, container, pod, requesting

from dataloaderjob.api import parse_manifest
from dataloaderjob.api.injection import ANNOTATION, CannotInject, inject, injection, is_current, remove
from dataloaderjob.api.sidecar import SIDECAR


def trainer(made: dict[str, Any], name: str = "train") -> dict[str, Any]:
    return next(c for c in made["spec"]["containers"] if c["name"] == name)


def sidecar(made: dict[str, Any]) -> dict[str, Any]:
    first = made["spec"]["initContainers"][0]
    assert first["name"] == SIDECAR
    return dict(first)


def test_pod_gets_sidecar_volumes_mount_and_variables_and_no_more() -> None:
    before = pod()
    made = inject(before, bert())
    wanted = copy.deepcopy(before)
    wanted["metadata"]["annotations"] = {ANNOTATION: bert().digest}
    wanted["spec"]["initContainers"] = made["spec"]["initContainers"]
    wanted["spec"]["volumes"] = [
        {"name": "dataloaderjob-key", "secret": {"secretName": "bert-attach", "defaultMode": 0o444}},
        {"name": "dataloaderjob-settings", "configMap": {"name": "bert-attach"}},
        {"name": "dataloaderjob-run", "emptyDir": {"sizeLimit": "10Gi"}},
    ]
    wanted["spec"]["containers"][0] |= {
        "volumeMounts": [{"name": "dataloaderjob-run", "mountPath": "/run/dataloaderjob"}],
        "env": [
            {"name": "DATALOADERJOB_FEEDERS", "value": "8"},
            {"name": "DATALOADERJOB_PREFETCH", "value": "32"},
            {"name": "DATALOADERJOB_SOCKET", "value": "/run/dataloaderjob/s"},
        ],
    }
    assert made == wanted
    assert [c["name"] for c in made["spec"]["initContainers"]] == [SIDECAR]


def test_sidecar_is_native_limited_and_restricted() -> None:
    found = sidecar(inject(pod(), bert()))
    memory = str(4 * 512 * 1024**2 + 64 * 1024**2 + 3 * 16 * 1024**2)
    assert found["restartPolicy"] == "Always"
    assert found["image"] == IMAGE
    assert found["resources"] == {
        "requests": {"cpu": "250m", "memory": memory}, "limits": {"cpu": "2", "memory": memory},
    }  # fmt: skip
    assert found["securityContext"] == {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
        "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip


def test_sidecar_of_a_root_pod_has_a_user_of_its_own() -> None:
    assert (
        sidecar(inject(pod(securityContext={"runAsUser": 0}), bert()))["securityContext"]["runAsUser"]
        == 65532
    )
    assert (
        "runAsUser" not in sidecar(inject(pod(securityContext={"runAsUser": 7}), bert()))["securityContext"]
    )


def test_sidecar_precedes_the_users_init_containers() -> None:
    made = inject(pod(initContainers=[container("wait")]), bert())
    assert [c["name"] for c in made["spec"]["initContainers"]] == [SIDECAR, "wait"]


@pytest.mark.parametrize("limits", [{"cpu": "8", "memory": "64Gi"}, {"cpu": "8000m", "memory": "65536Mi"}])
def test_guaranteed_pod_remains_guaranteed(limits: dict[str, str]) -> None:
    user = container("train", resources={"requests": {"cpu": "8", "memory": "64Gi"}, "limits": limits})
    found = sidecar(inject(pod(user), bert()))["resources"]
    assert found["requests"] == found["limits"]
    assert found["limits"]["cpu"] == "2"


def test_burstable_pod_gets_a_burstable_sidecar() -> None:
    found = sidecar(inject(pod(container("train", **requesting(cpu="8"))), bert()))["resources"]
    assert found["requests"]["cpu"] == "250m"


MANY = (container("log"), container("train", **requesting(nvidia_com__gpu="1")))
CHOICES = {
    "the only container": ((container("a"),), None, "a"),
    "the one with a GPU of NVIDIA": (MANY, None, "train"),
    "the named one": (MANY, "log", "log"),
    "the one with a GPU of AMD": ((container("a"), container("b", **requesting(amd_com__gpu="1"))), None, "b"),
    "the one with a TPU": ((container("a", **requesting(google_com__tpu="4")), container("b")), None, "a"),
    "the one with a Gaudi": ((container("a", **requesting(habana_ai__gaudi="4")), container("b")), None, "a"),
    "the one with another vendor's device": (
        (container("a", **requesting(acme_dev__npu="4")), container("b", **requesting(cpu="4"))), None, "a",
    ),
    "the one that requests it without a limit": (
        (container("a", resources={"requests": {"aws.amazon.com/neuron": 1}}), container("b")), None, "a",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("containers", "named", "wanted"), CHOICES.values(), ids=CHOICES)
def test_container_that_trains_is_found(containers: Any, named: str | None, wanted: str) -> None:
    made = inject(pod(*containers), bert(trainers={"attach": {"container": named}}))
    with_env = [c["name"] for c in made["spec"]["containers"] if "env" in c or "volumeMounts" in c]
    assert with_env == [wanted]


REFUSED = {
    "none has a device": (pod(container("a"), container("b")), {}, "none requests an accelerator"),
    "a volume of Kubernetes is no device": (
        pod(container("a", **requesting(attachable_kubernetes_io__v="1")), container("b")), {}, "none requests",
    ),
    "two have devices": (
        pod(container("a", **requesting(a_b__c="1")), container("b", **requesting(a_b__c="1"))), {}, "a, b request",
    ),
    "the named one is missing": (
        pod(container("a")), {"trainers": {"attach": {"container": "b"}}}, "but the pod's containers are a",
    ),
    "the folder is taken": (
        pod(container("a", volumeMounts=[{"name": "v", "mountPath": "/run/dataloaderjob/"}])), {}, "mount it elsewhere",
    ),
    "the node's DNS": (pod(hostNetwork=True), {}, "set dnsPolicy to ClusterFirstWithHostNet"),
    "the node's DNS by name": (pod(dnsPolicy="Default"), {}, "set dnsPolicy to ClusterFirst"),
    "Windows": (pod(os={"name": "windows"}), {}, "use Linux nodes"),
    "the port of the metrics": (
        pod(container("a", ports=[{"containerPort": 9400}])), {}, "set spec.sidecar.metricsPort of the DataLoaderJob",
    ),
    "the port of the metrics in a sidecar": (
        pod(initContainers=[container("a", restartPolicy="Always", ports=[{"containerPort": 9400}])]), {},
        "the port 9400",
    ),
    "a volume of the user's with the sidecar's name": (
        pod(volumes=[{"name": "dataloaderjob-run", "hostPath": {"path": "/nvme"}}]), {}, "rename it in the pod",
    ),
    "an init container of the user's with the sidecar's name": (
        pod(initContainers=[container(SIDECAR)]), {}, "already has its own dataloaderjob-sidecar",
    ),
    "two, and one requests no devices": (
        pod(container("a"), container("b", **requesting(nvidia_com__gpu="0"))), {}, "none requests an accelerator",
    ),
    "resources are a list": (
        pod(container("a", resources=["cpu"])), {}, "resources of the container a must be a mapping",
    ),
    "limits are a text": (
        pod(container("a", resources={"limits": "1"})), {}, "limits of the resources of the container a",
    ),
    "a wrong amount": (
        pod(container("a", resources={"limits": {"cpu": "1K"}})), {}, "limits.cpu of the container a: found '1K'",
    ),
    "annotations are a list": (
        {**pod(), "metadata": {"annotations": ["a"]}}, {}, "annotations of the pod's metadata must be a mapping",
    ),
    "a name is a number": (pod(volumes=[{"name": 1}]), {}, "each name in volumes of spec must be a string"),
    "the sidecar is no init container": (pod(container(SIDECAR), container("a")), {}, "remove it from spec.containers"),
    "no containers": ({"spec": {}}, {}, "no spec.containers"),
    "no spec": ({}, {}, "no spec.containers"),
    "containers are a mapping": ({"spec": {"containers": {"a": 1}}}, {}, "containers of spec must be a list"),
    "variables are a mapping": (pod(container("a", env={"A": "1"})), {}, "env of the container a must be a list"),
}  # fmt: skip


@pytest.mark.parametrize(("before", "spec", "message"), REFUSED.values(), ids=REFUSED)
def test_pod_that_cannot_be_injected_is_refused(before: Any, spec: Any, message: str) -> None:
    kept = copy.deepcopy(before)
    with pytest.raises(CannotInject, match=message):
        inject(before, bert(**{"trainers": {"attach": {}}, **spec}))
    assert before == kept


def test_port_of_another_protocol_is_no_conflict() -> None:
    ports = [{"containerPort": 9400, "protocol": "UDP"}]
    assert sidecar(inject(pod(container("a", ports=ports)), bert()))


def test_host_network_with_the_clusters_dns_is_injected() -> None:
    assert sidecar(inject(pod(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet"), bert()))


def test_job_with_its_own_trainers_has_no_injection() -> None:
    job = parse_manifest(
        "apiVersion: dataloading.dev/v1alpha1\nkind: DataLoaderJob\nmetadata: {name: own}\nspec:\n  trainers:\n"
        "    job: {template: {spec: {containers: [{name: t, image: x}]}}}\n"
    )
    with pytest.raises(CannotInject, match="DataLoaderJob own creates its own trainers"):
        injection(job, image=IMAGE)


BUSY = pod(
    container(
        "train", env=[{"name": "A", "value": "1"}, {"name": "DATALOADERJOB_PREFETCH", "value": "7"}],
        volumeMounts=[{"name": "data", "mountPath": "/data"}],
    ),
    initContainers=[container("wait")], volumes=[{"name": "data", "emptyDir": {}}],
)  # fmt: skip


@pytest.mark.parametrize("before", [pod(), BUSY], ids=["plain", "with all lists"])
def test_injecting_twice_equals_injecting_once(before: dict[str, Any]) -> None:
    once = inject(before, bert())
    assert inject(once, bert()) == once
    assert is_current(once, bert())


def test_removing_an_injection_restores_the_pod() -> None:
    made = inject(BUSY, bert())
    remove(made)
    assert made == BUSY


def test_older_injection_is_renewed_and_the_users_variables_stay() -> None:
    old = inject(BUSY, bert(image="old:1", loader={"allowPickle": True}))
    assert trainer(old)["env"][1]["name"] == "DATALOADERJOB_ALLOW_PICKLE"
    new = inject(old, bert(loader={"memoryPerProcess": "1Gi"}))
    assert new == inject(BUSY, bert(loader={"memoryPerProcess": "1Gi"}))
    assert {"name": "DATALOADERJOB_PREFETCH", "value": "7"} in trainer(new)["env"]


def test_users_prefetch_wins_over_the_jobs() -> None:
    found = [v for v in trainer(inject(BUSY, bert()))["env"] if v["name"] == "DATALOADERJOB_PREFETCH"]
    assert found == [{"name": "DATALOADERJOB_PREFETCH", "value": "7"}]


def test_users_socket_gives_way_to_the_sidecars() -> None:
    user = container("train", env=[{"name": "DATALOADERJOB_SOCKET", "value": "/tmp/mine"}])
    found = [v for v in trainer(inject(pod(user), bert()))["env"] if v["name"] == "DATALOADERJOB_SOCKET"]
    assert found == [{"name": "DATALOADERJOB_SOCKET", "value": "/run/dataloaderjob/s"}]


def test_image_that_another_webhook_has_changed_is_kept() -> None:
    made = inject(pod(), bert())
    made["spec"]["initContainers"][0]["image"] = "mirror.acme.com/sidecar:9"
    made["spec"]["initContainers"][0]["env"] = [{"name": "ADDED", "value": "1"}]
    assert inject(made, bert()) == made


def stripped(made: dict[str, Any]) -> None:
    del made["spec"]["initContainers"][0]["restartPolicy"]


def doubled(made: dict[str, Any]) -> None:
    made["spec"]["initContainers"].append(made["spec"]["initContainers"][0])


def unmounted(made: dict[str, Any]) -> None:
    del made["spec"]["containers"][0]["volumeMounts"]


def without_volume(made: dict[str, Any]) -> None:
    del made["spec"]["volumes"][0]


def without_variables(made: dict[str, Any]) -> None:
    del made["spec"]["containers"][0]["env"]


def smaller(made: dict[str, Any]) -> None:
    made["spec"]["initContainers"][0]["resources"]["limits"]["memory"] = "1Mi"


def guaranteed(made: dict[str, Any]) -> None:
    made["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "1", "memory": "1Gi"}}


DAMAGE = (stripped, doubled, unmounted, without_volume, without_variables, smaller, guaranteed)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda change: change.__name__)
def test_injection_that_was_damaged_is_made_whole(damage: Any) -> None:
    made = inject(pod(), bert())
    damage(made)
    assert not is_current(made, bert())
    again = inject(made, bert())
    assert is_current(again, bert())
    assert len(again["spec"]["initContainers"]) == 1


def test_pull_secrets_are_added_once_and_only_for_the_default_image() -> None:
    wanted = bert(pull_secrets=("registry",))
    made = inject(pod(imagePullSecrets=[{"name": "mine"}]), wanted)
    assert made["spec"]["imagePullSecrets"] == [{"name": "mine"}, {"name": "registry"}]
    assert inject(made, wanted) == made
    own = bert(pull_secrets=("registry",), sidecar={"image": "mine:1"})
    assert "imagePullSecrets" not in inject(pod(), own)["spec"]


def test_manifests_sidecar_fields_are_used() -> None:
    made = inject(pod(), bert(sidecar={
        "image": "mine:1", "metricsPort": 9999, "env": [{"name": "A", "value": "1"}],
        "securityContext": {"runAsUser": 5}, "scratch": {"volume": {"hostPath": {"path": "/nvme"}}},
    }))  # fmt: skip
    found = sidecar(made)
    assert (found["image"], found["ports"][0]["containerPort"]) == ("mine:1", 9999)
    assert found["env"] == [{"name": "A", "value": "1"}]
    assert found["securityContext"]["runAsUser"] == 5
    assert made["spec"]["volumes"][-1] == {"name": "dataloaderjob-run", "hostPath": {"path": "/nvme"}}


def test_digest_never_reads_as_a_number() -> None:
    assert bert().digest.startswith("v1-")
    assert bert().digest != bert(image="other:1").digest
