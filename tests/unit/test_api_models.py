"""Each manifest that cannot work is refused with the field's path, what was found and what would do."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from manifests import (
    ABSENT,
    ACCEPTED,
    CONTAINER,
    FEEDER,
    REFUSED_BY_RULES,
    REFUSED_FIELDS,
    REGISTER,
    manifest,
)

from dataloaderjob.api import DataLoaderJob, ManifestError, parse_object
from dataloaderjob.api.base import Quantity
from dataloaderjob.api.feeders import FeedersSpec
from dataloaderjob.api.loader import LoaderSpec
from dataloaderjob.api.ray import RayTuning
from dataloaderjob.core.errors import InputError


def refusal(changes: dict[str, Any]) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        parse_object(manifest(changes))
    return caught.value


@pytest.mark.parametrize(("changes", "message"), REFUSED_FIELDS + REFUSED_BY_RULES)
def test_a_manifest_that_cannot_work_is_refused_with_a_remedy(changes: dict[str, Any], message: str) -> None:
    error = refusal(changes)
    assert message in str(error)
    assert isinstance(error, InputError)


@pytest.mark.parametrize("changes", ACCEPTED)
def test_manifest_that_can_work_is_accepted_and_round_trips(changes: dict[str, Any]) -> None:
    job = parse_object(manifest(changes))
    assert parse_object(job.model_dump(mode="json", by_alias=True)) == job


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        pytest.param({"spec.feeders.replicas": 0}, "spec.feeders.replicas", id="rule-of-a-part"),
        pytest.param({REGISTER: 1000}, REGISTER, id="rule-across-parts"),
        pytest.param(
            {f"{CONTAINER}.env": [{"name": "RANK"}]}, f"{CONTAINER}.env[0].name", id="rule-in-a-list"
        ),
        pytest.param(
            {f"{CONTAINER}.command": [""]}, f"{CONTAINER}.command", id="rule-of-the-first-container"
        ),
        pytest.param({"metadata.labels": {"a.b/c": 1}}, 'metadata.labels["a.b/c"]', id="key-with-dots"),
        pytest.param(
            {"spec.feeders.metadata.labels": {"a": "b", "dataloading.dev/c": "d"}},
            'spec.feeders.metadata.labels["dataloading.dev/c"]',
            id="rule-of-a-key",
        ),
        pytest.param(
            {
                "spec.data.volumes": [{"name": "a"}],
                "spec.data.volumeMounts": [
                    {"name": "a", "mountPath": "/a"},
                    {"name": "b", "mountPath": "/b"},
                ],
            },
            "spec.data.volumeMounts[1].name",
            id="rule-across-lists",
        ),
        pytest.param(
            {FEEDER: [{"name": "other", "image": "o:1"}, {"name": "feeder", "image": "f:1"}]},
            f"{FEEDER}[1].image",
            id="rule-of-a-field-that-is-there",
        ),
    ],
)
def test_problem_path_is_the_manifests_path(changes: dict[str, Any], path: str) -> None:
    (problem,) = refusal(changes).problems
    assert problem.path == path


def test_each_entry_breaking_a_rule_is_reported_with_the_value_found() -> None:
    variables = [{"name": name} for name in ("RANK", "A", "PET_NNODES")]
    containers = [{"name": "t", "image": "i", "env": variables}, {"name": "s", "env": variables[2:]}]
    error = refusal({"spec.trainers.job.template.spec.containers": containers})
    where = "spec.trainers.job.template.spec.containers"
    assert [(problem.path, problem.found) for problem in error.problems] == [
        (f"{where}[0].env[0].name", '"RANK"'),
        (f"{where}[0].env[2].name", '"PET_NNODES"'),
        (f"{where}[1].env[0].name", '"PET_NNODES"'),
    ]


def test_pass_through_parts_may_hold_any_value() -> None:
    odd = {"a": 10**30, "b": "\ud83d", "c": [{"d": None}], "e": 1.5}
    parse_object(manifest({"spec.feeders.scratch": {"volume": odd}, "spec.sidecar.securityContext": odd}))


def test_all_problems_are_reported_at_once() -> None:
    changes = {
        "spec.feeders.replicas": 0,
        "spec.loader.prefetch": 1,
        "spec.suspnd": True,
        "metadata.name": "A",
    }
    assert [problem.path for problem in refusal(changes).problems] == [
        "metadata.name",
        "spec.feeders.replicas",
        "spec.loader.prefetch",
        "spec.suspnd",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"kind": "RayJob"}, 'kind: found "RayJob"; use DataLoaderJob', id="kind"),
        pytest.param({"kind": ABSENT}, "kind: found nothing; use DataLoaderJob", id="no-kind"),
        pytest.param({"apiVersion": "dataloading.dev/v1"}, "use dataloading.dev/v1alpha1", id="version"),
    ],
)
def test_wrong_kind_of_object_is_refused_without_further_complaints(
    changes: dict[str, Any], message: str
) -> None:
    error = refusal({**changes, "spec.unknown": 1})
    assert len(error.problems) == 1
    assert message in str(error)


def test_models_are_frozen() -> None:
    with pytest.raises(pydantic.ValidationError):
        parse_object(manifest()).spec.feeders.replicas = 3  # type: ignore[misc]


def test_models_can_be_made_in_python_with_snake_case_names() -> None:
    assert LoaderSpec(batch_timeout_seconds=5).model_dump(by_alias=True)["batchTimeoutSeconds"] == 5
    assert FeedersSpec(replicas=3, processes_per_pod=2).count == 6


def test_tuning_becomes_rays_environment_variables() -> None:
    assert RayTuning().settings().env() == {
        "RAY_worker_register_timeout_seconds": "120",
        "RAY_health_check_initial_delay_ms": "10000",
        "RAY_health_check_period_ms": "5000",
        "RAY_health_check_timeout_ms": "20000",
        "RAY_health_check_failure_threshold": "6",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "60",
    }


def test_a_replica_of_several_processes_gets_torchruns_variables_only() -> None:
    job = parse_object(manifest({"spec.trainers.job.replicas": 2, "spec.trainers.job.processesPerPod": 4}))
    env = job.spec.trainers.job.launch_environment(replica=1, master_addr="h", master_port=29500)
    assert env == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "4",
        "PET_MASTER_ADDR": "h",
        "PET_MASTER_PORT": "29500",
    }


def test_a_replica_of_one_process_is_a_rank() -> None:
    job = parse_object(manifest({"spec.trainers.job.replicas": 2}))
    env = job.spec.trainers.job.launch_environment(replica=1, master_addr="h", master_port=29500)
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    assert ranks.items() <= env.items()


def test_quantities_keep_their_spelling_and_compare_by_value() -> None:
    job = parse_object(manifest({"spec.loader.memoryPerProcess": "2048Mi"}))
    assert job.spec.loader.memory_per_process == Quantity("2Gi")
    assert job.model_dump(mode="json", by_alias=True)["spec"]["loader"]["memoryPerProcess"] == "2048Mi"


def test_a_job_knows_its_name() -> None:
    job: DataLoaderJob = parse_object(manifest())
    assert (job.name, job.kind, job.api_version) == ("mnist", "DataLoaderJob", "dataloading.dev/v1alpha1")
