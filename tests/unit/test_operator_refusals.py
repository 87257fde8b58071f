"""What the API server says of a child, in the terms of the job's own fields."""

from __future__ import annotations

import re
from typing import Any

import pytest
from observed_jobs import SETUP, job

from dataloaderjob_operator import objects
from dataloaderjob_operator.decide.refusals import explain
from dataloaderjob_operator.kinds import Manifest

TRAINER = {"name": "trainer", "image": "example/mnist:1", "command": ["python", "train.py"]}


def children(**spec: Any) -> dict[str, Manifest]:
    made = job(**spec)
    *_, head, feeders = objects.feeding(made, SETUP)
    return {"head": head, "feeders": feeders, "trainers": objects.training(made, SETUP, 0)[-1]}


def explained(child: str, message: str, **spec: Any) -> str:
    return explain(message, children(**spec)[child], job(**spec))


def trainer(**more: Any) -> dict[str, Any]:
    return {"job": {"template": {"spec": {"containers": [{**TRAINER, **more}]}}}}


def test_list_entry_is_reported_at_the_users_index():
    env = [{"name": "A", "value": "1"}, {"name": "odd", "value": "2"}]
    container = children(trainers=trainer(env=env))["trainers"]["spec"]["template"]["spec"]["containers"][0]
    place = next(i for i, variable in enumerate(container["env"]) if variable["name"] == "odd")
    assert place > 5, "the operator puts its own before it"
    message = (
        f'Job.batch "x" is invalid: spec.template.spec.containers[0].env[{place}].name: Invalid value: "odd"'
    )
    assert explained("trainers", message, trainers=trainer(env=env)) == (
        'Job.batch "x" is invalid: spec.trainers.job.template.spec.containers[0].env[1].name: Invalid value: "odd"'
    )


@pytest.mark.parametrize(
    ("child", "message", "field"),
    [
        ("trainers", ".spec.template.spec.nodeSelectr: field not declared", "trainers.job.template.spec.nodeSelectr:"),
        ("trainers", 'x .spec.template.spec.containers[name="trainer"].y: z', "job.template.spec.containers[0].y"),
        ("feeders", "spec.template.labels: Invalid value", "spec.feeders.template.metadata.labels:"),
        ("feeders", "spec.template.spec.containers[0].image: no", "trainers.job.template.spec.containers[0].image:"),
        ("feeders", "spec.template.spec.containers[0].resources.requests[cpu]: no", "spec.feeders.resources.requests"),
        ("head", "spec.template.spec.containers[0].resources.limits: Invalid", "ray.managed.head.resources.limits:"),
        ("trainers", "spec.template.spec.initContainers[0].resources.limits: no", "spec.sidecar.resources.limits:"),
        ("trainers", "spec.template.spec.initContainers[0].image: no", "spec.sidecar.image:"),
    ],
)  # fmt: skip
def test_childs_path_is_translated_to_the_jobs_field(child: str, message: str, field: str):
    found = explained(child, message)
    assert field in found
    assert not re.search(r"(?<!job\.)(?<!feeders\.)(?<!head\.)\bspec\.template", found)


DATA = {
    "volumes": [{"name": "images", "nfs": {"server": "s", "path": "p"}}],
    "volumeMounts": [{"name": "images", "mountPath": "/data"}],
    "env": [{"name": "ROOT", "value": "/data"}],
    "envFrom": [{"secretRef": {"name": "bucket"}}],
}


@pytest.mark.parametrize("child", ["trainers", "feeders"])
@pytest.mark.parametrize(
    ("field", "below"),
    [
        ("volumes", ".nfs.path"),
        ("volumeMounts", ".mountPath"),
        ("env", ".name"),
        ("envFrom", ".secretRef.name"),
    ],
)
def test_refused_data_field_is_reported_under_spec_data(child: str, field: str, below: str):
    template = children(data=DATA)[child]["spec"]["template"]["spec"]
    owner, path = (
        (template, "volumes") if field == "volumes" else (template["containers"][0], f"containers[0].{field}")
    )
    place = owner[field].index(DATA[field][0])
    found = explained(child, f"spec.template.spec.{path}[{place}]{below}: Invalid value", data=DATA)
    assert found == f"spec.data.{field}[0]{below}: Invalid value"


@pytest.mark.parametrize("field", ["env[0].name", "securityContext.runAsUser"])
def test_refused_sidecar_field_is_reported_under_spec_sidecar(field: str):
    mine = {"env": [{"name": "A", "value": "1"}], "securityContext": {"runAsUser": -1}}
    found = explained(
        "trainers", f"spec.template.spec.initContainers[0].{field}: Invalid value", sidecar=mine
    )
    assert found == f"spec.sidecar.{field}: Invalid value"


