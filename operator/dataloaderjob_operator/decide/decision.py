"""The decision of one reconcile, made from the observed state: the children to apply or delete, and the status.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.attach import FollowSpec
from dataloaderjob.api.injection import for_policy, injection
from dataloaderjob.api.status import (
    Condition,
    ConditionType,
    DataLoaderJobStatus,
    FeedersStatus,
    LoaderStatus,
)
from dataloaderjob.core.generations import Schedule
from dataloaderjob_operator import names, objects
from dataloaderjob_operator.by_job import cached_by_job
from dataloaderjob_operator.decide import (
    attached,
    autoscale,
    external,
    input_verdict,
    pinned,
    restarts,
    supervisor_status,
)
from dataloaderjob_operator.decide.conditions import conditions, made_condition
from dataloaderjob_operator.decide.health import EventQuery, Health, Queries, diagnose, queries
from dataloaderjob_operator.decide.job_parts import Parts, parts
from dataloaderjob_operator.decide.job_status import job_status
from dataloaderjob_operator.decide.observed import (
    METRICS_EVERY_S,
    Key,
    Observed,
    Trainers,
    key_of,
    leaving,
    parse_time,
    show_time,
)
from dataloaderjob_operator.decide.queueing import queue_of
from dataloaderjob_operator.decide.shortage import shortage, told_until
from dataloaderjob_operator.decide.stages import (
    AT_WORK,
    ENDED,
    HELD,
    WANTED,
    ChildPart,
    Stage,
    StageResult,
    find_stage,
)
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.objects import OperatorConfig, certificates, settings

COUNTS_EVERY_S = 3.0
"""Minimum interval in seconds between two writes that change only counts and messages. Pods become ready one by one,
and each write takes 17 ms of the API server's CPU time."""
CONNECT_AGAIN_S = 10.0
"""Seconds between decisions while sidecars do not reach the supervisor. Their Secret may have to be recreated."""
NOT_UNDERSTOOD = (
    "the operator cannot process this job; check its templates for a field that is null or has the wrong type"
)
WORKLOADS = frozenset({"Deployment", "Job"})
"""Kinds of children that have pods and are built from the user's templates."""
ROLES = {
    ConditionType.HEAD_READY: names.Role.HEAD,
    ConditionType.FEEDERS_READY: names.Role.FEEDER,
    ConditionType.SIDECARS_READY: names.Role.TRAINER,
}
"""The role of the pods that each condition refers to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The work of one reconcile. The status is written before anything is deleted or created. If the operator crashes
    in between, it makes the same decision after its restart."""

    status: DataLoaderJobStatus
    apply: tuple[Manifest, ...] = ()
    later: tuple[Manifest, ...] = ()
    """Children that are not created until feeders serve. The dry run of `apply` includes them."""
    delete: tuple[Key, ...] = ()
    delete_job: bool = False
    """True if the job must be deleted because its `ttlSecondsAfterFinished` has passed."""
    follow: FollowSpec | None = None
    """The object whose end the job awaits; None if it awaits none."""
    ray_cluster: str | None = None
    """The RayCluster whose address the job still needs; None if it needs none."""
    feeders: int | None = None
    """Number of feeder processes that the supervisor should keep; None if there is no supervisor."""
    ends_feeders: bool = False
    """True if the supervisor must end all feeders before its pod is deleted."""
    certificates: Schedule | None = None
    """The schedule of the job's certificates; None if the job does not use TLS."""
    scaling: autoscale.ScalingTarget | None = None
    """The job as its autoscaler sees it; None if it must not be scaled."""
    requeue_after_s: float | None = None
    """Seconds until the next deadline; None if there is none. No watch reports deadlines."""
    only_counts: bool = False
    """True if the new status differs only in counts, messages or metrics, which have no further effect."""
    event_queries: tuple[EventQuery, ...] = ()
    """Objects whose events must be listed: a part of the job does not serve, and no status shows the cause."""
    bug: Exception | None = None
    """The error that prevented a child from being built; None if there was none. The status reports it, too."""


