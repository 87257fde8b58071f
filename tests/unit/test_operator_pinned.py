"""What pods were started with stays with them: settings, templates of another operator, the sidecar's image."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from memory_api import Job
from observed_jobs import SETUP

from dataloaderjob_operator import names
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.objects.pods import map_of

LATER = replace(SETUP, version="2.0", sidecar_image="example/sidecar:2", cluster_domain="other.domain")
"""A later operator, which makes other settings of the same spec."""
HEAD, FEEDERS, TRAINERS = (
    ("Deployment", "mnist-head"),
    ("Deployment", "mnist-feeders"),
    ("Job", "mnist-trainers-0"),
)


def maps(job: Job) -> dict[str, Manifest]:
    """Settings that there are, by name."""
    return {name: thing for (kind, name), thing in job.api.objects.items() if kind == "ConfigMap"}


def read_by(job: Job, key: tuple[str, str]) -> str:
    """The settings that a workload's pods read; they are there."""
    name = map_of(job.api.objects[key]["spec"]["template"])
    assert name in maps(job)
    return str(name)


def rolled_out(job: Job, key: tuple[str, str], *, over: bool = True) -> None:
    """Reports a Deployment whose pods have been replaced, or only some of them."""
    live = job.api.objects[key]
    generation = live["metadata"]["generation"]
    status = {"observedGeneration": generation, "replicas": 2, "updatedReplicas": 2 if over else 1}
    job.put({**live, "status": status})


def upgraded(job: Job, **setup: Any) -> None:
    job.operator.setup = replace(LATER, **setup)


def settled(job: Job) -> None:
    for _ in range(3):
        job.reconcile()


@pytest.fixture
def job() -> Job:
    made = Job()
    settled(made)
    for key in (HEAD, FEEDERS):
        rolled_out(made, key)
    return made


def test_each_role_reads_settings_named_by_their_content(job: Job):
    read = {read_by(job, key) for key in (HEAD, FEEDERS, TRAINERS)}
    assert read == set(maps(job)), "none that nobody reads"
    assert len(read) == 3
    assert [maps(job)[read_by(job, key)].get("immutable") for key in (HEAD, FEEDERS, TRAINERS)] == [
        None,
        True,
        True,
    ]


def test_edit_of_sidecar_settings_does_not_affect_a_running_attempt(job: Job):
    before = maps(job)
    job.edit(loader={"memoryPerProcess": "3Gi", "checksum": True})
    settled(job)
    assert maps(job) == before


def test_next_attempt_reads_current_settings_and_old_ones_are_removed(job: Job):
    before = read_by(job, TRAINERS)
    job.edit(loader={"memoryPerProcess": "3Gi"})
    trainers = job.api.objects["DataLoaderJob", "mnist"]["spec"]["trainers"]
    job.edit(trainers={"job": {**trainers["job"], "failurePolicy": {"backoffSeconds": 0}}})
    live = job.api.objects[TRAINERS]
    job.put({**live, "status": {"conditions": [{"type": "Failed", "status": "True"}]}})
    for _ in range(5):
        job.reconcile()
    (key,) = (key for key in job.api.objects if key[0] == "Job")
    assert key == ("Job", "mnist-trainers-1")
    after = json.loads(maps(job)[read_by(job, key)]["data"]["sidecar.json"])
    assert after["shared_memory_nbytes"] == 3 << 30
    assert before not in maps(job)


def test_operator_upgrade_adds_and_changes_no_settings_of_running_pods(job: Job):
    before = {key: thing for key, thing in job.api.objects.items() if key[0] != "DataLoaderJob"}
    upgraded(job)
    settled(job)
    assert {key: thing for key, thing in job.api.objects.items() if key[0] != "DataLoaderJob"} == before


def test_edit_creates_new_settings_and_old_ones_stay_until_unread(job: Job):
    old = read_by(job, FEEDERS)
    job.edit(feeders={"processesPerPod": 3, "minAvailable": 0})
    settled(job)
    new = read_by(job, FEEDERS)
    assert new != old
    assert {old, new} <= set(maps(job)), "the rollout has not begun"
    rolled_out(job, FEEDERS, over=False)
    settled(job)
    assert old in maps(job), "a pod of the old template is there"
    rolled_out(job, FEEDERS)
    settled(job)
    assert old not in maps(job)
    assert new in maps(job)


def test_deleted_settings_are_restored(job: Job):
    name = read_by(job, FEEDERS)
    job.cache.remove(job.api.objects.pop(("ConfigMap", name)))
    settled(job)
    assert read_by(job, FEEDERS) == name