def test_field_inherited_from_the_trainers_is_reported_there():
    pods = {"job": {"template": {"spec": {"containers": [TRAINER], "securityContext": {"fsGroup": -1}}}}}
    found = explained(
        "feeders", "spec.template.spec.securityContext.fsGroup: Invalid value: -1", trainers=pods
    )
    assert found == "spec.trainers.job.template.spec.securityContext.fsGroup: Invalid value: -1"


SCRATCH = {"sidecar": {"scratch": {"volume": {"ephemeral": {"volumeClaimTemplate": {"spec": {"resources": {
    "requests": {"storage": "1 Gi"}}}}}}}}}  # fmt: skip
NO_PLACE = "unable to convert unstructured object to batch/v1, Kind=Job: quantities must match"
STORAGE = "spec.sidecar.scratch.volume.ephemeral.volumeClaimTemplate.spec.resources.requests.storage"


def test_value_refused_without_a_path_is_located():
    found = explained("trainers", f"failed to convert new object: {NO_PLACE}", **SCRATCH)
    assert found.startswith(f"{STORAGE}: found '1 Gi'; use a quantity such as")
    pods = {"job": {"template": {"spec": {"containers": [TRAINER], "securityContext": {"fsGroup": 1.5}}}}}
    found = explained("feeders", "unable to convert it: cannot convert float64 to int64", trainers=pods)
    assert found.startswith(
        "spec.trainers.job.template.spec.securityContext.fsGroup: found 1.5; use a whole number"
    )
    assert explained("head", NO_PLACE).startswith("spec.ray.managed.head.template; unable")


@pytest.mark.parametrize(
    ("child", "message", "field"),
    [
        (
            "trainers",
            'volumes[name="dataloaderjob-run"].ephemeral.x: no',
            "spec.sidecar.scratch.volume.ephemeral.x:",
        ),
        ("feeders", "volumes[2].emptyDir.sizeLimit: no", "spec.feeders.scratch.size:"),
        (
            "trainers",
            'containers[name="trainer"].ports[containerPort=1,protocol=["t"]].a: b',
            ".containers[0].ports[0]",
        ),
        (
            "trainers",
            'containers[0].ports[containerPort=0,protocol="TCP"].a: b',
            "template.spec.containers[0].ports:",
        ),
        ("trainers", "tolerations[0]: no", "spec.trainers.job.template.spec.tolerations[0]:"),
    ],
)
def test_ambiguous_entry_and_scratch_are_named(child: str, message: str, field: str):
    own = trainer(ports=[{"containerPort": 1}])
    own["job"]["template"]["spec"]["tolerations"] = [None]
    assert field in explained(child, f"x: spec.template.spec.{message}", trainers=own, **SCRATCH)


def test_workload_metadata_is_reported_as_the_jobs_field():
    message = 'Deployment.apps "x" is invalid: metadata.labels: Invalid value'
    assert explained("feeders", message).endswith("invalid: spec.feeders.metadata.labels: Invalid value")
    assert ": spec.trainers.job.metadata.annotations:" in explained(
        "trainers", "x: metadata.annotations: Too long"
    )


def test_list_from_both_data_and_template_names_both():
    own = trainer(envFrom=[{"secretRef": {"name": "s"}}])
    found = explained("trainers", "spec.template.spec.containers[0].envFrom: no", trainers=own, data=DATA)
    assert found == "spec.trainers.job.template.spec.containers[0].envFrom or spec.data.envFrom: no"


def test_users_container_called_head_is_not_taken_for_the_head():
    pods = {"template": {"spec": {"containers": [{"name": "head"}]}}}
    found = explained("feeders", "spec.template.spec.containers[1].image: Required value", feeders=pods)
    assert found == "spec.feeders.template.spec.containers[0].image: Required value"


def test_field_not_set_by_the_user_keeps_its_path_in_the_child():
    message = "spec.template.spec.containers[0].env[0].valueFrom: Invalid value"
    assert explained("head", message) == message
    assert explained("trainers", "the namespace is being terminated") == "the namespace is being terminated"


@pytest.mark.parametrize(
    "path", ["[", "[0]", ".spec.containers[99].env", ".spec.containers[name=].a", ".metadata", ".-a"]
)
def test_odd_path_causes_no_error(path: str):
    assert explained("trainers", f"x: spec.template{path}: y")
