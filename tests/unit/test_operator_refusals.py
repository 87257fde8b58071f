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


def test_an_entry_of_a_list_has_the_place_that_the_user_gave_it():
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
def test_a_path_of_the_child_becomes_the_field_of_the_job(child: str, message: str, field: str):
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
def test_what_pods_have_of_the_data_is_named_there(child: str, field: str, below: str):
    template = children(data=DATA)[child]["spec"]["template"]["spec"]
    owner, path = (
        (template, "volumes") if field == "volumes" else (template["containers"][0], f"containers[0].{field}")
    )
    place = owner[field].index(DATA[field][0])
    found = explained(child, f"spec.template.spec.{path}[{place}]{below}: Invalid value", data=DATA)
    assert found == f"spec.data.{field}[0]{below}: Invalid value"


@pytest.mark.parametrize("field", ["env[0].name", "securityContext.runAsUser"])
def test_what_the_sidecar_has_of_the_users_is_named_there(field: str):
    mine = {"env": [{"name": "A", "value": "1"}], "securityContext": {"runAsUser": -1}}
    found = explained(
        "trainers", f"spec.template.spec.initContainers[0].{field}: Invalid value", sidecar=mine
    )
    assert found == f"spec.sidecar.{field}: Invalid value"


def test_what_head_and_feeders_take_from_the_trainers_is_named_there():
    pods = {"job": {"template": {"spec": {"containers": [TRAINER], "securityContext": {"fsGroup": -1}}}}}
    found = explained(
        "feeders", "spec.template.spec.securityContext.fsGroup: Invalid value: -1", trainers=pods
    )
    assert found == "spec.trainers.job.template.spec.securityContext.fsGroup: Invalid value: -1"


def test_a_field_that_no_user_has_set_keeps_its_path_in_the_child():
    message = "spec.template.spec.containers[0].env[0].valueFrom: Invalid value"
    assert explained("head", message) == message
    assert explained("trainers", "the namespace is being terminated") == "the namespace is being terminated"


@pytest.mark.parametrize(
    "path", ["[", "[0]", ".spec.containers[99].env", ".spec.containers[name=].a", ".metadata", ".-a"]
)
def test_an_odd_path_is_no_error(path: str):
    assert explained("trainers", f"x: spec.template{path}: y")
