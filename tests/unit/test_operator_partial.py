"""Jobs of which a part is missing, and how those see a job who wait for it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from observed_jobs import (
    BASE,
    FEEDERS,
    HEAD,
    SUPERVISOR,
    T0,
    TRAINERS,
    after,
    condition,
    decided,
    failed_trainers,
    job,
    keys,
    live,
    pod,
    serving,
)

from dataloaderjob.api.crd import COLUMNS
from dataloaderjob.api.status import ConditionType, DataLoaderJobStatus, Phase
from dataloaderjob_operator.decide import conditions
from dataloaderjob_operator.decide.decision import Decision
from dataloaderjob_operator.decide.events import Reason, events_of
from dataloaderjob_operator.decide.health import ConditionState
from dataloaderjob_operator.decide.observed import Cause, Observed, SupervisorStatus, show_time

PROGRESSING, READY = ConditionType.PROGRESSING, ConditionType.READY
BACKOFF = {"name": "feeder", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}


def one_of_eight(*pods: dict[str, Any], **more: Any) -> Observed:
    """Eight feeders are asked for, and one is needed and serves."""
    whole = serving()
    whole = after(whole, decided(whole))
    return replace(whole, job=job(feeders={"replicas": 8}), pods=(*whole.pods, *pods), **more)


def sick(number: int) -> dict[str, Any]:
    made = pod("feeder", started=False, containerStatuses=[BACKOFF])
    return {**made, "metadata": {**made["metadata"], "name": f"mnist-feeders-{number}"}}


def test_partial_feeder_failure_is_reported_while_the_job_serves():
    observed = one_of_eight(*(sick(number) for number in range(7)))
    made = decided(observed)
    told = condition(made, PROGRESSING)
    assert (told.status, told.reason) == ("True", "FeedersMissing")
    assert told.message == (
        "feeder pods serving: 1 of 8; pod mnist-feeders-0, container feeder: ImagePullBackOff: no such image"
    )
    assert condition(made, READY).status == "True", "the job needs one"
    assert made.status.phase is Phase.RUNNING
    (event,) = events_of(observed.status, made.status)
    assert (event.reason, event.type) == (Reason.FEEDERS_MISSING, "Warning")
    assert "no such image" in event.message


def test_feeders_that_are_merely_starting_cause_no_event():
    observed = one_of_eight()
    made = decided(observed)
    assert condition(made, PROGRESSING).reason == "FeedersStart"
    assert events_of(observed.status, made.status) == ()


def test_quota_and_supervisor_causes_are_reported_too():
    refused = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": "exceeded quota: small",
    }
    children = {**serving().children, **live(FEEDERS, readyReplicas=1, conditions=[refused])}
    told = condition(decided(one_of_eight(children=children)), PROGRESSING)
    assert told.message == (
        "feeder pods serving: 1 of 8; exceeded quota: small; change this pod's resources in "
        "spec.feeders.resources"
    )
    slow = replace(SUPERVISOR, desired=8, cause=Cause("WorkerRegisterTimeout", "f-1: too late"))
    told = condition(decided(one_of_eight(supervisor=slow)), PROGRESSING)
    assert told.message == "feeder pods serving: 1 of 8; f-1: too late"


HUNGRY = Cause(
    "OutOfMemory", "feeder-0: the process that makes index 3 ran out of memory; its pod may use 420 MiB"
)


@pytest.mark.parametrize("replicas", [pytest.param(1, id="all-serve"), pytest.param(8, id="some-missing")])
def test_feeders_out_of_memory_are_reported_while_the_job_serves(replicas: int):
    whole = serving()
    whole = after(whole, decided(whole))
    hungry = replace(SUPERVISOR, desired=replicas, cause=HUNGRY)
    observed = replace(whole, job=job(feeders={"replicas": replicas}), supervisor=hungry)
    made = decided(observed)
    told = condition(made, PROGRESSING)
    assert (told.status, told.reason) == ("True", "OutOfMemory")
    assert HUNGRY.text in told.message
    assert made.status.phase is Phase.RUNNING
    assert made.status.reason == "OutOfMemory", "a column of `kubectl get` has it"
    (event,) = events_of(observed.status, made.status)
    assert (event.reason, event.type) == (Reason.OUT_OF_MEMORY, "Warning")
    assert HUNGRY.text in event.message


def test_oom_killed_feeder_container_is_reported_for_a_minute():
    ended = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": show_time(T0 - timedelta(seconds=20))}
    container = {
        "name": "feeder",
        "ready": True,
        "state": {"running": {}},
        "lastState": {"terminated": ended},
    }
    back = {**pod("feeder", containerStatuses=[container]), "spec": {"memoryLimits": {"feeder": "420Mi"}}}
    whole = serving()
    whole = after(whole, decided(whole))
    whole = replace(whole, pods=(*(p for p in whole.pods if "feeder" not in p["metadata"]["name"]), back))
    made = decided(whole)
    told = condition(made, PROGRESSING)
    assert (told.reason, made.status.reason) == ("OutOfMemory", "OutOfMemory")
    assert "a memory limit of 420Mi: raise spec.feeders.resources.limits.memory" in told.message
    assert made.requeue_after_s == 40.0
    assert decided(whole, 41).status.reason == ""


def test_other_causes_of_missing_feeders_are_not_called_out_of_memory():
    waiting = pod(
        "feeder", started=False, conditions=[{"type": "PodScheduled", "status": "False", "message": "0/3"}]
    )
    told = condition(
        decided(one_of_eight(waiting, supervisor=replace(SUPERVISOR, desired=8, cause=HUNGRY))), PROGRESSING
    )
    assert told.reason == "FeedersMissing"
    assert "0/3" in told.message


def test_feeders_that_never_serve_for_lack_of_memory_report_it():
    made = decided(starting(ready=0, supervisor=replace(SUPERVISOR, desired=8, ready=0, cause=HUNGRY)))
    told = condition(made, ConditionType.FEEDERS_READY)
    assert (told.reason, made.status.reason) == ("OutOfMemory", "OutOfMemory")
    assert HUNGRY.text in told.message


def test_batch_that_ran_out_of_memory_is_the_jobs_reason():
    whole = serving()
    whole = after(whole, decided(whole))
    failed = Cause("OutOfMemory", "trainer-0, rank 0, got from the feeders: 3 feeder processes ended")
    made = decided(replace(whole, supervisor=replace(SUPERVISOR, failure=failed)))
    assert made.status.reason == "OutOfMemory"
    assert condition(made, READY).message == failed.text


def test_reason_is_empty_while_a_job_is_as_requested():
    whole = serving()
    assert decided(whole).status.reason == ""


def test_events_of_missing_feeders_are_looked_up_while_the_job_serves():
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2025-01-01T00:00:00Z"}
    waits = pod("feeder", started=False, conditions=[placed])
    waits["metadata"] |= {"name": "mnist-feeders-9", "uid": "u-9"}
    assert [query.name for query in decided(one_of_eight(waits)).event_queries] == ["mnist-feeders-9"]


def starting(ready: int = 0, least: int = 4, **more: Any) -> Observed:
    """A job of eight feeders, of which `least` are needed; nothing of the trainers is there yet."""
    whole = serving()
    children = {key: child for key, child in whole.children.items() if key[0] != "Job"}
    children |= live(FEEDERS, readyReplicas=ready)
    made = job(feeders={"replicas": 8, "minAvailable": least})
    found = {"supervisor": replace(SUPERVISOR, desired=8, ready=ready), **more}
    return replace(whole, job=made, children=children, pods=(pod("head"), pod("feeder")), **found)


def test_trainers_wait_for_required_feeders_and_the_status_counts_them():
    short = decided(starting(ready=3))
    assert not any(kind == "Job" for kind, _ in keys(short)), "no GPU waits for feeders"
    assert [child["kind"] for child in short.later] == ["ConfigMap", "Job"], "it is tried all the same"
    told = condition(short, ConditionType.TRAINERS_READY)
    assert (told.status, told.reason) == ("False", "WaitsForFeeders")
    assert told.message == (
        "trainers start once 4 feeder pods are serving (feeders.minAvailable); serving: 3, missing: 1"
    )
    assert condition(short, ConditionType.FEEDERS_READY).message == "feeder pods ready: 3 of 4 required"
    assert condition(short, READY).message == "feeder pods ready: 3 of 4 required", (
        "the cause, not what it causes"
    )
    assert short.status.feeders.summary == "3/8"
    enough = decided(starting(ready=4))
    assert TRAINERS in keys(enough)
    assert not enough.later


def test_cause_of_missing_feeders_is_the_cause_for_waiting_trainers():
    waits = starting(ready=3)
    told = condition(decided(replace(waits, pods=(*waits.pods, sick(5)))), READY)
    assert (told.reason, "no such image" in told.message) == ("ImageNotPulled", True)


def test_running_trainers_stay_when_feeders_are_lost():
    without = starting(ready=0)
    made = decided(replace(without, children={**without.children, **live(TRAINERS, active=1)}))
    assert TRAINERS in keys(made)
    assert not made.delete


def test_a_job_that_needs_no_feeder_starts_its_trainers_at_once():
    assert TRAINERS in keys(decided(starting(ready=0, least=0, supervisor=None)))


def test_the_next_attempt_waits_for_feeders_too():
    whole = replace(serving(), job=job(**{"trainers.job.failurePolicy.backoffSeconds": 0}))
    failed = failed_trainers(after(whole, decided(whole)))
    counted = after(failed, decided(failed), supervisor=replace(SUPERVISOR, ready=0))
    gone = {key: child for key, child in counted.children.items() if key[0] != "Job"}
    again = decided(replace(counted, children={**gone, **live(HEAD, FEEDERS)}, pods=()))
    assert not any(kind == "Job" for kind, _ in keys(again))
    assert again.later[-1]["metadata"]["name"] == "mnist-trainers-1"
    served = decided(
        replace(counted, children={**gone, **live(HEAD, FEEDERS)}, pods=(), supervisor=SUPERVISOR)
    )
    assert ("Job", "mnist-trainers-1") in keys(served)


def kstatus(status: DataLoaderJobStatus, generation: int = 1) -> str:
    """What Helm, Flux and kpt make of a status: the generic rules of sigs.k8s.io/cli-utils/pkg/kstatus, in order."""
    if status.observed_generation != generation:
        return "InProgress"
    held = {found.type: found.status for found in status.conditions}
    if held.get("Reconciling") == "True":
        return "InProgress"
    if held.get("Stalled") == "True":
        return "Failed"
    return "Current" if held.get("Ready", "True") == "True" else "InProgress"


def complete() -> Decision:
    whole = after(serving(), decided(serving()))
    trainers = {"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 1}
    return decided(
        replace(whole, children={**whole.children, **live(("Job", "mnist-trainers-0"), **trainers)})
    )


def failed() -> Decision:
    whole = replace(serving(), job=job(**{"trainers.job.failurePolicy": {"maxRestarts": 0}}))
    return decided(failed_trainers(after(whole, decided(whole))))


@pytest.mark.parametrize(
    ("made", "state"),
    [
        (decided(serving()), "Current"),
        (decided(Observed(job=job())), "InProgress"),
        (decided(replace(serving(), children=live(*BASE, HEAD))), "InProgress"),
        (complete(), "Current"),
        (failed(), "Failed"),
    ],
    ids=["serves", "new", "starts", "complete", "failed"],
)
def test_kstatus_shows_completion_and_failure(made: Decision, state: str):
    assert kstatus(made.status) == state


def test_kstatus_reports_an_invalid_spec_as_failed():
    why = ConditionState(False, "InvalidSpec", "found this; use that")
    assert (
        kstatus(conditions.not_ready(DataLoaderJobStatus(), why, 1, T0, refused_texts=frozenset()))
        == "Failed"
    )


def test_end_of_a_job_emits_no_serving_event():
    whole = after(serving(), decided(serving(supervisor=None, pods=())))
    trainers = {"conditions": [{"type": "Complete", "status": "True"}]}
    done = replace(whole, children={**whole.children, **live(("Job", "mnist-trainers-0"), **trainers)})
    assert [event.reason for event in events_of(whole.status, decided(done).status)] == [Reason.COMPLETED]


def test_head_with_a_hung_supervisor_is_replaced_once():
    whole = after(serving(), decided(serving()))
    silent = SupervisorStatus(silent="no answer within 5 s")
    assert decided(replace(whole, supervisor=silent)).delete == ()
    hangs = replace(whole, supervisor=replace(silent, hung=True))
    made = decided(hangs)
    assert made.delete == (HEAD,)
    assert condition(made, ConditionType.HEAD_READY).message.endswith("; the pod is being replaced")
    going = {"metadata": {"name": HEAD[1], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert decided(replace(hangs, children={**hangs.children, HEAD: going})).delete == ()


def test_trainer_summary_counts_running_or_succeeded_of_requested():
    two = job(**{"trainers.job.replicas": 2})
    observed = replace(serving(), job=two)
    assert decided(observed).status.trainers.summary == "1/2"
    over = {"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 2}
    done = replace(
        observed, pods=(), children={**observed.children, **live(("Job", "mnist-trainers-0"), **over)}
    )
    assert decided(done).status.trainers.summary == "2/2"
    starting = replace(observed, pods=(pod("trainer", started=False),))
    assert decided(starting).status.trainers.summary == "0/2", (
        "the Indexed Job counts pods that wait as active"
    )
    assert decided(replace(observed, job=job(suspend=True))).status.trainers.summary == "0/1"


def test_kubectl_columns_have_one_word_headers():
    assert [name for name, *_ in COLUMNS if len(name.split()) != 1] == []


def rolling(*pods: dict[str, Any], made: int = 1, **more: Any) -> Observed:
    """Two feeders serve on their old pods, and their template has changed."""
    whole = serving()
    whole = after(whole, decided(whole))
    status = {"replicas": 2 + made, "readyReplicas": 2, "updatedReplicas": made, **more}
    return replace(
        whole,
        job=job(feeders={"replicas": 2}),
        supervisor=replace(SUPERVISOR, desired=2, ready=2),
        children={**whole.children, **live(FEEDERS, **status)},
        pods=(*whole.pods, *pods),
    )


def new(name: str = "mnist-feeders-new", **status: Any) -> dict[str, Any]:
    made = pod("feeder", started=False, **status)
    return {**made, "metadata": {**made["metadata"], "name": name}}


def test_new_feeders_that_cannot_start_are_reported_during_a_rollout():
    observed = rolling(new(containerStatuses=[BACKOFF]))
    made = decided(observed)
    told = condition(made, PROGRESSING)
    assert (told.status, told.reason) == ("True", "RolloutStuck")
    assert told.message == (
        "the new feeders of a rolling update cannot start: "
        "pod mnist-feeders-new, container feeder: ImagePullBackOff: no such image"
    )
    assert condition(made, READY).status == "True"
    assert made.status.phase is Phase.RUNNING
    (event,) = events_of(observed.status, made.status)
    assert (event.reason, event.type) == (Reason.ROLLOUT_STUCK, "Warning")
    assert events_of(made.status, decided(after(observed, made)).status) == (), "it is told once"


def test_unschedulable_or_quota_refused_new_feeders_are_reported():
    full = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes: Insufficient cpu",
    }
    told = condition(decided(rolling(new(conditions=[full]))), PROGRESSING)
    assert (told.reason, told.message) == (
        "RolloutStuck",
        "the new feeders of a rolling update cannot start: pod mnist-feeders-new: 0/2 nodes: Insufficient cpu",
    )
    refused = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": "exceeded quota",
    }
    told = condition(decided(rolling(made=0, conditions=[refused])), PROGRESSING)
    assert told.message == (
        "the new feeders of a rolling update cannot start: exceeded quota; change this pod's resources in "
        "spec.feeders.resources"
    )


def test_smooth_rollout_is_in_progress_until_no_old_feeder_is_left():
    told = condition(decided(rolling(new())), PROGRESSING)
    assert (told.status, told.reason, told.message) == (
        "True", "FeedersRoll", "rolling update of feeder pods: 1 of 2 created",
    )  # fmt: skip
    assert events_of(rolling(new()).status, decided(rolling(new())).status) == ()
    over = replace(rolling(), children={**rolling().children, **live(FEEDERS, replicas=2, updatedReplicas=2)})
    assert condition(decided(over), PROGRESSING).reason == "AsAskedFor"


def test_new_feeder_that_stays_unready_is_named_after_the_deadline():
    late = {
        "type": "Progressing",
        "status": "False",
        "reason": "ProgressDeadlineExceeded",
        "message": "timed out",
    }
    old = pod("feeder", conditions=[{"type": "Ready", "status": "True"}])
    observed = rolling(new(), conditions=[late])
    observed = replace(
        observed, pods=(old, *(p for p in observed.pods if p["metadata"]["name"] != old["metadata"]["name"]))
    )
    told = condition(decided(observed), PROGRESSING)
    assert told.reason == "RolloutStuck"
    assert "pod mnist-feeders-new did not become ready within" in told.message
    nobody = replace(
        observed, pods=tuple(p for p in observed.pods if p["metadata"]["name"] != "mnist-feeders-new")
    )
    assert condition(decided(nobody), PROGRESSING).message.endswith("cannot start: timed out")


def test_replaced_head_is_not_replaced_for_its_predecessors_hang():
    hung = SupervisorStatus(silent="timeout", hung=True)
    pods = (pod("feeder"), pod("trainer"))
    fresh = replace(serving(), supervisor=hung, pods=pods)
    assert ("Deployment", "mnist-head") not in decided(fresh).delete
    assert ("Deployment", "mnist-head") in decided(replace(fresh, pods=(pod("head"), *pods))).delete
