"""Whatever fails at a job, its status says so, and the rest goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from memory_api import KEY, Job, Supervisors, Write
from observed_jobs import SUPERVISOR

from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide import decision
from dataloaderjob_operator.decide.stages import ChildPart
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.monitoring import Metrics

WEBHOOK = ApiError(500, 'failed calling webhook "v.example.com": connection refused')
CHILDREN = 12
FAILS = "the operator cannot process this job"
HOSTNETWORK = {"spec.trainers.job.template.spec.hostnetwork": True}


def refuses(kind: str, verbs: str, error: ApiError) -> Callable[[Write], BaseException | None]:
    return lambda write: error if write[1] == kind and write[0] in verbs.split() else None


def reasons(job: Job) -> list[tuple[str, str]]:
    return [(event["reason"], event["message"]) for event in job.api.events]


def test_spec_refused_by_the_models_gives_one_condition_and_one_event():
    job = Job({"spec.sidecar.resources": {"limits": {"memory": "10E"}}})
    assert job.reconcile() is None
    ready, stalled = job.condition("Ready"), job.condition("Stalled")
    assert (ready["status"], ready["reason"], stalled["status"]) == ("False", "InvalidSpec", "True")
    assert "spec.sidecar.resources.limits.memory" in ready["message"]
    assert job.status["observedGeneration"] == 1
    assert [reason for reason, _ in reasons(job)] == ["NotReady"]
    assert job.made() == set()
    job.reconcile()
    assert job.api.writes == []
    job.edit(sidecar={})
    job.reconcile()
    assert len(job.made()) == CHILDREN
    assert job.condition("Stalled")["status"] == "False"


def test_invalid_edit_of_a_running_job_is_reported_and_children_stay():
    job = Job()
    job.reconcile()
    job.edit(sidecar={"resources": {"limits": {"memory": "10E"}}})
    job.reconcile()
    assert job.condition("Ready")["reason"] == "InvalidSpec"
    assert len(job.made()) == CHILDREN, "what is there stays"


def test_metadata_of_a_later_kubernetes_is_read():
    job = Job({"metadata.audience": {"new": True}})
    job.reconcile()
    assert len(job.made()) == CHILDREN


def test_unknown_field_of_a_later_crd_is_dropped_with_one_warning():
    job = Job({"spec.checkpoints": {"every": 1}, "spec.loader.pinned": True})
    for _ in range(3):
        job.reconcile()
    assert len(job.made()) == CHILDREN
    (text,) = [message for reason, message in reasons(job) if reason == "UnknownField"]
    assert text == (
        "spec.checkpoints: found a field from another release; use the operator from that release;"
        " spec.loader.pinned: found a field from another release; use the operator from that release"
    )


def test_likely_misspelt_field_gets_one_warning_and_is_passed_on():
    job = Job(HOSTNETWORK)
    for _ in range(3):
        job.reconcile()
    assert len(job.made()) == CHILDREN
    (text,) = [message for reason, message in reasons(job) if reason == "UnknownField"]
    assert text == "spec.trainers.job.template.spec.hostnetwork: found an unknown field; use hostNetwork"
    assert job.api.events[0]["type"] == "Warning"


def test_refusal_of_a_misspelt_field_includes_the_remedy():
    error = ApiError(500, ".spec.template.spec.hostnetwork: field not declared in schema")
    job = Job(HOSTNETWORK, refuses("Job", "try apply", error))
    for _ in range(2):
        with pytest.raises(ApiError):
            job.reconcile()
    assert job.condition("Ready")["message"] == (
        "spec.trainers.job.template.spec.hostnetwork: field not declared in schema;"
        " spec.trainers.job.template.spec.hostnetwork: found an unknown field; use hostNetwork"
    )
    assert job.made() == set(), "no head and no feeder waits for trainers that cannot be"


def test_children_are_tried_before_the_first_is_made_and_never_again():
    job = Job()
    job.reconcile()
    tried = [name for verb, _, name in job.api.writes if verb == "try"]
    workloads = ["mnist-head", "mnist-feeders", "mnist-trainers-0"]
    assert tried == [name for workload in workloads for name in (workload, f"{workload}-")]
    verbs = [verb for verb, *_ in job.api.writes]
    assert verbs == ["status", *["try"] * 6, "create", *["apply"] * (CHILDREN - 1)]
    job.reconcile()
    job.edit(feeders={"replicas": 3})
    job.reconcile()
    assert "try" not in {verb for verb, *_ in job.api.writes}


def test_webhook_without_dry_run_support_does_not_block_creation():
    error = ApiError(400, "admission webhook v.example.com does not support dry run")
    job = Job(fault=refuses("Deployment", "try", error))
    job.reconcile()
    assert len(job.made()) == CHILDREN


LIMIT_RANGE = (
    'pods "mnist-feeders-x2kq7" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi'
)
LIMIT_RANGE_TOLD = (
    'pods "mnist-feeders" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi; '
    "change this pod's resources in spec.feeders.resources"
)
PRIORITY = 'pods "mnist-trainers-0" is forbidden: no PriorityClass with name high was found'
PRIORITY_TOLD = f"spec.trainers.job.template.spec.priorityClassName: {PRIORITY}"


def refuses_pods(of: str, error: ApiError):
    return lambda write: error if write[:2] == ("try", "Pod") and write[2].startswith(of) else None


@pytest.mark.parametrize(
    ("workload", "said", "told"),
    [
        ("mnist-feeders", LIMIT_RANGE, LIMIT_RANGE_TOLD),
        ("mnist-trainers", PRIORITY, PRIORITY_TOLD),
    ],
)
def test_refusal_of_pods_is_reported_before_anything_is_created(workload: str, said: str, told: str):
    job = Job(
        {"spec.trainers.job.template.spec.priorityClassName": "high"},
        refuses_pods(workload, ApiError(403, said)),
    )
    for _ in range(2):
        with pytest.raises(ApiError):
            job.reconcile()
    assert job.condition("Ready")["reason"] == "ChildRefused"
    assert job.condition("Ready")["message"] == told
    assert job.made() == set()
    job.api.fault = lambda _: None
    job.reconcile()
    assert len(job.made()) == CHILDREN


@pytest.mark.parametrize(
    "said",
    [
        'pods "mnist-head-x" is forbidden: exceeded quota: team, requested: limits.cpu=2, used: limits.cpu=8',
        'pods is forbidden: User "system:serviceaccount:ops:r-operator" cannot create resource "pods" in API group ""',
        "admission webhook v.example.com does not support dry run",
        "admission webhook pods.example.com denied the request: a pod must be owned by a ReplicaSet or a Job",
        'Internal error occurred: failed calling webhook "pods.example.com": no endpoints available',
        "ValidatingAdmissionPolicy 'owned' with binding 'owned' denied request: failed expression",
        'pods "mnist-head-x" is forbidden: error looking up service account a/default: not found',
        'pods "mnist-head-x" is forbidden: status unknown for quota: team, resources: pods',
        'Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal number 1e+300',
    ],
)
def test_inconclusive_trial_does_not_block_creation(said: str):
    job = Job(fault=refuses_pods("", ApiError(403, said)))
    job.reconcile()
    assert len(job.made()) == CHILDREN


@pytest.mark.parametrize("verb", ["try", "apply"])
def test_transient_error_is_reported_after_its_third_repetition(verb: str):
    job = Job(fault=refuses("Deployment", verb, WEBHOOK))
    told = []
    for _ in range(4):
        with pytest.raises(ApiError):
            job.reconcile()
        told.append(job.condition("Ready")["reason"] == "ChildRefused")
    assert told == [False, False, False, True], "the pass after the third error"
    assert "failed calling webhook" in job.condition("Ready")["message"]
    job.api.fault = lambda _: None
    assert job.reconcile() == 0.0, "due at once"
    job.reconcile()
    assert job.condition("Ready")["reason"] != "ChildRefused"
    assert len(job.made()) == CHILDREN


def test_a_refusal_is_forgotten_once_its_child_waits_for_others_again():
    job = Job({"spec.feeders.minAvailable": 1}, refuses("Job", "apply", ApiError(403, "quota")))
    job.operator.supervisors = supervisors = Supervisors()
    supervisors.reported = SUPERVISOR
    for _ in range(2):
        with pytest.raises(ApiError, match="quota"):
            job.reconcile()
    assert job.condition("Ready")["reason"] == "ChildRefused"
    supervisors.reported = replace(SUPERVISOR, ready=0)
    assert job.reconcile() == 0.0
    assert job.reconcile() != 0.0, "nothing is refused any more"
    assert job.condition("TrainersReady")["reason"] == "WaitsForFeeders"
    assert job.condition("Ready")["reason"] != "ChildRefused"


def test_refused_child_does_not_block_the_others():
    job = Job(fault=refuses("ConfigMap", "apply", ApiError(403, "quota")))
    with pytest.raises(ApiError, match="quota"):
        job.reconcile()
    assert len(job.made()) == CHILDREN - 3


def test_throttling_api_server_is_not_asked_for_each_child():
    job = Job(fault=lambda write: ApiError(429, "slow down", 1.0) if write[0] == "apply" else None)
    with pytest.raises(ApiError):
        job.reconcile()
    assert [verb for verb, *_ in job.api.writes].count("apply") == 1
    assert job.operator.children.refused(KEY) == ""


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The builder of the trainers fails from then on."""

    def fails(*_: object) -> list[Manifest]:
        raise TypeError("no template")

    return lambda: monkeypatch.setitem(decision._BUILDERS, ChildPart.TRAINERS, fails)


