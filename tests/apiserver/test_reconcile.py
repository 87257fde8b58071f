"""Reconcile on a real API server: same end, whatever happens between two writes."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from manifests import manifest
from operated import MERGE, SETUP, Killed, Operated, dies_at, refuses

from apiserver import ApiServer
from dataloaderjob.api import KIND
from dataloaderjob.api.status import ConditionType, RayStatus
from dataloaderjob.core.supervision import Rates
from dataloaderjob_operator import objects
from dataloaderjob_operator.children import Refusal
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.observed import SupervisorStatus
from dataloaderjob_operator.kinds import ANNOTATION_APPLIED
from dataloaderjob_operator.reconcile import AFTER_WRITE_S
from dataloaderjob_operator.workqueue import NEVER

NAMES = {
    ("Secret", "mnist-key"), ("Service", "mnist-head"), ("Service", "mnist-trainers"),
    *(("ConfigMap", f"mnist-settings-{role}") for role in ("head", "feeder", "trainer")),
    ("NetworkPolicy", "mnist-head"), ("NetworkPolicy", "mnist-feeder"), ("NetworkPolicy", "mnist-trainer"),
    ("Deployment", "mnist-head"), ("Deployment", "mnist-feeders"), ("Job", "mnist-trainers-0"),
}  # fmt: skip
TRAINING = {("Job", "mnist-trainers-0"), ("ConfigMap", "mnist-settings-trainer")}
THEIRS = {"metadata": {"name": "mnist-head"}, "spec": {"ports": [{"port": 1}]}}
"""A Service of somebody else's."""
PODLESS = {key for key in NAMES if key[0] not in ("Deployment", "Job", "ConfigMap")}

AT_ONCE = {"spec.trainers.job.failurePolicy.backoffSeconds": 0}
"""No pause before the next attempt: time goes on by itself here."""


@pytest.fixture
def job(server: ApiServer) -> Operated:
    return Operated(server, manifest(AT_ONCE))


def spec_of(job: Operated) -> dict[Any, Any]:
    """What the children are to be, without what differs between two jobs: names of namespaces, ids, times."""
    found = {}
    for child in job.children().values():
        text = repr(
            {k: child.get(k) for k in ("spec", "data", "type")} | {"labels": child["metadata"]["labels"]}
        )
        for pattern in (job.namespace, r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}", r"[A-Za-z0-9+/]{40,}={0,2}"):
            text = re.sub(pattern, "*", text)
        text = re.sub(r"'(clusterIPs?|controller-uid|batch.kubernetes.io/controller-uid)': [^,}]*", "", text)
        text = re.sub(r"'dataloading.dev/template': '[0-9a-f]{12}'", "", text)
        text = re.sub("mnist-keys-[0-9a-f]{8}-[0-9a-f]{6}", "mnist-keys-*", text)
        text = re.sub("mnist-settings-[0-9a-f]{12}", "mnist-settings-*", text)
        found[job.called(child)] = text
    return found


def end_of(job: Operated) -> dict[Any, Any]:
    """Children and status, without what differs between two jobs."""
    text = repr(job.get(KIND, job.name)["status"]).replace(job.namespace, "*")
    return {**spec_of(job), KIND: re.sub(r"\d{4}-\d\d-\d\dT[0-9:.]*Z", "*", text)}


def test_new_job_gets_children_and_a_status_and_then_no_more_writes(job: Operated) -> None:
    assert job.reconcile() == 1 + len(NAMES)
    assert job.named() == NAMES
    assert set(job.conditions()) == {kind.value for kind in ConditionType}
    job.settle()
    for _ in range(3):
        assert job.reconcile() == 0


@pytest.mark.parametrize("key", sorted(NAMES), ids="/".join)
def test_deleted_child_is_recreated_identically(job: Operated, key: tuple[str, str]) -> None:
    job.settle()
    before, key = spec_of(job), job.real(key)
    data = job.get(*key).get("data")
    job.delete(*key)
    job.settle()
    assert spec_of(job) == before
    assert job.get(*key).get("data") == data


