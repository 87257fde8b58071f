"""The API server alone, with no operator, takes good manifests and refuses wrong ones with field and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from manifests import ACCEPTED, ATTACHED, FOLLOW, REFUSED_BY_RULES, REFUSED_FIELDS, manifest

from apiserver import ApiServer, Refused
from dataloaderjob.api.status import ConditionType, DataLoaderJobStatus

JOBS = "/apis/dataloading.dev/v1alpha1/namespaces/default/dataloaderjobs"
TRY = "?dryRun=All&fieldValidation=Strict"
SEEN_BY_MODELS_ONLY = {"near-in-free-part", "request-over-limit-in-template"}
"""What the schema passes through, such as what resembles a misspelt field: the operator's status says what is wrong."""
SEEN_BY_KUBERNETES_FIRST = {"bad-name", "long-name"}
"""Refused by the rules for all objects' names, with Kubernetes' own words."""


def remedy(message: str) -> str:
    """The remedy in the models' message."""
    return message[message.rindex("use") :]


@pytest.mark.parametrize("changes", ACCEPTED)
def test_valid_manifest_is_accepted(server: ApiServer, changes: dict[str, Any]) -> None:
    made = server.request("POST", JOBS + TRY, manifest(changes))
    assert made["spec"]["loader"]["batchTimeoutSeconds"] == 300, "defaults are filled in"


@pytest.mark.parametrize(("changes", "message"), REFUSED_BY_RULES)
def test_a_manifest_that_breaks_a_rule_is_refused_with_the_remedy(
    server: ApiServer, request: pytest.FixtureRequest, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused) as refused:
        server.request("POST", JOBS + TRY, manifest(changes))
    assert refused.value.code == 422
    if request.node.callspec.id not in SEEN_BY_KUBERNETES_FIRST:
        assert remedy(message) in refused.value.message


@pytest.mark.parametrize(("changes", "message"), REFUSED_FIELDS)
def test_field_of_wrong_name_type_or_size_is_refused(
    server: ApiServer, request: pytest.FixtureRequest, changes: dict[str, Any], message: str
) -> None:
    if request.node.callspec.id in SEEN_BY_MODELS_ONLY:
        server.request("POST", JOBS + TRY, manifest(changes))
        return
    with pytest.raises(Refused) as refused:
        server.request("POST", JOBS + TRY, manifest(changes))
    assert refused.value.code in (400, 422)


@pytest.fixture
def job(server: ApiServer, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """One that is there, and is gone after the test."""
    name = f"j{abs(hash(request.node.name))}"[:20]
    changes = {
        "metadata.name": name, "spec.feeders": {"replicas": 2, "minAvailable": 2}, "spec.loader.poolSize": "1Gi",
        "spec.managedBy": "kueue.x-k8s.io/multikueue",
    }  # fmt: skip
    yield server.request("POST", JOBS, manifest(changes))
    server.request("DELETE", f"{JOBS}/{name}")


@pytest.mark.parametrize(
    ("part", "field", "value", "use"),
    [
        ("trainers.job", "replicas", 2, "use a new job"),
        ("trainers.job", "processesPerPod", 2, "use a new job"),
        ("loader", "poolSize", "512Mi", "use a new job"),
        ("loader", "poolSize", None, "use a new job"),
        ("sidecar", "metricsPort", 9401, "use a new job"),
        ("", "managedBy", "example.com/other", "use a new job"),
        ("", "managedBy", None, "use a new job"),
    ],
)
def test_fields_fixed_at_trainer_start_are_immutable(
    server: ApiServer, job: dict[str, Any], part: str, field: str, value: Any, use: str
) -> None:
    change = {field: value}
    for name in reversed(part.split(".") if part else []):
        change = {name: change}
    with pytest.raises(Refused) as refused:
        server.request(
            "PATCH", f"{JOBS}/{job['metadata']['name']}", {"spec": change},
            content_type="application/merge-patch+json",
        )  # fmt: skip
    assert refused.value.code == 422
    assert use in refused.value.message


@pytest.fixture
def attached(server: ApiServer) -> Iterator[str]:
    """The path of a job with attached trainers, which is gone after the test."""
    changes = {**ATTACHED, "metadata.name": "attached", "spec.managedBy": "kueue.x-k8s.io/multikueue"}
    server.request("POST", JOBS, manifest(changes))
    yield f"{JOBS}/attached"
    server.request("DELETE", f"{JOBS}/attached")


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        pytest.param({"processesPerPod": 2}, "use a new job", id="processes"),
        pytest.param(
            None, "use a new job, because a job's trainers are either created or attached", id="own-trainers"
        ),
        pytest.param({"idleSeconds": 5, "container": "a", "follow": FOLLOW}, "", id="the-rest"),
    ],
)
def test_attached_job_may_change_except_for_its_processes(
    server: ApiServer, attached: str, change: dict[str, Any] | None, refusal: str
) -> None:
    job = manifest()["spec"]["trainers"]["job"] if change is None else None
    trainers = {"trainers": {"attach": change, "job": job}}
    kind = "application/merge-patch+json"
    if not refusal:
        changed = server.request("PATCH", attached, {"spec": trainers}, content_type=kind)
        assert changed["spec"]["trainers"]["attach"]["idleSeconds"] == 5
        return
    with pytest.raises(Refused, match=refusal):
        server.request("PATCH", attached, {"spec": trainers}, content_type=kind)


