"""What is asked about a job that is held up, and what the answers mean."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from manifests import manifest

from dataloaderjob.api import parse_object
from dataloaderjob.api.status import ConditionType
from dataloaderjob_operator import objects
from dataloaderjob_operator.decide import event_causes
from dataloaderjob_operator.decide.decision import Decision, decide
from dataloaderjob_operator.decide.event_causes import AGAIN_S, SETTLE_S, Question, meaning
from dataloaderjob_operator.decide.observed import Observed

SETUP = objects.OperatorConfig(version="1.0", sidecar_image="example/sidecar:1", root_key=b"r" * 32)
T0 = datetime(2026, 1, 1, tzinfo=UTC)
START = "2026-01-01T00:00:00Z"
TRAINERS = ("Job", "mnist-trainers-0")
QUESTION = Question("Pod", "mnist-feeders-a", "u-a")
MISSING = 'MountVolume.SetUp failed for volume "data" : secret "data" not found'


def pod(role: str, name: str = "a", **status: Any) -> dict[str, Any]:
    """One that has a node and no container yet."""
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": START}
    waits = [{"name": role, "state": {"waiting": {"reason": "ContainerCreating"}}}]
    return {
        "metadata": {
            "name": f"mnist-{role}-{name}", "uid": f"u-{role}-{name}", "creationTimestamp": START,
            "labels": {"dataloading.dev/role": role},
        },
        "status": {"phase": "Pending", "conditions": [placed], "containerStatuses": waits, **status},
    }  # fmt: skip


def trainers(**status: Any) -> dict[tuple[str, str], dict[str, Any]]:
    metadata = {"name": TRAINERS[1], "uid": "u-job", "creationTimestamp": START}
    return {TRAINERS: {"metadata": metadata, "spec": {"completions": 2}, "status": status}}


def observed(*pods: dict[str, Any], children: Any = None, **more: Any) -> Observed:
    job = parse_object(
        manifest({"metadata.uid": "u", "metadata.namespace": "team", "spec.trainer.replicas": 2})
    )
    return Observed(job=job, pods=pods, children=children or {}, **more)


def decided(look: Observed, seconds: float = SETTLE_S) -> Decision:
    found = decide(look, SETUP, T0 + timedelta(seconds=seconds))
    assert found is not None
    return found


def asked(look: Observed, seconds: float = SETTLE_S) -> list[str]:
    return [question.name for question in decided(look, seconds).questions]


def condition(decision: Decision, kind: ConditionType) -> tuple[str, str]:
    return next((c.reason, c.message) for c in decision.status.conditions if c.type == kind)


def test_a_pod_that_its_node_does_not_start_is_asked_about_after_a_while():
    look = observed(pod("head"))
    young = decided(look, 2)
    assert young.questions == ()
    assert young.requeue_after_s == SETTLE_S - 2
    old = decided(look)
    assert old.questions == (Question("Pod", "mnist-head-a", "u-head-a"),)
    assert old.requeue_after_s == AGAIN_S


RUNS = {"containerStatuses": [{"name": "head", "state": {"running": {}}}]}


@pytest.mark.parametrize(
    "there",
    [
        pytest.param(pod("head", phase="Running"), id="it-runs"),
        pytest.param(pod("head", **RUNS), id="a-container-runs"),
        pytest.param(
            pod("head", initContainerStatuses=RUNS["containerStatuses"]), id="an-init-container-runs"
        ),
        pytest.param(pod("head", conditions=[]), id="it-has-no-node-yet"),
        pytest.param(
            pod("head", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]),
            id="no-node-takes-it",
        ),
        pytest.param(
            pod(
                "head",
                containerStatuses=[
                    {"name": "head", "state": {"waiting": {"reason": "CreateContainerConfigError"}}}
                ],
            ),
            id="its-status-tells-why",
        ),
    ],
)
def test_nothing_is_asked_about_a_pod_that_runs_or_tells_by_itself(there):
    assert asked(observed(there), 100) == []


def test_a_few_of_many_are_asked_about():
    many = [pod("feeder", f"{number:02}") for number in range(50)]
    assert asked(observed(*many, pod("head"))) == ["mnist-head-a", "mnist-feeder-00", "mnist-feeder-01"]


@pytest.mark.parametrize(
    ("status", "names"),
    [
        ({}, ["mnist-trainers-0"]),
        ({"active": 1}, ["mnist-trainers-0"]),
        ({"active": 2}, []),
        ({"active": 1, "succeeded": 1}, []),
        ({"conditions": [{"type": "FailureTarget", "status": "True"}]}, []),
    ],
)
def test_a_job_with_fewer_pods_than_it_asks_for_is_asked_about(status, names):
    assert asked(observed(children=trainers(**status))) == names


def test_nothing_is_asked_about_a_job_that_is_held_or_over():
    held = observed(children=trainers())
    held = replace(
        held, job=held.job.model_copy(update={"spec": held.job.spec.model_copy(update={"suspend": True})})
    )
    assert asked(held) == []
    over = decided(observed(children=trainers(conditions=[{"type": "Complete", "status": "True"}])))
    assert over.questions == ()


def event(kind: str, reason: str, message: str = "", second: int = 0, **more: Any) -> dict[str, Any]:
    moment = f"2026-01-01T00:00:{second:02}Z"
    return {"type": kind, "reason": reason, "message": message, "lastTimestamp": moment, **more}


@pytest.mark.parametrize(
    ("events", "reason", "message"),
    [
        ([event("Warning", "FailedMount", MISSING)], "VolumeNotMounted", MISSING),
        (
            [event("Warning", "FailedAttachVolume", "Multi-Attach error for volume v")],
            "VolumeNotAttached",
            "Multi-Attach error for volume v",
        ),
        (
            [
                event(
                    "Warning", "FailedCreatePodSandBox", f'failed to setup network for sandbox "{"ab1" * 20}"'
                )
            ],
            "SandboxNotCreated",
            'failed to setup network for sandbox "…"',
        ),
        (
            [
                event(
                    "Warning",
                    "FailedCreate",
                    'Error creating: pods "mnist-trainers-0-0-x7k2p" is forbidden: exceeded quota: cpu',
                )
            ],
            "PodsRefused",
            "a pod is forbidden: exceeded quota: cpu",
        ),
        (
            [event("Warning", "FailedMount", "old", 1), event("Warning", "FailedAttachVolume", "new", 2)],
            "VolumeNotAttached",
            "new",
        ),
        (
            [event("Normal", "Pulling", second=1), event("Warning", "FailedMount", MISSING, 2)],
            "VolumeNotMounted",
            MISSING,
        ),
        ([event("Warning", "SomethingNew", "of a later kubelet")], "SomethingNew", "of a later kubelet"),
        ([event("Warning", "no reason at all", "")], "Warning", "no reason at all"),
        (
            [
                event(
                    "Warning", "FailedMount", "often", series={"lastObservedTime": "2026-01-01T00:00:09.5Z"}
                ),
                event("Warning", "FailedAttachVolume", "once", 5),
            ],
            "VolumeNotMounted",
            "often",
        ),
    ],
)
def test_the_newest_warning_is_the_cause(events, reason, message):
    found = meaning(QUESTION, events)
    assert found is not None
    assert (found.reason, found.message) == (reason, message)
    assert str(found) == f"pod mnist-feeders-a: {message}"


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event("Normal", "Scheduled"), event("Normal", "Pulling", second=3)],
        [event("Warning", "FailedMount", MISSING, 1), event("Normal", "Pulling", second=2)],
        [event("Warning", "FailedCreate", "quota", 1), event("Normal", "SuccessfulCreate", second=2)],
    ],
)
def test_what_has_moved_on_is_in_no_trouble(events):
    assert meaning(QUESTION, events) is None


def heard(uid: str, reason: str, message: str, kind: str = "pod", name: str = "p") -> dict[str, Any]:
    return {"heard": {uid: event_causes.Trouble(name, "", reason, message, kind=kind)}}


@pytest.mark.parametrize(
    ("there", "children", "uid", "kind"),
    [
        (pod("head"), {}, "u-head-a", ConditionType.HEAD_READY),
        (pod("feeder"), {}, "u-feeder-a", ConditionType.FEEDERS_READY),
        (pod("trainer"), {}, "u-trainer-a", ConditionType.SIDECARS_READY),
        (pod("trainer"), trainers(active=1), "u-job", ConditionType.SIDECARS_READY),
    ],
)
def test_what_was_heard_is_in_the_condition_of_its_part(there, children, uid, kind):
    names = {"head": "mnist-head", "feeder": "mnist-feeders"}
    deployments = {("Deployment", name): {"metadata": {"name": name}} for name in names.values()}
    look = observed(there, children={**deployments, **children}, **heard(uid, "VolumeNotMounted", MISSING))
    assert condition(decided(look), kind) == ("VolumeNotMounted", f"pod p: {MISSING}")


def test_what_was_heard_of_something_that_is_held_up_no_longer_is_not_told():
    look = observed(pod("trainer", phase="Running"), **heard("u-trainer-a", "VolumeNotMounted", MISSING))
    assert condition(decided(look), ConditionType.SIDECARS_READY)[0] == "PodsStart"


def test_a_job_that_was_refused_its_pods_fails_with_that_cause_in_the_end():
    look = observed(
        children=trainers(), **heard("u-job", "PodsRefused", "exceeded quota", "Job", "mnist-trainers-0")
    )
    look = replace(look, status=decided(look).status)
    failed = decided(look, 1000)
    reason, message = condition(failed, ConditionType.FAILED)
    assert reason == "StartupDeadlineExceeded"
    assert message.endswith("Job mnist-trainers-0: exceeded quota")