def test_foreign_edits_to_our_fields_are_reverted_and_others_kept(job: Operated) -> None:
    job.settle()
    job.patch(
        "Deployment",
        "mnist-feeders",
        {"spec": {"replicas": 9}, "metadata": {"annotations": {"their/own": "1"}}},
    )
    job.patch("Service", "mnist-head", {"spec": {"publishNotReadyAddresses": False}})
    job.settle()
    feeders = job.get("Deployment", "mnist-feeders")
    assert feeders["spec"]["replicas"] == 1
    assert feeders["metadata"]["annotations"]["their/own"] == "1"
    assert job.get("Service", "mnist-head")["spec"]["publishNotReadyAddresses"] is True
    job.patch("Deployment", "mnist-feeders", {"metadata": {"annotations": {"their/own": "2"}}})
    assert job.reconcile() == 0, "a change of theirs is none of ours"


@pytest.mark.parametrize(
    "wider",
    [
        pytest.param([{}], id="a-rule-for-all"),
        pytest.param([{"from": [{"podSelector": {}}]}], id="another-rule"),
    ],
)
def test_policy_opened_by_an_added_rule_is_restored(job: Operated, wider: list[Any]) -> None:
    job.settle()
    before = job.get("NetworkPolicy", "mnist-head")["spec"]
    job.patch("NetworkPolicy", "mnist-head", {"spec": {"ingress": before["ingress"] + wider}})
    job.settle()
    assert job.get("NetworkPolicy", "mnist-head")["spec"] == before


def test_policy_rule_that_was_widened_is_restored(job: Operated) -> None:
    """An empty selector beside ours means pods of all namespaces; nothing that we set has changed."""
    job.settle()
    before = job.get("NetworkPolicy", "mnist-feeder")["spec"]
    opened = copy.deepcopy(before["ingress"])
    opened[0]["from"][0]["namespaceSelector"] = {}
    job.patch("NetworkPolicy", "mnist-feeder", {"spec": {"ingress": opened}})
    assert job.get("NetworkPolicy", "mnist-feeder")["spec"] != before
    job.settle()
    assert job.get("NetworkPolicy", "mnist-feeder")["spec"] == before
    job.edit(networkPolicy={"mode": "Strict"})
    job.settle()
    assert job.get("NetworkPolicy", "mnist-feeder")["spec"]["policyTypes"] == ["Ingress", "Egress"]
    job.edit(networkPolicy={"mode": "Ingress"})
    job.settle()
    assert job.get("NetworkPolicy", "mnist-feeder")["spec"] == before, "with no egress left behind"
    job.edit(networkPolicy={"mode": "None"})
    job.settle()
    assert not [kind for kind, _ in job.children() if kind == "NetworkPolicy"]


def test_field_removed_from_the_spec_is_removed_from_the_child(job: Operated) -> None:
    job.edit(feeders={"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}})
    job.settle()
    assert job.get("Deployment", "mnist-feeders")["spec"]["template"]["spec"]["tolerations"]
    job.edit(feeders={"template": {"spec": {"tolerations": None}}})
    job.settle()
    kept = job.get("Deployment", "mnist-feeders")["spec"]["template"]["spec"]["tolerations"]
    assert all("key" in toleration for toleration in kept), "those of lost nodes are the operator's own"


def test_quantities_normalised_by_the_server_cause_no_rewrite(job: Operated) -> None:
    job.edit(feeders={"resources": {"requests": {"cpu": "1000m", "memory": "2048Mi"}, "limits": {"cpu": 1}}})
    job.settle()
    assert job.reconcile() == 0


def test_value_rewritten_by_the_server_is_not_sent_repeatedly(
    server: ApiServer,
) -> None:
    divisor = {
        "name": "CPUS",
        "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1000m"}},
    }
    theirs = [{"name": "feeder", "env": [divisor]}]
    job = Operated(server, manifest({"spec.feeders.template.spec.containers": theirs}))
    operator = job.operator()
    waits = [job.reconcile_with(operator) for _ in range(4)]
    written = operator.api.writes
    job.reconcile_with(operator)
    env = job.get("Deployment", "mnist-feeders")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert next(e for e in env if e["name"] == "CPUS")["valueFrom"]["resourceFieldRef"]["divisor"] == "1"
    assert operator.api.writes == written, "nothing more is sent"
    assert waits[0] == AFTER_WRITE_S < (waits[-1] or 1), "nor is it due again soon"


