"""Operator and CustomResourceDefinition of neighbouring releases: the definition is changed under jobs that run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import manifest
from operated import Operated
from processes_of_operator import until

from apiserver import ApiServer, api_server
from dataloaderjob.api import KIND
from dataloaderjob_operator.reconcile import Reconciler

CRD = yaml.safe_load((Path(__file__).resolve().parents[2] / "crds" / "dataloaderjobs.yaml").read_text())
PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One whose definition the other tests do not need."""
    with api_server(tmp_path_factory.mktemp("definitions")) as running:
        running.define(earlier())
        yield running


def schema(crd: dict[str, Any]) -> dict[str, Any]:
    (version,) = crd["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"]["properties"])


def earlier() -> dict[str, Any]:
    """The definition of a release that did not have some of the fields yet."""
    crd = copy.deepcopy(CRD)
    found = schema(crd)
    del found["spec"]["properties"]["ttlSecondsAfterFinished"]
    trainers = found["status"]["properties"]["trainers"]
    del trainers["properties"]["sidecarImage"], trainers["default"]["sidecarImage"]
    del found["status"]["properties"]["ray"]
    return crd


def later() -> dict[str, Any]:
    """The definition of a release that has a field more, with a default."""
    crd = copy.deepcopy(CRD)
    schema(crd)["spec"]["properties"]["checkpoints"] = {"type": "boolean", "default": True}
    return crd


def define(server: ApiServer, crd: dict[str, Any]) -> None:
    """Changes the definition, and waits until the API server goes by it."""
    path = f"{PATH}/{crd['metadata']['name']}"
    version = server.request("GET", path)["metadata"]["resourceVersion"]
    changed = {**crd, "metadata": {**crd["metadata"], "resourceVersion": version}}
    server.request("PUT", path, changed)


def settle(job: Operated, operator: Reconciler) -> None:
    """Reconciles by one operator, which remembers what it was refused, for long enough."""
    for _ in range(8):
        job.collect_garbage()
        job.roll_out()
        job.reconcile_with(operator)


@pytest.fixture
def upgraded(own_server: ApiServer) -> Iterator[None]:
    define(own_server, CRD)
    yield
    define(own_server, earlier())


def test_newer_operator_drops_status_fields_missing_from_the_crd(
    own_server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    job = Operated(own_server, manifest())
    operator = job.operator()
    for _ in range(3):
        job.reconcile_with(operator)
    status = job.get(KIND, "mnist")["status"]
    assert "ray" not in status
    assert (status["trainers"]["image"], status["trainers"].get("sidecarImage")) == ("example/mnist:1", None)
    assert {condition["type"] for condition in status["conditions"]} >= {"Ready", "Progressing"}
    said = [record.getMessage() for record in caplog.records if "a different release" in record.getMessage()]
    assert len(said) == 2, "each field once"
    written = operator.api.writes
    job.reconcile_with(operator)
    assert operator.api.writes == written, "it is not written over and over"


def test_attempts_and_completion_are_recorded_under_an_older_crd(own_server: ApiServer) -> None:
    job = Operated(own_server, manifest({"spec.trainers.job.failurePolicy.backoffSeconds": 0}))
    operator = job.operator()
    settle(job, operator)
    job.ends("mnist-trainers-0", "Failed")
    settle(job, operator)
    assert job.get(KIND, "mnist")["status"]["trainers"]["restarts"] == 1
    job.ends("mnist-trainers-1", "Complete")
    settle(job, operator)
    assert job.get(KIND, "mnist")["status"]["phase"] == "Complete"


def test_the_definition_is_upgraded_and_rolled_back_under_a_job_that_runs(
    own_server: ApiServer, request: pytest.FixtureRequest
) -> None:
    job = Operated(own_server, manifest())
    operator = job.operator()
    settle(job, operator)
    before = {key: child["metadata"]["uid"] for key, child in job.children().items()}
    generation = job.get(KIND, "mnist")["metadata"]["generation"]
    request.getfixturevalue("upgraded")

    def has_new_fields() -> bool:
        operator.undeclared.clear()  # the time is over
        job.reconcile_with(operator)
        return "sidecarImage" in job.get(KIND, "mnist")["status"]["trainers"]

    until(has_new_fields, 20, "a status by the new definition")
    settle(job, operator)
    assert job.get(KIND, "mnist")["status"]["trainers"]["sidecarImage"] == "example/sidecar:1"
    assert job.get(KIND, "mnist")["metadata"]["generation"] == generation, "nobody edited the spec"
    job.edit(ttlSecondsAfterFinished=60)
    define(own_server, earlier())
    until(lambda: "ttlSecondsAfterFinished" not in job.get(KIND, "mnist")["spec"], 20, "the old definition")
    settle(job, operator)
    assert {key: child["metadata"]["uid"] for key, child in job.children().items()} == before


def test_older_operator_keeps_running_a_job_under_a_newer_crd(
    own_server: ApiServer, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("upgraded")
    job = Operated(own_server, manifest())
    operator = job.operator()
    settle(job, operator)
    before = {key: child["metadata"]["uid"] for key, child in job.children().items()}
    define(own_server, later())
    until(lambda: job.get(KIND, "mnist")["spec"].get("checkpoints") is True, 20, "the field of the later one")
    job.edit(feeders={"replicas": 3})
    settle(job, operator)
    ready = next(c for c in job.get(KIND, "mnist")["status"]["conditions"] if c["type"] == "Ready")
    assert ready["reason"] != "InvalidSpec"
    assert {key: child["metadata"]["uid"] for key, child in job.children().items()} == before
    assert job.get("Deployment", "mnist-feeders")["spec"]["replicas"] == 3
