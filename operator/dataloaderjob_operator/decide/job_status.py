"""The fields of a job's status that follow from its stage and from what was observed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from dataloaderjob.api.status import (
    Condition,
    DataLoaderJobStatus,
    FeedersStatus,
    LoaderStatus,
    Phase,
    TrainersStatus,
)
from dataloaderjob_operator import names
from dataloaderjob_operator.decide import attached, external, pinned, restarts
from dataloaderjob_operator.decide.conditions import reason_of
from dataloaderjob_operator.decide.health import Health
from dataloaderjob_operator.decide.job_parts import Parts, serves
from dataloaderjob_operator.decide.observed import Observed, Trainers, show_time
from dataloaderjob_operator.decide.queueing import QueuedRole
from dataloaderjob_operator.decide.stages import ENDED, HELD, WANTED, ChildPart, Stage, StageResult
from dataloaderjob_operator.objects import OperatorConfig


def job_status(
    observed: Observed, health: Health, found: Parts, result: StageResult, queue: QueuedRole | None,
    setup: OperatorConfig, now: datetime, *, made: Sequence[Condition], loader: LoaderStatus,
    injection: dict[str, Any] | None,
) -> DataLoaderJobStatus:  # fmt: skip
    """Builds the status. `made`: all conditions. `loader`: the metrics. `injection`: the parts that are added to
    labeled pods."""
    up = serves(found, attaches=observed.job.spec.trainers.attached)
    return DataLoaderJobStatus(
        observed_generation=observed.generation,
        phase=_phase(result, serves=up),
        reason=reason_of(made),
        conditions=tuple(made),
        feeders=_feeders(observed, result),
        trainers=_trainers(observed, health, result, setup, now),
        loader=loader,
        ray=external.ray_status(observed),
        selector=names.selector(observed.job.name, names.Role.FEEDER),
        start_time=_started_at(observed, result, now),
        scheduled_time=_scheduled_at(observed, result, queue, now),
        serving_time=_served_at(observed, result, now, serves=up),
        completion_time=observed.status.completion_time or show_time(now) if result.stage in ENDED else None,
        injection=injection,
    )


def _phase(result: StageResult, *, serves: bool) -> Phase:
    stage = result.stage
    if result.queue is not None:
        return Phase.QUEUED
    if stage is Stage.RESTARTING or (stage in {Stage.RUNNING, Stage.SERVING} and not serves):
        return Phase.DEGRADED
    return Phase(stage.value)


def _started_at(observed: Observed, result: StageResult, now: datetime) -> str | None:
    """Returns the time since which the job has been allowed to run; None while it is suspended. The job's deadlines
    count from this time."""
    if result.stage in HELD:
        return None
    return observed.status.start_time or show_time(now)


def _scheduled_at(
    observed: Observed, result: StageResult, queue: QueuedRole | None, now: datetime
) -> str | None:
    """Returns the time since which no part of the job has waited in a queue. Returns None while a part waits, while the
    job is suspended, and while a job for attached trainers has no pods."""
    nobody = observed.job.spec.trainers.attached and not attached.pods(observed)
    if result.stage in HELD or queue is not None or nobody:
        return None
    return observed.status.scheduled_time or show_time(now)


def _served_at(observed: Observed, result: StageResult, now: datetime, *, serves: bool) -> str | None:
    """Returns the time at which the job met its startup deadline. Returns None if it has not met the deadline yet, and
    while it is suspended or idle."""
    if result.stage in HELD or result.stage is Stage.IDLE:
        return None
    met = {Stage.RUNNING, Stage.RESTARTING, Stage.SERVING, *({Stage.WAITING} if serves else ())}
    began = show_time(now) if result.stage in met else None
    return observed.status.serving_time or began


def _feeders(observed: Observed, result: StageResult) -> FeedersStatus:
    live = observed.children.get(("Deployment", names.feeders(observed.job.name)), {}).get("status", {})
    desired = observed.job.spec.feeders.replicas if ChildPart.FEEDING in WANTED[result.stage] else 0
    ready = observed.serving() if desired else 0
    there = int(live.get("replicas") or 0) if observed.job.spec.ray.external is None else ready
    return FeedersStatus(desired=desired, replicas=there, ready=ready, summary=f"{ready}/{desired}")


def _trainers(
    observed: Observed, health: Health, result: StageResult, setup: OperatorConfig, now: datetime
) -> TrainersStatus:
    if observed.job.spec.trainers.attached:
        return _attached_trainers(observed, result, setup, now)
    live = observed.children.get(("Job", names.trainers(observed.job.name, result.attempt)), {}).get(
        "status", {}
    )
    desired, succeeded = observed.job.spec.trainers.replicas, int(live.get("succeeded") or 0)
    running = 0 if result.stage in HELD else max(succeeded, health.trainers_running)
    tally = _tally(observed, result, now)
    return TrainersStatus(
        desired=desired, active=int(live.get("active") or 0), succeeded=succeeded, restarts=result.attempt,
        failures=tally.failures, disruptions=tally.disruptions, next_start=tally.next_start,
        image=pinned.trainer_image(observed.job), sidecar_image=setup.sidecar_image,
        summary=f"{min(running, desired)}/{desired}",
    )  # fmt: skip


def _attached_trainers(
    observed: Observed, result: StageResult, setup: OperatorConfig, now: datetime
) -> TrainersStatus:
    before, supervisor, held = observed.status.trainers, observed.supervisor, result.stage in HELD
    if result.stage in ENDED:
        return before
    there = len(attached.pods(observed))
    answers = supervisor is not None and not supervisor.silent
    ranks = supervisor.ranks if supervisor is not None and answers else before.ranks
    ranks = 0 if held or not there else ranks
    since = None if held else attached.idle_since(observed, now)
    followed = "" if observed.followed is None else observed.followed.uid
    return TrainersStatus(
        desired=there, active=attached.running(observed), ranks=ranks, followed_uid=followed or before.followed_uid,
        image=pinned.trainer_image(observed.job), sidecar_image=setup.sidecar_image,
        idle_since=None if since is None else show_time(since), summary=attached.summary(there, ranks),
    )  # fmt: skip


def _tally(observed: Observed, result: StageResult, now: datetime) -> restarts.Tally:
    """Returns the restart counts, which are reset after enough progress."""
    if result.tally is not None:
        return result.tally
    known = restarts.tally_of(observed)
    if result.stage in HELD or observed.trainers() is not Trainers.ABSENT:
        known = replace(known, next_start=None)
    since = restarts.forgets_at(observed) if result.stage is Stage.RUNNING else None
    forgets = since is not None and since <= now and restarts.makes_progress(observed)
    return restarts.Tally() if forgets else known