def test_pods_of_another_operator_without_their_settings_are_replaced(job: Job):
    name = read_by(job, FEEDERS)
    upgraded(job)
    job.cache.remove(job.api.objects.pop(("ConfigMap", name)))
    settled(job)
    assert read_by(job, FEEDERS) != name


@pytest.mark.parametrize("setup", [SETUP, LATER], ids=["same-operator", "later-operator"])
def test_head_that_stays_gets_the_current_number_of_feeders(job: Job, setup: Any):
    name, head = read_by(job, HEAD), job.api.objects[HEAD]
    job.operator.setup = setup
    job.edit(feeders={"replicas": 7, "minAvailable": 0})
    settled(job)
    assert job.api.objects[HEAD]["spec"] == head["spec"]
    assert maps(job)[name]["data"]["feeders"] == "7"
    assert json.loads(maps(job)[name]["data"]["head.json"])["num_feeders"] == 1
    assert len(maps(job)) == 3


def test_unread_settings_are_removed(job: Job):
    job.edit(suspend=True)
    settled(job)
    assert maps(job) == {}
    job.edit(suspend=False)
    settled(job)
    assert len(maps(job)) == 3


def test_legacy_shared_settings_map_stays_as_long_as_it_is_read(job: Job):
    live = job.api.objects[TRAINERS]
    volumes = live["spec"]["template"]["spec"]["volumes"]
    next(v for v in volumes if "configMap" in v)["configMap"]["name"] = "mnist-settings"
    job.put(live)
    metadata = {
        **maps(job)[read_by(job, HEAD)]["metadata"],
        "name": "mnist-settings",
        "uid": "one",
        "labels": names.labels("mnist"),
    }
    job.put({"kind": "ConfigMap", "metadata": metadata, "data": {}})
    settled(job)
    assert "mnist-settings" in maps(job)
    job.edit(suspend=True)
    settled(job)
    assert maps(job) == {}


def sidecar_image(job: Job) -> str:
    (key,) = (key for key in job.api.objects if key[0] == "Job")
    return str(job.api.objects[key]["spec"]["template"]["spec"]["initContainers"][0]["image"])


def started_anew(job: Job) -> None:
    for suspend in (True, False):
        job.edit(suspend=suspend)
        settled(job)


def test_later_attempts_keep_the_sidecar_image_until_the_trainers_changes(job: Job):
    assert job.status["trainers"]["sidecarImage"] == "example/sidecar:1"
    upgraded(job)
    started_anew(job)
    assert sidecar_image(job) == "example/sidecar:1"
    trainers = job.api.objects["DataLoaderJob", "mnist"]["spec"]["trainers"]
    (container,) = trainers["job"]["template"]["spec"]["containers"]
    changed = {
        **trainers["job"],
        "template": {"spec": {"containers": [{**container, "image": "example/mnist:2"}]}},
    }
    job.edit(trainers={"job": changed})
    started_anew(job)
    assert sidecar_image(job) == "example/sidecar:2"
    assert job.status["trainers"]["image"] == "example/mnist:2"


def test_sidecar_image_of_the_manifest_overrides_the_first_attempts(job: Job):
    upgraded(job)
    job.edit(sidecar={"image": "mine:3"})
    started_anew(job)
    assert sidecar_image(job) == "mine:3"
    job.edit(sidecar={})
    started_anew(job)
    assert sidecar_image(job) == "example/sidecar:1"


def images(job: Job) -> tuple[str, str]:
    """Of head and feeders."""
    (head, supervisor), (feeders,) = (
        job.api.objects[key]["spec"]["template"]["spec"]["containers"] for key in (HEAD, FEEDERS)
    )
    assert supervisor["image"] == head["image"], "both containers of the head run one image"
    return head["image"], feeders["image"]


def test_new_feeder_image_replaces_feeders_but_not_a_serving_head(job: Job):
    (before, _), live = images(job), job.api.objects[HEAD]
    job.put({**live, "status": {**live["status"], "readyReplicas": 1}})
    job.edit(feeders={"image": "feeder:bad"})
    settled(job)
    assert images(job) == (before, "feeder:bad"), "without a head all feeders end"
    job.edit(feeders={"image": "feeder:bad"}, ray={"managed": {"version": "2.60.0"}})
    settled(job)
    assert images(job) == ("feeder:bad", "feeder:bad"), "what else changes it brings the image along"


def test_head_that_does_not_serve_gets_the_new_feeder_image(job: Job):
    job.edit(feeders={"image": "feeder:2"})
    settled(job)
    assert images(job) == ("feeder:2", "feeder:2")
