"""What is diagnosed of a job's pods, which events are listed for it, and what they mean."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from manifests import manifest

from dataloaderjob.api import parse_object
from dataloaderjob.api.status import ConditionType
from dataloaderjob_operator import objects
from dataloaderjob_operator.decide import health
from dataloaderjob_operator.decide.decision import Decision, decide
from dataloaderjob_operator.decide.health import AGAIN_S, SETTLE_S, EventQuery, diagnose, meaning
from dataloaderjob_operator.decide.observed import Observed, Trouble
from dataloaderjob_operator.names import Role

SETUP = objects.OperatorConfig(version="1.0", sidecar_image="example/sidecar:1", root_key=b"r" * 32)
T0 = datetime(2026, 1, 1, tzinfo=UTC)
START = "2026-01-01T00:00:00Z"
TRAINERS = ("Job", "mnist-trainers-0")
QUERY = EventQuery("Pod", "mnist-feeders-a", "u-a")
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
        manifest({"metadata.uid": "u", "metadata.namespace": "team", "spec.trainers.job.replicas": 2})
    )
    return Observed(job=job, pods=pods, children=children or {}, **more)


def decided(at: Observed, seconds: float = SETTLE_S) -> Decision:
    found = decide(at, SETUP, T0 + timedelta(seconds=seconds))
    assert found is not None
    return found


def queried(at: Observed, seconds: float = SETTLE_S) -> list[str]:
    return [query.name for query in decided(at, seconds).event_queries]


def condition(decision: Decision, kind: ConditionType) -> tuple[str, str]:
    return next((c.reason, c.message) for c in decision.status.conditions if c.type == kind)


def test_events_of_a_pod_stuck_before_its_start_are_listed_after_a_while():
    found = observed(pod("head"))
    young = decided(found, 2)
    assert young.event_queries == ()
    assert young.requeue_after_s == SETTLE_S - 2
    old = decided(found)
    assert old.event_queries == (EventQuery("Pod", "mnist-head-a", "u-head-a"),)
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
            id="its-status-has-the-cause",
        ),
    ],
)
def test_no_events_are_listed_for_a_pod_that_runs_or_shows_its_cause(there):
    assert queried(observed(there), 100) == []


def test_events_of_a_few_of_many_pods_are_listed():
    many = [pod("feeder", f"{number:02}") for number in range(50)]
    assert queried(observed(*many, pod("head"))) == ["mnist-head-a", "mnist-feeder-00", "mnist-feeder-01"]


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
def test_events_of_a_job_with_fewer_pods_than_it_asks_for_are_listed(status, names):
    assert queried(observed(children=trainers(**status))) == names


def test_no_events_are_listed_for_a_held_or_finished_job():
    held = observed(children=trainers())
    held = replace(
        held, job=held.job.model_copy(update={"spec": held.job.spec.model_copy(update={"suspend": True})})
    )
    assert queried(held) == []
    over = decided(observed(children=trainers(conditions=[{"type": "Complete", "status": "True"}])))
    assert over.event_queries == ()


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
    found = meaning(QUERY, events)
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
def test_events_without_a_current_warning_report_no_trouble(events):
    assert meaning(QUERY, events) is None


def reported(uid: str, reason: str, message: str, kind: str = "pod", name: str = "p") -> dict[str, Any]:
    return {"event_troubles": {uid: Trouble(name, "", reason, message, kind=kind)}}


@pytest.mark.parametrize(
    ("there", "children", "uid", "kind"),
    [
        (pod("head"), {}, "u-head-a", ConditionType.HEAD_READY),
        (pod("feeder"), {}, "u-feeder-a", ConditionType.FEEDERS_READY),
        (pod("trainer"), {}, "u-trainer-a", ConditionType.SIDECARS_READY),
        (pod("trainer"), trainers(active=1), "u-job", ConditionType.SIDECARS_READY),
    ],
)
def test_cause_from_events_is_in_the_condition_of_its_part(there, children, uid, kind):
    names = {"head": "mnist-head", "feeder": "mnist-feeders"}
    deployments = {("Deployment", name): {"metadata": {"name": name}} for name in names.values()}
    found = observed(
        there, children={**deployments, **children}, **reported(uid, "VolumeNotMounted", MISSING)
    )
    assert condition(decided(found), kind) == ("VolumeNotMounted", f"pod p: {MISSING}")


def test_cause_of_an_object_no_longer_held_up_is_in_no_condition():
    found = observed(pod("trainer", phase="Running"), **reported("u-trainer-a", "VolumeNotMounted", MISSING))
    assert condition(decided(found), ConditionType.SIDECARS_READY)[0] == "PodsStart"


def test_job_refused_its_pods_finally_fails_with_that_cause():
    found = observed(
        children=trainers(), **reported("u-job", "PodsRefused", "exceeded quota", "Job", "mnist-trainers-0")
    )
    found = replace(found, status=decided(found).status)
    failed = decided(found, 1000)
    reason, message = condition(failed, ConditionType.FAILED)
    assert reason == "StartupDeadlineExceeded"
    assert message.endswith("Job mnist-trainers-0: exceeded quota")


SERVES = {"conditions": [{"type": "PodScheduled", "status": "True"}], "phase": "Running"}
FULL = "0/3 nodes are available"


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({}, id="held-up"),
        pytest.param(SERVES, id="serving"),
        pytest.param(
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": FULL}]}, id="no-node"
        ),
        pytest.param(
            {"containerStatuses": [{"name": "c", "state": {"terminated": {"exitCode": 1}}}]}, id="ended"
        ),
    ],
)
@pytest.mark.parametrize("seconds", [SETTLE_S, 10_000], ids=["at-first", "past-the-deadline"])
@pytest.mark.parametrize("failed", [False, True], ids=["trains", "failed"])
def test_a_decision_diagnoses_each_pod_once(monkeypatch, status, seconds, failed):
    names = [f"{role}-{number}" for role in ("head", "feeder", "trainer") for number in range(3)]
    pods = [pod(*name.split("-"), **status) for name in names]
    pods[0]["metadata"]["deletionTimestamp"] = START
    ended = {"conditions": [{"type": "Failed", "status": "True"}]} if failed else {}
    deployments = {("Deployment", f"mnist-{name}"): {"metadata": {}} for name in ("head", "feeders")}
    found = observed(*pods, children={**deployments, **trainers(**ended)})
    found = replace(found, status=decided(found, 0).status)
    calls: list[str] = []
    diagnosed = health.trouble_of

    def count(each: Any) -> Any:
        calls.append(each["metadata"]["name"])
        return diagnosed(each)

    monkeypatch.setattr(health, "trouble_of", count)
    decided(found, seconds)
    assert sorted(calls) == sorted(f"mnist-{name}" for name in names)


def test_first_trouble_is_of_a_remaining_pod_per_role_and_any_pod_per_job():
    full = {"conditions": [{"type": "PodScheduled", "status": "False", "message": FULL}]}
    leaving, second, third = (pod("feeder", name, **full) for name in "abc")
    leaving["metadata"]["deletionTimestamp"] = START
    found = diagnose(observed(third, leaving, second, pod("head")))
    assert found.trouble is not None
    assert found.trouble.pod == "mnist-feeder-a"
    feeders, head = found.roles[Role.FEEDER], found.roles[Role.HEAD]
    assert feeders.trouble is not None
    assert feeders.trouble.pod == "mnist-feeder-b"
    assert head.trouble is None
    assert [query.name for query, _ in head.held_up] == ["mnist-head-a"]