def decide(observed: Observed, setup: OperatorConfig, now: datetime) -> Decision | None:
    """Decides what to do for a job. Returns None if another controller manages the job."""
    if not setup.manages(observed.job.spec.managed_by):
        return None
    written = observed.job
    attaches, spec = written.spec.trainers.attached, written.spec.trainers.attach
    observed = external.resolved(attached.as_needed(observed, now))
    health = external.with_actors(observed, diagnose(observed))
    if attaches:
        health = attached.with_attached(health, observed, now)
    found = parts(observed, health)
    queue = queue_of(observed, health)
    result = find_stage(observed, health, found, queue, now)
    own, setup = setup, pinned.first_setup(observed, setup)
    ends_s = external.ends_s(observed, now) if result.stage in ENDED else None
    want = WANTED[result.stage] | (frozenset() if ends_s is None else {ChildPart.FEEDING})
    wanted, later, bug = _children(observed, setup, result, want, now)
    if bug is not None:
        observed = replace(observed, not_understood=not_understood(bug))
    short = shortage(observed, health, now)
    made = external.with_own_fields(observed.job, conditions(observed, result, found, short, now))
    kept = LoaderStatus() if result.stage in HELD else observed.status.loader
    status = job_status(
        observed, health, found, result, queue, setup, now,
        made=(*made, *_about_input(observed, kept, now)), loader=kept,
        injection=None if spec is None or result.stage in ENDED else _injection(written, own),
    )  # fmt: skip
    only_counts = status == observed.status or _uncounted(status) == _uncounted(observed.status)
    status, counts_s = _counted(observed, status, now, only_counts=only_counts)
    loader, metrics_s = _loader(observed, result, found, now, changes=status != observed.status)
    due = _due(observed, result, status, now, (told_until(health, now), _renewal(observed, setup, now)))
    lacking = {role for kind, role in ROLES.items() if not found[kind].holds}
    lacking |= {names.Role.FEEDER} if short is not None else set()
    looked_up = _queries(health, result, lacking, now)
    waits = [
        looked_up.again_s,
        counts_s,
        metrics_s,
        None if due is None else max(0.0, (due - now).total_seconds()),
        CONNECT_AGAIN_S if found[ConditionType.SIDECARS_READY].reason == attached.NOT_CONNECTED else None,
        ends_s,
    ]
    about_input = _about_input(observed, loader, now)
    count = observed.job.spec.feeders.count if ends_s is None else 0
    return Decision(
        status=status.model_copy(
            update={"loader": loader, "conditions": (*status.conditions[: len(made)], *about_input)}
        ),
        apply=tuple(wanted.values()),
        later=later,
        delete=()
        if bug is not None
        else (*_unwanted(observed, result, {*wanted, *map(key_of, later)}), *_hung(observed, set(wanted))),
        delete_job=result.stage in ENDED and due is not None and due <= now,
        follow=None if result.stage in ENDED or spec is None else spec.follow,
        ray_cluster=None if result.stage in ENDED else external.to_look_up(observed),
        scaling=autoscale.target_of(observed, result),
        certificates=settings.schedule(observed.job, setup),
        feeders=count if ChildPart.FEEDING in want else None,
        ends_feeders=ends_s is not None,
        requeue_after_s=min((wait for wait in waits if wait is not None), default=None),
        only_counts=only_counts,
        event_queries=looked_up.queries,
        bug=bug,
    )


@cached_by_job
def _injection(job: DataLoaderJob, setup: OperatorConfig) -> dict[str, Any]:
    """Returns the parts that the admission policy adds to labeled pods. `job`: the job as the user wrote it, even while
    it is idle. A pod that wakes an idle job thus gets the same parts as any other pod."""
    made = injection(job, image=setup.sidecar_image, pull_secrets=setup.sidecar_pull_secrets)
    return for_policy(made)


def not_understood(error: Exception) -> str:
    """Describes an internal error, for the status of the job that caused it."""
    return f"{NOT_UNDERSTOOD}: {type(error).__name__}: {error}"


def _counted(
    observed: Observed, status: DataLoaderJobStatus, now: datetime, *, only_counts: bool
) -> tuple[DataLoaderJobStatus, float | None]:
    """Returns the status to write, and the seconds until newer counts may be written. The seconds are None if no write
    is postponed."""
    if observed.written_at is None or status == observed.status or not only_counts:
        return status, None
    wait_s = _wait_s(COUNTS_EVERY_S, observed.written_at, now)
    return (status, None) if wait_s <= 0.0 else (observed.status, wait_s)