def test_job_that_reuses_a_name_inherits_no_status_and_is_not_deleted(
    job: Operated,
) -> None:
    operator = job.operator()
    job.reconcile_with(operator)
    old = operator.cache
    status = job.get(KIND, "mnist")["status"]
    job.delete(KIND, "mnist")
    job.server.request("POST", job.path(KIND), manifest())
    uid = old.job(job.key)["metadata"]["uid"]
    with pytest.raises(ApiError) as refused:
        job.run(operator.api.apply_status(*job.key, old.version(job.key), status))
    assert refused.value.code == 409
    assert job.run(operator.api.delete(job.namespace, (KIND, "mnist"), uid)) is None
    assert "status" not in job.get(KIND, "mnist")
    operator.children.refusals[job.key] = {("Job", "a"): Refusal("of the other", reported=True)}
    assert job.reconcile_with(operator) == AFTER_WRITE_S
    assert not operator.children.refused(job.key)


def test_expired_job_is_deleted_once(server: ApiServer) -> None:
    job = Operated(server, manifest({"spec.ttlSecondsAfterFinished": 0}))
    operator = job.operator()
    job.reconcile_with(operator)
    job.ends("mnist-trainers-0", "Complete")
    operator.cache = operator.children.cache = job.observe()
    written = operator.api.writes
    waits = [job.run(operator.reconcile(job.key)) for _ in range(3)]
    assert waits[1:] == [NEVER, NEVER]
    assert operator.api.writes == written + 1
    assert job.get(KIND, "mnist")["metadata"]["deletionTimestamp"], "its children go before it"


def test_stale_child_in_the_cache_is_deleted_once(job: Operated) -> None:
    operator, head = job.operator(), ("Deployment", "mnist-head")
    job.reconcile_with(operator)
    ghost = {**job.get(*head), "kind": "Deployment"}
    job.edit(suspend=True)
    job.reconcile_with(operator)
    job.collect_garbage()
    operator.cache = operator.children.cache = job.observe()
    operator.cache.put(ghost)
    written = operator.api.writes
    for _ in range(3):
        job.run(operator.reconcile(job.key))
    assert operator.cache.child(job.key, head) is None
    assert operator.api.writes <= written + 4, "the status, settings that nothing reads now, and one attempt"


def test_new_operator_replaces_no_pod_until_the_user_edits_the_job(job: Operated) -> None:
    job.settle()
    newer = objects.OperatorConfig(version="2.0", sidecar_image="example/sidecar:2", root_key=SETUP.root_key)
    before = {
        name: job.get("Deployment", name)["spec"]["template"] for name in ("mnist-head", "mnist-feeders")
    }
    trainers = job.get("Job", "mnist-trainers-0")["metadata"]["uid"]
    job.settle(setup=newer)
    assert {name: job.get("Deployment", name)["spec"]["template"] for name in before} == before
    assert job.get("Job", "mnist-trainers-0")["metadata"]["uid"] == trainers
    job.edit(feeders={"image": "example/feeder:2"})
    job.settle(setup=newer)
    template = job.get("Deployment", "mnist-feeders")["spec"]["template"]
    assert template["metadata"]["annotations"]["dataloading.dev/made-by"] == "2.0"


def scale(job: Operated) -> None:
    job.edit(feeders={"replicas": 3})


def update(job: Operated) -> None:
    job.edit(
        feeders={"image": "example/feeder:2"},
        ray={"managed": {"tuning": {"workerRegisterTimeoutSeconds": 200}}},
    )


def restrict(job: Operated) -> None:
    job.edit(networkPolicy={"mode": "Strict"})


def open_up(job: Operated) -> None:
    job.edit(networkPolicy={"mode": "None"})


def suspend(job: Operated) -> None:
    job.edit(suspend=True)


def resume(job: Operated) -> None:
    suspend(job)
    job.settle()
    job.edit(suspend=False)