def test_child_that_cannot_be_built_gives_condition_metric_and_traceback(
    caplog: pytest.LogCaptureFixture, breaks: Callable[[], None]
):
    breaks()
    job = Job()
    waits = [job.reconcile() for _ in range(3)]
    ready, stalled = job.condition("Ready"), job.condition("Stalled")
    assert (ready["reason"], stalled["status"]) == ("NotUnderstood", "True")
    assert "TypeError" in ready["message"]
    assert job.made() == set(), "no head and no feeder waits for trainers that cannot be"
    assert [wait and wait >= 60 for wait in waits] == [True] * 3
    assert [record.exc_info is not None for record in caplog.records if record.message == FAILS] == [True]
    assert bugs(job.operator.metrics) == 3
    assert [reason for reason, _ in reasons(job)].count("NotReady") == 1


def bugs(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("dataloaderjob_operator_reconcile_errors_total", {"kind": "bug"})


def test_child_that_fails_during_a_run_deletes_nothing_and_others_update(
    breaks: Callable[[], None],
):
    job = Job()
    job.reconcile()
    breaks()
    job.edit(feeders={"replicas": 5})
    job.reconcile()
    assert len(job.made()) == CHILDREN
    assert job.api.objects["Deployment", "mnist-feeders"]["spec"]["replicas"] == 5
    assert job.condition("Ready")["reason"] == "NotUnderstood"


@pytest.mark.parametrize(
    ("field", "value", "below"),
    [
        ("initContainers", 7, ""),
        ("initContainers", [{"name": 7}], "[0].name"),
        (
            "initContainers",
            [{"name": "a", "resources": {"limits": {"cpu": "b"}}}],
            "[0].resources.limits.cpu",
        ),
        ("securityContext", "none", ""),
        ("imagePullSecrets", ["pull"], "[0]"),
        ("containers[0].ports", 80, ""),
        ("containers[0].volumeMounts", [None], "[0]"),
        ("containers[0].envFrom", "secret", ""),
        ("containers[0].securityContext", [], ""),
    ],
)
def test_template_field_of_wrong_type_is_reported_with_a_remedy(field: str, value: object, below: str):
    path = f"spec.trainers.job.template.spec.{field}"
    job = Job({path: value})
    job.reconcile()
    ready = job.condition("Ready")
    assert ready["reason"] == "InvalidSpec"
    assert f"{path}{below}: found" in ready["message"]
    assert "; use " in ready["message"]
    assert job.made() == set()


def test_error_in_the_decision_itself_is_a_condition(monkeypatch: pytest.MonkeyPatch):
    job = Job()
    job.reconcile()

    def fails(*_: object, **__: object) -> None:
        raise KeyError("conditions")

    monkeypatch.setattr("dataloaderjob_operator.decide.decision.diagnose", fails)
    assert job.reconcile() == 60.0
    assert job.condition("Ready")["reason"] == "NotUnderstood"
    assert "KeyError" in job.condition("Ready")["message"]
    monkeypatch.undo()
    job.reconcile()
    assert job.condition("Ready")["reason"] != "NotUnderstood"


def test_unwritable_status_blocks_no_child_and_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    job = Job(fault=refuses("DataLoaderJob", "status", ApiError(500, "etcd has no room")))
    with pytest.raises(ApiError, match="no room"):
        job.reconcile()
    assert len(job.made()) == CHILDREN
    gauge = "dataloaderjob_operator_statuses_unwritten"
    assert job.operator.metrics.registry.get_sample_value(gauge) == 1
    assert "cannot write the status: 500: etcd has no room" in [r.message for r in caplog.records]
    assert job.operator.cannot_write() == "", "one failure is no remark"
    job.operator.unwritten[KEY] -= 100
    assert job.operator.cannot_write().startswith("cannot write the status of team/mnist for 100 s")
    job.api.fault = lambda _: None
    job.reconcile()
    assert job.operator.metrics.registry.get_sample_value(gauge) == 0


def test_an_attempt_that_cannot_be_counted_is_not_replaced():
    job = Job()
    job.reconcile()
    failed = job.api.objects["Job", "mnist-trainers-0"]
    over = {"conditions": [{"type": "Failed", "status": "True"}]}
    job.put({**failed, "status": over})
    job.api.fault = refuses("DataLoaderJob", "status", ApiError(500, "etcd has no room"))
    with pytest.raises(ApiError):
        job.reconcile()
    assert [verb for verb, *_ in job.api.writes] == ["status"]
    assert "Job/mnist-trainers-0" in job.made()


def test_job_of_another_controller_is_left_alone_with_one_event():
    job = Job({"spec.managedBy": "example.com/other"})
    for _ in range(2):
        assert job.reconcile() is None
    assert (job.made(), job.status) == (set(), {})
    ((reason, text),) = reasons(job)
    assert reason == "ManagedElsewhere"
    assert "example.com/other" in text
    assert "dataloading.dev/operator" in text


CANARY = "example.com/canary"


@pytest.mark.parametrize(
    ("named", "first", "second"),
    [
        (None, True, False),
        ("dataloading.dev/operator", True, False),
        (CANARY, False, True),
        ("example.com/c", False, False),
    ],
)
def test_exactly_one_of_two_operators_handles_a_job(named: str | None, first: bool, second: bool):
    for canary, works in ((False, first), (True, second)):
        job = Job({} if named is None else {"spec.managedBy": named})
        job.operator.setup = replace(job.operator.setup, managed_by=CANARY if canary else "")
        job.reconcile()
        assert (len(job.made()) == CHILDREN, bool(job.status)) == (works, works)
        said = "ManagedElsewhere" in dict(reasons(job))
        assert said == (not works and not canary), "one of them says it"


def test_the_operators_own_name_is_reserved_for_it():
    job = Job({"spec.managedBy": "dataloading.dev/operator"})
    job.reconcile()
    assert len(job.made()) == CHILDREN


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_odd_ports_and_tolerations_are_left_to_the_api_server():
    """Of the head's container, whose own ports have names."""
    path = "spec.ray.managed.head.template.spec"
    head = [{"name": "head", "ports": [{"containerPort": 80}]}]
    job = Job({f"{path}.containers": head, f"{path}.tolerations": [{"key": ["a"]}]})
    job.reconcile()
    assert len(job.made()) == CHILDREN
    pod = job.api.objects["Deployment", "mnist-head"]["spec"]["template"]["spec"]
    assert {"containerPort": 80} in pod["containers"][0]["ports"]