def _wait_s(every_s: float, last: datetime, now: datetime) -> float:
    """Returns the seconds left of the interval `every_s` since the last write; 0 if the clock has been set back."""
    passed_s = (now - last).total_seconds()
    return 0.0 if passed_s < 0.0 else every_s - passed_s


def _uncounted(status: DataLoaderJobStatus) -> DataLoaderJobStatus:
    """Returns the status without the fields that change with each pod that starts or ends."""
    feeders = FeedersStatus(desired=status.feeders.desired)
    counts = {"desired": 0, "active": 0, "succeeded": 0, "ranks": 0, "summary": ""}
    trainers = status.trainers.model_copy(update=counts)
    bare = tuple(condition.model_copy(update={"message": ""}) for condition in status.conditions)
    return status.model_copy(update={"feeders": feeders, "trainers": trainers, "conditions": bare})


def _loader(
    observed: Observed, result: StageResult, found: Parts, now: datetime, *, changes: bool
) -> tuple[LoaderStatus, float | None]:
    """Returns the metrics to write, and the seconds until newer metrics may be written. The seconds are None if no
    write is postponed. `changes`: True if the status is written anyway.

    A job that has ended keeps its last metrics. A suspended job has none. A job whose head does not answer has none
    either, because nothing can measure them.
    """
    written, rates = observed.status.loader, observed.supervisor.rates if observed.supervisor else None
    if result.stage in HELD:
        return LoaderStatus(), None
    if result.stage in ENDED:
        return written, None
    if rates is None:
        return (written if found[ConditionType.HEAD_READY].holds else LoaderStatus()), None
    fresh = input_verdict.with_verdict(
        supervisor_status.loader_status(rates).model_copy(update={"observed_time": show_time(now)}),
        observed.supervisor.measures if observed.supervisor else None,
        observed.job.spec.feeders,
    )
    if changes:
        return fresh, None
    if not supervisor_status.notable(written, fresh) and not input_verdict.differs(written, fresh):
        return written, None
    wait_s = 0.0 if observed.metrics_at is None else _wait_s(METRICS_EVERY_S, observed.metrics_at, now)
    return (fresh, None) if wait_s <= 0.0 else (written, wait_s)


def _about_input(observed: Observed, loader: LoaderStatus, now: datetime) -> Iterator[Condition]:
    """Yields the conditions derived from these metrics and from the autoscaler's report."""
    for kind, state in (
        (ConditionType.INPUT_BOUND, input_verdict.input_bound(loader)),
        (ConditionType.AUTOSCALING_ACTIVE, autoscale.scaling(observed.job.spec.feeders, observed.scaling)),
    ):
        yield made_condition(
            observed.status, kind, state, observed.generation, now, refused_texts=observed.refused_texts
        )


def _children(
    observed: Observed, setup: OperatorConfig, result: StageResult, want: frozenset[ChildPart], now: datetime
) -> tuple[dict[Key, Manifest], tuple[Manifest, ...], Exception | None]:
    """Returns the children to apply, the children that wait for feeders, and the error if a part could not be built.
    After such an error, the other parts are still kept up to date. A job without pods then gets no children at all, so
    that it never runs with only some of its pods."""
    made, later, bug = list[Manifest](), list[Manifest](), None
    for part in sorted(want):
        waits = part is ChildPart.TRAINERS and observed.waits_for_feeders(result.attempt)
        try:
            (later if waits else made).extend(
                pinned.settled(observed, _BUILDERS[part](observed, setup, result, now))
            )
        except Exception as exc:
            bug = exc
    if bug is not None and not any(kind in WORKLOADS for kind, _ in observed.children):
        made, later = [], []
    return {key_of(child): child for child in made}, tuple(later), bug


def _base(
    observed: Observed, setup: OperatorConfig, result: StageResult, now: datetime
) -> Sequence[Manifest]:
    told = observed.job.spec.trainers.attached and result.stage in ENDED
    made = objects.base(observed.job, setup, f"{result.reason}: {result.message}" if told else "")
    schedule = settings.schedule(observed.job, setup)
    if schedule is None:
        return made
    return (*certificates.secrets(observed.job, setup, schedule, schedule.needed(now)), *made)


def _feeding(observed: Observed, setup: OperatorConfig, _: StageResult, __: datetime) -> Sequence[Manifest]:
    return objects.feeding(observed.job, setup)