def test_fields_that_may_change_during_a_run_can_be_edited(server: ApiServer, job: dict[str, Any]) -> None:
    changes = {"suspend": True, "feeders": {"replicas": 3, "image": "example/feeder:2"}}
    changed = server.request(
        "PATCH", f"{JOBS}/{job['metadata']['name']}", {"spec": changes}, content_type="application/merge-patch+json"
    )  # fmt: skip
    assert changed["spec"]["feeders"]["replicas"] == 3
    assert changed["metadata"]["generation"] == 2


def test_scale_subresource_scales_feeders_down_to_min_available(
    server: ApiServer, job: dict[str, Any]
) -> None:
    path = f"{JOBS}/{job['metadata']['name']}/scale"
    scale = server.request("GET", path)
    assert scale["spec"]["replicas"] == 2
    scale["spec"]["replicas"] = 4
    assert server.request("PUT", path, scale)["spec"]["replicas"] == 4
    scale = server.request("GET", path)
    scale["spec"]["replicas"] = 1
    with pytest.raises(Refused, match="use at least minAvailable"):
        server.request("PUT", path, scale)


def test_status_is_written_separately_and_read_back_whole(server: ApiServer, job: dict[str, Any]) -> None:
    path = f"{JOBS}/{job['metadata']['name']}"
    conditions = [
        {
            "type": kind.value, "status": "Unknown", "reason": "New", "message": "new",
            "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        for kind in ConditionType
    ]  # fmt: skip
    status = {"observedGeneration": 1, "phase": "Starting", "conditions": conditions, "selector": "a=b"}
    body = {**job, "spec": {**job["spec"], "suspend": True}, "status": status}
    reported = server.request("PUT", f"{path}/status", body)
    assert reported["spec"]["suspend"] is False, "a write of the status leaves the spec alone"
    assert reported["metadata"]["generation"] == 1
    read = DataLoaderJobStatus.model_validate(server.request("GET", path)["status"])
    assert {c.type for c in read.conditions} == {kind.value for kind in ConditionType}
    later = server.request("PUT", f"{path}/status", {**reported, "status": {**status, "phase": "Happy"}})
    assert later["status"]["phase"] == "Happy", "a word of a later operator"
    unsure = [{**conditions[0], "status": "Maybe"}]
    with pytest.raises(Refused, match="Unsupported value"):
        server.request("PUT", f"{path}/status", {**later, "status": {**status, "conditions": unsure}})