def fail_once(job: Operated) -> None:
    failed = {
        "type": "Failed",
        "status": "True",
        "reason": "BackoffLimitExceeded",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    target = {**failed, "type": "FailureTarget"}
    job.patch(
        "Job",
        "mnist-trainers-0",
        {"status": {"startTime": "2026-01-01T00:00:00Z", "conditions": [target, failed]}},
        "status",
    )


def end(job: Operated) -> None:
    done = {"type": "Complete", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    met = {**done, "type": "SuccessCriteriaMet"}
    times = {"startTime": "2026-01-01T00:00:00Z", "completionTime": "2026-01-01T00:01:00Z"}
    job.patch(
        "Job", "mnist-trainers-0", {"status": {**times, "conditions": [met, done], "succeeded": 1}}, "status"
    )


@pytest.mark.parametrize("change", [None, scale, update, restrict, open_up, suspend, resume, fail_once, end])
def test_operator_killed_before_any_write_reaches_the_same_end_state(server: ApiServer, change: Any) -> None:
    whole = Operated(server, manifest(AT_ONCE))
    if change is not None:
        whole.settle()
        change(whole)
    whole.settle()
    expected = end_of(whole)
    for write in range(1, 30):
        job = Operated(server, manifest(AT_ONCE))
        if change is not None:
            job.settle()
            change(job)
        died = False
        for _ in range(3):  # also in the reconciles that follow
            try:
                job.reconcile(dies_at(write))
            except Killed:
                died = True
                break
            job.collect_garbage()
        job.settle()
        assert end_of(job) == expected, f"killed before write {write}"
        if not died:
            assert write > 1
            return
    raise AssertionError("it never ran to its end")


def test_finished_job_keeps_only_objects_that_hold_logs(job: Operated) -> None:
    job.settle()
    end(job)
    job.settle()
    assert job.named() == PODLESS | TRAINING
    status = job.get(KIND, "mnist")["status"]
    assert (status["phase"], status["trainers"]["succeeded"]) == ("Complete", 1)


def test_failed_attempt_is_replaced_and_counted_once(job: Operated) -> None:
    job.settle()
    fail_once(job)
    job.settle()
    assert ("Job", "mnist-trainers-1") in job.children()
    assert ("Job", "mnist-trainers-0") not in job.children()
    assert job.get(KIND, "mnist")["status"]["trainers"]["restarts"] == 1


@pytest.mark.parametrize("codes", [{1: 500}, {2: 429, 3: 429}, {4: 409}, {8: 503}, {3: 0, 5: 0}])
def test_writes_refused_temporarily_are_retried(job: Operated, codes: dict[int, int]) -> None:
    left = dict(codes)
    for _ in range(len(codes)):
        with pytest.raises(ApiError):
            job.reconcile(refuses({min(left): left.pop(min(left))}))
    job.settle()
    assert job.named() == NAMES


def test_foreign_child_of_the_same_name_is_reported_and_left(server: ApiServer) -> None:
    """Server-side apply takes over the fields that it sets: an object of another owner must not be one of them."""
    job = Operated(server, manifest(AT_ONCE))
    server.request("POST", job.path("Service"), THEIRS)
    with pytest.raises(ApiError, match="mnist-head"):
        job.reconcile()
    assert job.get("Service", "mnist-head")["spec"]["ports"][0]["port"] == 1


def why_a_child_is_refused(job: Operated, operator: Any) -> str:
    """What the condition says once two reconciles have failed at it."""
    for _ in range(2):
        with pytest.raises(ApiError):
            job.reconcile_with(operator)
    ready = job.conditions()["Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "ChildRefused")
    return str(ready["message"])


def test_refused_child_is_reported_and_created_once_possible(server: ApiServer) -> None:
    job = Operated(server, manifest(AT_ONCE))
    server.request("POST", job.path("Service"), THEIRS)
    operator = job.operator()
    assert "mnist-head already exists but does not belong to this job" in why_a_child_is_refused(
        job, operator
    )
    job.delete("Service", "mnist-head")
    assert job.reconcile_with(operator) == 0, "it is due at once"
    job.reconcile_with(operator)
    assert job.conditions()["Ready"]["reason"] != "ChildRefused"
    assert job.named() == NAMES


def test_limit_range_violation_is_reported_by_field_before_creation(server: ApiServer) -> None:
    """It looks at pods alone: the workloads are taken, and their pods are not."""
    job = Operated(
        server, manifest({**AT_ONCE, "spec.feeders.resources": {"limits": {"memory": "9Gi", "cpu": 1}}})
    )
    limit = {"limits": [{"type": "Container", "max": {"memory": "8Gi"}}]}
    server.request(
        "POST", f"/api/v1/namespaces/{job.namespace}/limitranges", {"metadata": {"name": "l"}, "spec": limit}
    )
    operator = job.operator()
    told = why_a_child_is_refused(job, operator)
    assert "maximum memory usage per Container is 8Gi, but limit is 9Gi" in told
    assert told.endswith("change this pod's resources in spec.feeders.resources")
    assert not {"Deployment", "Job"} & {kind for kind, _ in job.named()}
    server.request("DELETE", f"/api/v1/namespaces/{job.namespace}/limitranges/l")
    job.reconcile_with(operator)
    job.reconcile_with(operator)
    assert job.named() == NAMES


def test_pod_security_violation_is_reported_before_creation(server: ApiServer) -> None:
    job = Operated(server, manifest(AT_ONCE))
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    server.request("PATCH", f"/api/v1/namespaces/{job.namespace}", label, content_type=MERGE)
    told = why_a_child_is_refused(job, job.operator())
    assert 'violates PodSecurity "restricted:latest"' in told
    assert not {"Deployment", "Job"} & {kind for kind, _ in job.named()}


def test_orphaned_trainers_are_reported_and_recreated_once_deleted(
    server: ApiServer,
) -> None:
    """As kubectl delete --cascade=orphan leaves them, and a backup that is restored: they have another job's key."""
    job = Operated(server, manifest(AT_ONCE))
    job.settle()
    job.patch("Job", "mnist-trainers-0", {"metadata": {"ownerReferences": None}})
    operator = job.operator()
    told = why_a_child_is_refused(job, operator)
    assert "mnist-trainers-0 already exists but does not belong to this job: delete it" in told
    job.delete("Job", "mnist-trainers-0")
    job.reconcile_with(operator)
    job.reconcile_with(operator)
    assert job.conditions()["Ready"]["reason"] != "ChildRefused"
    assert job.get("Job", "mnist-trainers-0")["metadata"]["ownerReferences"]


def test_supervisors_report_reaches_the_status_without_noise(job: Operated) -> None:
    job.settle()
    job.serves()
    ray = RayStatus(version="2.60.0", worker_register_timeout_seconds=120)
    rates = Rates(batches_per_s=12.345, nbytes_per_s=2.5e9, stall=0.5, occupancy=0.25)
    job.supervisor.reported = SupervisorStatus(desired=1, ready=1, ray=ray, rates=rates)
    job.settle()
    status = job.get(KIND, "mnist")["status"]
    loader = status["loader"]
    assert loader.pop("observedTime")
    assert (loader.pop("verdict"), "too few batches" in loader.pop("explanation")) == ("unknown", True)
    assert loader == {
        "batchesPerSecond": "12.3", "gbPerSecond": "2.5", "stallPercent": "50", "occupancyPercent": "25",
        "inputBoundPercent": "", "limit": "", "recommendedReplicas": 0,
    }  # fmt: skip
    assert (status["feeders"]["summary"], status["ray"]["workerRegisterTimeoutSeconds"]) == ("1/1", 120)
    assert (job.conditions()["HeadReady"]["status"], job.conditions()["FeedersReady"]["status"]) == (
        "True",
        "True",
    )
    job.supervisor.reported = replace(
        job.supervisor.reported, rates=replace(rates, batches_per_s=12.5, stall=0.52)
    )
    assert job.reconcile() == 0, "noise"
    job.supervisor.reported = replace(job.supervisor.reported, rates=replace(rates, batches_per_s=0.0))
    operator = job.operator()
    job.reconcile_with(operator)
    assert job.get(KIND, "mnist")["status"]["loader"]["batchesPerSecond"] == "0"
    job.supervisor.reported = replace(job.supervisor.reported, rates=rates)
    assert (job.reconcile_with(operator) or 0.0) > 1.0, "it is due when a minute has passed"
    assert job.get(KIND, "mnist")["status"]["loader"]["batchesPerSecond"] == "0"


@pytest.mark.parametrize("number", [3, 0])
def test_supervisor_is_asked_for_the_feeders_of_the_spec(server: ApiServer, number: int) -> None:
    job = Operated(server, manifest({"spec.feeders.processesPerPod": 2, "spec.feeders.minAvailable": 0}))
    job.settle()
    path = f"{job.path(KIND, job.name)}/scale"
    server.request("PATCH", path, {"spec": {"replicas": number}}, content_type=MERGE)
    job.settle()
    assert job.supervisor.wanted == 2 * number
    assert job.get("Deployment", "mnist-feeders")["spec"]["replicas"] == number
    end(job)
    job.settle()
    assert job.supervisor.wanted is None


def test_higher_worker_register_timeout_replaces_head_and_feeders(job: Operated) -> None:
    def templates() -> list[str]:
        mark = "dataloading.dev/template"
        found = [job.get("Deployment", f"mnist-{role}") for role in ("head", "feeders")]
        return [f["spec"]["template"]["metadata"]["annotations"][mark] for f in found]

    job.settle()
    before = templates()
    job.edit(ray={"managed": {"tuning": {"workerRegisterTimeoutSeconds": 300}}})
    job.settle()
    assert all(old != new for old, new in zip(before, templates(), strict=True))
    for role in ("head", "feeder"):
        settings = json.loads(
            job.get(*job.real(("ConfigMap", f"mnist-settings-{role}")))["data"][f"{role}.json"]
        )
        assert settings["tuning"]["worker_register_timeout_s"] == 300


def test_applied_children_carry_an_annotation_that_prevents_resending(job: Operated) -> None:
    job.settle()
    for key in NAMES:
        assert ANNOTATION_APPLIED in job.get(*job.real(key))["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("nodeSelectr", {"disk": "fast"}, id="unknown"),
        pytest.param("tolerations", "x", id="a-text-for-a-list"),
        pytest.param("nodeSelector", {"a": 1}, id="a-number-for-a-text"),
        pytest.param("automountServiceAccountToken", "yes", id="a-text-for-a-flag"),
    ],
)
def test_invalid_template_field_is_reported_by_name(server: ApiServer, field: str, value: Any):
    job = Operated(server, manifest({f"spec.trainers.job.template.spec.{field}": value}))
    operator = job.operator()
    with pytest.raises(ApiError, match=field):
        for _ in range(9):
            job.reconcile_with(operator)
    with pytest.raises(ApiError):
        job.reconcile_with(operator)
    ready = job.conditions()["Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "ChildRefused")
    assert field in ready["message"]
    assert job.children() == {}, "no head and no feeder waits for trainers that cannot be"


def test_child_found_invalid_is_reported_by_the_users_field(server: ApiServer) -> None:
    env = [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.no"}}}]
    job = Operated(server, manifest({"spec.trainers.job.template.spec.containers[0].env": env}))
    operator = job.operator()
    for _ in range(2):
        with pytest.raises(ApiError):
            job.reconcile_with(operator)
    ready = job.conditions()["Ready"]
    assert ready["reason"] == "ChildRefused"
    assert (
        "spec.trainers.job.template.spec.containers[0].env[1].valueFrom.fieldRef.fieldPath"
        in ready["message"]
    )
    assert job.children() == {}


def test_trainers_are_created_once_the_required_feeders_serve(server: ApiServer) -> None:
    job = Operated(server, manifest({"spec.feeders.replicas": 2, "spec.feeders.minAvailable": 2}))
    job.settle()
    assert job.named() == NAMES - TRAINING
    waits = job.conditions()[ConditionType.TRAINERS_READY]
    assert (waits["reason"], "missing: 2" in waits["message"]) == ("WaitsForFeeders", True)
    job.serves(2)
    job.supervisor.reported = SupervisorStatus(desired=2, ready=1, ray=RayStatus(version="2.60.0"))
    job.settle()
    assert ("Job", "mnist-trainers-0") not in job.children()
    job.supervisor.reported = SupervisorStatus(desired=2, ready=2, ray=RayStatus(version="2.60.0"))
    job.settle()
    assert job.named() == NAMES


def test_trainers_waiting_for_feeders_are_tried_before_feeders_are_made(server: ApiServer) -> None:
    job = Operated(
        server, manifest({"spec.feeders.minAvailable": 1, "spec.trainers.job.template.spec.priority": "high"})
    )
    for _ in range(3):
        with contextlib.suppress(ApiError):
            job.reconcile()
    operator = job.operator()
    for _ in range(2):
        with contextlib.suppress(ApiError):
            job.reconcile_with(operator)
    assert not job.named(), "no head or feeder waits for trainers that cannot be"
    assert "spec.trainers.job.template.spec.priority" in job.conditions()["Ready"]["message"]
    job.edit(trainers={"job": {"template": {"spec": {"priority": None}}}})
    for _ in range(4):
        job.reconcile_with(operator)
    assert job.named() == NAMES - TRAINING
    assert job.conditions()["Ready"]["reason"] != "ChildRefused"