def _attempt(
    observed: Observed, setup: OperatorConfig, result: StageResult, now: datetime
) -> Sequence[Manifest]:
    if observed.job.spec.trainers.attached:
        return []
    waits = result.tally.next_start if result.tally else observed.status.trainers.next_start
    job = observed.children.get(("Job", names.trainers(observed.job.name, result.attempt)))
    if job is None and waits is not None and parse_time(waits) > now:
        return []
    if (job is not None and leaving(job)) or restarts.holds_up(observed, result.attempt, now):
        return []
    return objects.training(observed.job, setup, result.attempt)


_BUILDERS = {ChildPart.BASE: _base, ChildPart.FEEDING: _feeding, ChildPart.TRAINERS: _attempt}


def _unwanted(observed: Observed, result: StageResult, wanted: set[Key]) -> list[Key]:
    """Returns the children to delete. If the trainers ended with their job, they are kept, because their pods hold the
    logs. If a deadline stopped the trainers, they are deleted to free their resources."""
    kept = wanted | pinned.in_use(observed)
    if result.stage in ENDED and observed.trainers() in {Trainers.COMPLETE, Trainers.FAILED}:
        kept.add(("Job", names.trainers(observed.job.name, result.attempt)))
    return sorted(k for k, child in observed.children.items() if k not in kept and not leaving(child))


def _hung(observed: Observed, wanted: set[Key]) -> list[Key]:
    """Returns the head's Deployment if it must be recreated because the supervisor has stopped answering. A head
    without a pod is already the replacement: the known status comes from its predecessor."""
    key = "Deployment", names.head(observed.job.name)
    live = observed.children.get(key)
    has_pod = any(not leaving(pod) for pod in observed.of_role(names.Role.HEAD))
    hangs = observed.supervisor is not None and observed.supervisor.hung and has_pod
    return [key] if hangs and key in wanted and live is not None and not leaving(live) else []


def _queries(health: Health, result: StageResult, lacking: set[names.Role], now: datetime) -> Queries:
    if result.stage not in {Stage.STARTING, *AT_WORK}:
        return Queries()
    return queries((health.roles[role] for role in names.Role if role in lacking), now)


def _due(
    observed: Observed,
    result: StageResult,
    status: DataLoaderJobStatus,
    now: datetime,
    more: Sequence[datetime | None],
) -> datetime | None:
    """Returns the next time at which the decision changes merely because time passes; None if there is none. `more`:
    further such times."""
    started, ended = status.start_time, status.completion_time
    if result.stage in ENDED:
        ttl = observed.job.spec.ttl_seconds_after_finished
        return None if ttl is None or ended is None else parse_time(ended) + timedelta(seconds=ttl)
    spec, moments = observed.job.spec, [restarts.next_stuck(observed, now), *more]
    if result.stage is Stage.STARTING and status.scheduled_time is not None:
        moments.append(parse_time(status.scheduled_time) + timedelta(seconds=spec.startup_deadline_seconds))
    if started is not None and spec.active_deadline_seconds is not None:
        moments.append(parse_time(started) + timedelta(seconds=spec.active_deadline_seconds))
    if spec.trainers.attached and result.stage not in HELD:
        moments += [attached.idles_at(observed, now), attached.connects_at(observed, now)]
    moments += _restart_moments(observed, result, status, now)
    # A time that has passed is already part of this decision.
    return min((moment for moment in moments if moment is not None and moment > now), default=None)


def _renewal(observed: Observed, setup: OperatorConfig, now: datetime) -> datetime | None:
    """Returns the time at which the job needs its next generation of certificates; None if it needs none."""
    schedule = settings.schedule(observed.job, setup)
    return None if schedule is None else schedule.next_start(now)


def _restart_moments(
    observed: Observed, result: StageResult, status: DataLoaderJobStatus, now: datetime
) -> Iterator[datetime]:
    if status.trainers.next_start is not None:
        yield parse_time(status.trainers.next_start)
    if result.attempt == observed.attempt and observed.trainers() is Trainers.FAILED:  # not yet judged
        yield now + timedelta(seconds=restarts.SETTLE_S)
    if result.stage is Stage.RUNNING and (status.trainers.failures or status.trainers.disruptions):
        since = restarts.forgets_at(observed)
        if since is not None:
            yield max(since, now + timedelta(seconds=restarts.AGAIN_S))
