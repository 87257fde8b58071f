"""What a manifest says of the loader reaches a sidecar and a trainer alike on one machine and on a cluster."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from manifests import ATTACHED, manifest
from pods import SETUP

from dataloaderjob.api import DataLoaderJob, parse_object
from dataloaderjob.core.settings import LoaderSettings, SidecarSettings
from dataloaderjob.local.children import Loop
from dataloaderjob.local.cluster import LocalCluster
from dataloaderjob.local.plan import plan
from dataloaderjob_operator import objects

CHANGES: dict[str, tuple[str, Any]] = {
    "processes": ("spec.trainers.job.processesPerPod", 2),
    "shared_memory_nbytes": ("spec.loader.memoryPerProcess", "3Gi"),
    "pool_nbytes": ("spec.loader.poolSize", "64Mi"),
    "batch_deadline_s": ("spec.loader.batchTimeoutSeconds", 7),
    "progress_after_s": ("spec.loader.warnAfterSeconds", 3),
    "checksum": ("spec.loader.checksum", True),
}
"""For each field of the settings, a field of the manifest that decides it, and another value than its default."""
ALSO = {"processes": ("shared_memory_nbytes",)}
"""Fields that change with another: memory is for each process."""
VARIABLES = {
    "DATALOADERJOB_PREFETCH": {"spec.loader.prefetch": 5},
    "DATALOADERJOB_FEEDERS": {"spec.feeders.replicas": 2, "spec.feeders.processesPerPod": 3},
    "DATALOADERJOB_ALLOW_PICKLE": {"spec.loader.allowPickle": True},
}
BY_TRAINERS = "awaits_feeders"
"""The field that follows from the kind of trainers."""
FIELDS = [field.name for field in dataclasses.fields(LoaderSettings) if field.name != BY_TRAINERS]


def job(changes: dict[str, Any]) -> DataLoaderJob:
    return parse_object(manifest({"metadata.uid": "u", "metadata.namespace": "team", **changes}))


def planned(changes: dict[str, Any]):
    return plan(job(changes), folder=Path("/job"), env={}, master_port=1)


def of_machine(changes: dict[str, Any]) -> SidecarSettings:
    """What `dataloaderjob run` writes for the sidecar."""
    cluster = LocalCluster(planned(changes).service, Loop(), show=lambda *_: None, broken=lambda _: None)
    try:
        return cluster._sidecar_settings()
    finally:
        cluster.close()


def of_cluster(changes: dict[str, Any]) -> SidecarSettings:
    """What the operator writes for the sidecar."""
    found, _ = objects.training(job(changes), SETUP, 0)
    return SidecarSettings(**json.loads(found["data"]["sidecar.json"]))


def variables_of_cluster(changes: dict[str, Any]) -> dict[str, str]:
    pod = objects.training(job(changes), SETUP, 0)[-1]["spec"]["template"]["spec"]
    return {item["name"]: item.get("value", "") for item in pod["containers"][0]["env"]}


@pytest.mark.parametrize("field", FIELDS)
def test_manifest_change_reaches_the_sidecar_locally_and_on_a_cluster(field):
    path, value = CHANGES[field]
    before, after = job({}).spec.loader_settings(), job({path: value}).spec.loader_settings()
    changed = {name for name in FIELDS if getattr(before, name) != getattr(after, name)}
    assert changed == {field, *ALSO.get(field, ())}
    for settings in (of_machine({path: value}), of_cluster({path: value})):
        assert getattr(settings, field) == getattr(after, field)
    for settings in (of_machine({}), of_cluster({})):
        assert getattr(settings, field) == getattr(before, field)


def test_sidecars_of_attached_pods_alone_await_their_first_feeder() -> None:
    made = objects.base(job(ATTACHED), SETUP)
    (found,) = [child for child in made if child["kind"] == "ConfigMap"]
    settings = SidecarSettings(**json.loads(found["data"]["sidecar.json"]))
    assert getattr(settings, BY_TRAINERS)
    own = of_cluster({})
    assert not getattr(own, BY_TRAINERS)
    assert settings.anyone, "attached pods share no group with the sidecar"
    same = dataclasses.replace(settings, awaits_feeders=False, anyone=False)
    assert same == own, "all else is as for own trainers"


@pytest.mark.parametrize("variable", VARIABLES)
def test_manifest_change_reaches_the_trainer_locally_and_on_a_cluster(variable):
    found = []
    for changes in ({}, VARIABLES[variable]):
        (trainer,) = planned(changes).trainers
        assert trainer.env.get(variable) == variables_of_cluster(changes).get(variable)
        found.append(trainer.env.get(variable))
    assert found[0] != found[1]


def test_one_machine_has_one_sidecar_for_all_replicas():
    changes = {"spec.trainers.job.replicas": 3, "spec.trainers.job.processesPerPod": 2}
    machine, cluster = of_machine(changes), of_cluster(changes)
    assert (machine.processes, cluster.processes) == (6, 2)
    assert machine.shared_memory_nbytes == 3 * cluster.shared_memory_nbytes
    assert machine.limit_nbytes == cluster.limit_nbytes


def test_sidecar_of_attached_trainers_knows_that_others_start_them():
    changes = {
        "spec.trainers": {"attach": {"processesPerPod": 4}}, "spec.feeders.image": "x",
    }  # fmt: skip
    machine = of_machine(changes)
    assert (machine.awaits_feeders, machine.processes) == (True, 4)
    assert machine.shared_memory_nbytes == 4 * of_machine({}).shared_memory_nbytes
    assert not of_machine({}).awaits_feeders
    assert not of_cluster({}).awaits_feeders


def test_local_sidecar_has_its_own_variables(monkeypatch: pytest.MonkeyPatch):
    started = {}
    monkeypatch.setattr(
        LocalCluster, "_serve", lambda _, part, module, env, on_line: started.update({module: env})
    )
    made = planned({"spec.sidecar.env": [{"name": "A", "value": "1"}]}).service
    cluster = LocalCluster(made, Loop(), show=lambda *_: None, broken=lambda _: None)
    try:
        cluster._start_sidecar()
    finally:
        cluster.close()
    assert started["dataloaderjob.sidecar"]["A"] == "1"
