"""What the operator decides from a supervisor's status: conditions, metrics, and for how many feeders it asks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from observed_jobs import (
    FEEDERS,
    HEAD,
    RAY,
    SUPERVISOR,
    T0,
    TRAINERS,
    after,
    condition,
    decided,
    failed_trainers,
    job,
    live,
    pod,
    serving,
)

from dataloaderjob.api.status import ConditionType, LoaderStatus, Phase
from dataloaderjob.core.supervision import Rates
from dataloaderjob_operator.decide.observed import Cause, Observed, SupervisorStatus

COMPLETE = live(TRAINERS, conditions=[{"type": "Complete", "status": "True"}])
RATES = Rates(batches_per_s=10, nbytes_per_s=1e9, stall=0.05, occupancy=0.5)
TIMEOUT = Cause("WorkerRegisterTimeout", "feeder-0: raise spec.ray.managed.tuning", "10.0.0.7")
NO_ROOM = Cause("NoRoom", "feeder-0: no node has room")
MISSING = Cause("ModuleMissing", "sidecar-t, rank 0, got from feeder-0: no module x", "10.0.0.7")


def with_ip(role: str) -> dict[str, Any]:
    return pod(role, podIP="10.0.0.7")


def starting(**more: Any) -> Observed:
    """A job whose pods are ready, and whose supervisor has not reported."""
    observed = replace(serving(), supervisor=None, **more)
    return after(observed, decided(replace(observed, children={}, pods=())))


def feeders(observed: Observed) -> tuple[str, str, str]:
    found = condition(decided(observed), ConditionType.FEEDERS_READY)
    return found.status, found.reason, found.message


def head(observed: Observed) -> tuple[str, str]:
    found = condition(decided(observed), ConditionType.HEAD_READY)
    return found.status, found.reason


@pytest.mark.parametrize(
    ("supervisor", "expected"),
    [
        pytest.param(None, ("False", "SupervisorStarts"), id="not reported yet"),
        pytest.param(SupervisorStatus(), ("False", "RayStarts"), id="without Ray"),
        pytest.param(SUPERVISOR, ("True", "Serving"), id="serves"),
        pytest.param(SupervisorStatus(silent="refused"), ("False", "SupervisorSilent"), id="silent"),
    ],
)
def test_a_head_is_ready_when_its_supervisor_answers_and_has_ray(
    supervisor: SupervisorStatus, expected: tuple[str, str]
):
    assert head(replace(starting(), supervisor=supervisor)) == expected


def test_restarted_operator_keeps_the_status_until_it_has_polled():
    observed = serving()
    running = after(observed, decided(observed), supervisor=None)
    assert decided(running, 99).status == running.status
    silent = replace(running, supervisor=SupervisorStatus(silent="[Errno 111] refused"))
    made = decided(silent)
    assert made.status.phase == Phase.DEGRADED
    assert "does not respond: [Errno 111] refused" in condition(made, ConditionType.HEAD_READY).message
    assert condition(made, ConditionType.FEEDERS_READY).status == "True", "batches come without a supervisor"


@pytest.mark.parametrize(
    ("supervisor", "pods_ready", "expected"),
    [
        pytest.param(None, 1, ("False", "FeedersStart", "feeder pods serving: 0 of 1 required"), id="not reported yet"),
        pytest.param(SUPERVISOR, 1, ("True", "Serving", "feeder pods serving: 1 or more"), id="serves"),
        pytest.param(SUPERVISOR, 0, ("True", "Serving", "feeder pods serving: 1 or more"), id="it knows better"),
        pytest.param(
            SupervisorStatus(desired=1, ray=RAY, cause=TIMEOUT), 1,
            ("False", "WorkerRegisterTimeout",
             "feeder pods serving: 0 of 1 required; pod mnist-feeder-0: feeder-0: raise spec.ray.managed.tuning"),
            id="never registers",
        ),
        pytest.param(
            SupervisorStatus(desired=1, ray=RAY, cause=NO_ROOM), 1,
            ("False", "NoRoom", "feeder pods serving: 0 of 1 required; feeder-0: no node has room"),
            id="no room in pods that are there",
        ),
        pytest.param(
            SupervisorStatus(desired=1, ray=RAY, cause=NO_ROOM), 0,
            ("False", "PodsStart", "feeder pods ready: 0 of 1 required"),
            id="no room for want of pods",
        ),
        pytest.param(
            replace(SUPERVISOR, failure=MISSING), 1,
            ("False", "ModuleMissing", "pod mnist-feeder-0: sidecar-t, rank 0, got from feeder-0: no module x"),
            id="a trainer cannot use them",
        ),
    ],
)  # fmt: skip
def test_feeder_readiness_follows_the_supervisors_report(
    supervisor: SupervisorStatus | None, pods_ready: int, expected: tuple[str, str, str]
):
    observed = starting(pods=(pod("head"), with_ip("feeder"), pod("trainer")))
    children = {**observed.children, **live(FEEDERS, readyReplicas=pods_ready, replicas=1)}
    assert feeders(replace(observed, supervisor=supervisor, children=children)) == expected


def test_pods_own_trouble_is_reported_before_the_supervisors_cause():
    waiting = {"name": "feeder", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
    observed = starting(pods=(pod("feeder", containerStatuses=[waiting]),))
    lacking = replace(
        observed,
        children={**observed.children, **live(FEEDERS)},
        supervisor=SupervisorStatus(ray=RAY, cause=NO_ROOM),
    )
    assert feeders(lacking)[1] == "ImageNotPulled"


def test_feeder_processes_are_counted_in_whole_pods():
    spec = {"replicas": 3, "processesPerPod": 4, "minAvailable": 2}
    observed = replace(starting(), job=job(feeders=spec))
    for ready, pods, status in ((12, 3, "True"), (11, 2, "True"), (7, 1, "False")):
        made = decided(replace(observed, supervisor=SupervisorStatus(desired=12, ready=ready, ray=RAY)))
        assert (made.status.feeders.ready, made.status.feeders.summary) == (pods, f"{pods}/3")
        assert condition(made, ConditionType.FEEDERS_READY).status == status
        assert made.feeders == 12


def test_held_or_finished_job_is_not_polled():
    observed = serving()
    running = after(observed, decided(observed))
    assert decided(running).feeders == 1
    assert decided(replace(running, job=job(suspend=True))).feeders is None
    done = {
        **running.children,
        **live(("Job", "mnist-trainers-0"), conditions=[{"type": "Complete", "status": "True"}]),
    }
    assert decided(replace(running, children=done)).feeders is None


def test_rays_effective_settings_are_in_the_status_and_stay():
    observed = serving()
    made = decided(observed)
    assert made.status.ray == RAY
    assert decided(after(observed, made, supervisor=SupervisorStatus(silent="gone"))).status.ray == RAY


def test_failed_trainer_is_reported_with_its_feeders_error():
    observed = replace(serving(), job=job(**{"trainers.job.failurePolicy": {"maxRestarts": 0}}))
    failed = failed_trainers(after(observed, decided(observed)))
    made = decided(replace(failed, supervisor=replace(SUPERVISOR, failure=MISSING)), 10)
    reported = condition(made, ConditionType.FAILED).message
    assert "exit code 7: CUDA error; sidecar-t, rank 0, got from feeder-0: no module x" in reported


def test_a_startup_deadline_reports_the_supervisors_cause():
    observed = replace(
        starting(),
        job=job(startupDeadlineSeconds=200),
        supervisor=SupervisorStatus(ray=RAY, cause=TIMEOUT),
    )
    assert (
        "feeder-0: raise spec.ray.managed.tuning"
        in condition(decided(observed, 300), ConditionType.FAILED).message
    )


def running(**metrics: float) -> Observed:
    """One whose status is as it should be, but for the metrics."""
    observed = serving()
    status = decided(observed).status
    loader = LoaderStatus(**{name: f"{value:g}" for name, value in metrics.items()})
    return replace(observed, status=status.model_copy(update={"loader": loader}))


def test_metrics_are_written_only_for_changes_beyond_noise():
    same = {"batches_per_second": 10.2, "gb_per_second": 1.02, "stall_percent": 5.5, "occupancy_percent": 52}
    quiet = decided(replace(running(**same), supervisor=replace(SUPERVISOR, rates=RATES)))
    assert quiet.status.loader == running(**same).status.loader
    assert quiet.requeue_after_s == decided(running(**same)).requeue_after_s
    moved = decided(replace(running(batches_per_second=5), supervisor=replace(SUPERVISOR, rates=RATES)))
    assert moved.status.loader == LoaderStatus(
        batches_per_second="10", gb_per_second="1", stall_percent="5", occupancy_percent="50",
        observed_time="2026-01-01T00:00:00Z", verdict="unknown",
        explanation="too few batches so far to tell whether training waits for input",
    )  # fmt: skip


def test_metrics_alone_are_written_once_a_minute_at_most():
    observed = replace(running(), supervisor=replace(SUPERVISOR, rates=RATES), metrics_at=T0)
    early = decided(observed, 4)
    assert (early.status.loader, early.requeue_after_s) == (LoaderStatus(), 56.0)
    assert decided(observed, 60).status.loader.batches_per_second == "10"


def test_metrics_are_written_with_any_other_change():
    slightly = replace(running(batches_per_second=10.1, gb_per_second=1, stall_percent=5), metrics_at=T0)
    lost = replace(slightly, supervisor=replace(SUPERVISOR, ready=0, rates=RATES))
    made = decided(lost, 1)
    assert made.status.phase == Phase.DEGRADED
    assert made.status.loader.batches_per_second == "10"


def test_the_last_metrics_stay_after_the_end_and_a_held_job_has_none():
    observed = running(batches_per_second=10, gb_per_second=1)
    done = {
        **observed.children,
        **live(("Job", "mnist-trainers-0"), conditions=[{"type": "Complete", "status": "True"}]),
    }
    ended = decided(replace(observed, children=done, supervisor=replace(SUPERVISOR, rates=Rates())))
    assert ended.status.loader == observed.status.loader
    gone = decided(after(replace(observed, supervisor=None), ended, children={}, pods=()))
    assert gone.status.loader == observed.status.loader
    assert decided(replace(observed, job=job(suspend=True))).status.loader == LoaderStatus()


def test_figures_that_cannot_be_measured_any_more_are_blank():
    observed = running(batches_per_second=10, gb_per_second=1)
    assert (
        decided(replace(observed, supervisor=SupervisorStatus(silent="gone"))).status.loader == LoaderStatus()
    )
    headless = replace(observed, supervisor=None, children={**observed.children, **live(HEAD)})
    assert decided(headless).status.loader == LoaderStatus(), "its node is lost"
    assert decided(replace(observed, supervisor=None)).status.loader == observed.status.loader, (
        "not asked yet"
    )
    assert decided(replace(observed, supervisor=SUPERVISOR)).status.loader == observed.status.loader, (
        "it has just begun"
    )
    back = replace(running(), supervisor=replace(SUPERVISOR, rates=Rates()))
    assert decided(back).status.loader.gb_per_second == "0", "which is a figure"


def test_unready_head_is_reported_by_its_pod_despite_earlier_reports():
    observed = serving()
    assert head(replace(observed, children={**observed.children, **live(HEAD)}))[1] == "PodsStart"
