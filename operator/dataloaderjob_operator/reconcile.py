"""One reconcile of a job: observe, decide, write the status, delete children and apply children.

A reconcile is level-triggered and idempotent. After any interruption, the next call decides from the state that it
finds. The status is written first, so that an attempt is counted before its pods are deleted. Events are sent after the
status. An event is lost if it cannot be sent, or if the operator dies in between; the status contains the same
information.

Every failure is reported in the job's status: a spec that the models refuse, a child that the API server refuses, or an
internal error of the operator. If the status itself cannot be written, the operator's metrics, log and health report
the job.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from dataloaderjob.api import KIND, ManifestError
from dataloaderjob.api.status import DataLoaderJobStatus
from dataloaderjob_operator.autoscaler import Autoscalers
from dataloaderjob_operator.children import NOT_NOW, ChildWriter
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide import conditions, events
from dataloaderjob_operator.decide.decision import WORKLOADS, Decision, decide, not_understood
from dataloaderjob_operator.decide.health import ConditionState
from dataloaderjob_operator.decide.observed import Observed
from dataloaderjob_operator.kinds import Manifest, covers
from dataloaderjob_operator.monitoring import ErrorKind, Metrics, add_log_fields
from dataloaderjob_operator.objects import OperatorConfig
from dataloaderjob_operator.observe.attached_pods import AttachedPods
from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.observe.followed_objects import FollowedObjects
from dataloaderjob_operator.observe.ray_clusters import RayClusters
from dataloaderjob_operator.observe.refused_pods import RefusedPods
from dataloaderjob_operator.observe.supervisor_poller import SupervisorPoller
from dataloaderjob_operator.observe.watch import EventLookup
from dataloaderjob_operator.pod_reports import PodReports
from dataloaderjob_operator.recorder import EventRecorder
from dataloaderjob_operator.workqueue import NEVER

log = logging.getLogger(__name__)

CHANGED = 409
"""Status code of the response if the status was derived from another version of the job."""
FOR_TEXT = frozenset({400, 413, 422})
"""Status codes of responses to a status that may be accepted without its messages."""
MAX_REFUSED_TEXTS = 64
"""Maximum number of refused messages that are remembered for a job, enough for at least seven statuses."""
UNDECLARED = re.compile(r"\.status\.([A-Za-z0-9.]+): field not declared in schema")
UNDECLARED_S = 300.0
"""Seconds after which the operator retries a field that the CustomResourceDefinition did not declare."""
AFTER_WRITE_S = 0.3
"""Seconds from a write until the next reconcile. No watch reports the operator's own write as a change."""
AFTER_BUG_S = 60.0
"""Seconds after which a job that caused an internal error is retried, if no event causes an earlier retry."""
UNWRITTEN_S = 30.0
"""Seconds for which a status may stay unwritten. After that, the operator's health names the job."""


def _plain(status: DataLoaderJobStatus) -> dict[str, Any]:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class Reconciler:
    """The reconciler. It brings jobs to the state that their specs describe."""

    api: ApiClient
    cache: Cache
    setup: OperatorConfig
    supervisors: SupervisorPoller
    now: Callable[[], datetime] = _now
    metrics: Metrics = field(default_factory=Metrics)
    uids: dict[JobKey, str] = field(default_factory=dict)
    """The uid of each job to which the fields below refer."""
    written_at: dict[JobKey, datetime] = field(default_factory=dict)
    """The time at which each job's status was last written."""
    metrics_at: dict[JobKey, datetime] = field(default_factory=dict)
    """The time at which each job's metrics were last written."""
    refused_texts: dict[JobKey, frozenset[str]] = field(default_factory=dict)
    """Messages that made the API server refuse a status."""
    unwritten: dict[JobKey, float] = field(default_factory=dict)
    """Jobs whose last status write failed, each with the time since which writes have failed."""
    undeclared: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Fields of the status that the CustomResourceDefinition does not declare, each with the time until which it is
    omitted."""
    bugs: dict[JobKey, str] = field(default_factory=dict)
    """The last logged internal error of each job."""
    autoscalers: Autoscalers | None = None
    """The autoscalers; None if no job is scaled."""
    lookup: EventLookup | None = None
    """The lookup of events; None if causes that appear only in events are not reported."""
    attached: AttachedPods | None = None
    """The watch of attached pods; None if no pods can be attached."""
    followed: FollowedObjects | None = None
    """The reader of followed objects; None if no object is followed."""
    ray_clusters: RayClusters | None = None
    """The lookups of RayClusters; None if no RayCluster is looked up."""
    refused_pods: RefusedPods | None = None
    """The search for refused pods; None if refusals of labeled pods are not reported."""
    recorder: EventRecorder = field(init=False)
    reports: PodReports = field(init=False)
    children: ChildWriter = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = EventRecorder(self.api, self.now)
        self.reports = PodReports(self.recorder)
        self.children = ChildWriter(self.api, self.cache)
        self.metrics.statuses_unwritten.set_function(lambda: len(self.unwritten))

    def forget(self, key: JobKey) -> None:
        """Drops all state of a job that is gone."""
        kept: tuple[dict[JobKey, Any], ...] = (
            self.uids, self.refused_texts, self.written_at, self.metrics_at, self.unwritten, self.bugs,
        )  # fmt: skip
        for known in kept:
            known.pop(key, None)
        self.supervisors.want(key, None)
        if self.autoscalers is not None:
            self.autoscalers.want(key, None)
        self.recorder.forget(key)
        self.reports.forget(key)
        self.children.forget(key)
        if self.lookup is not None:
            self.lookup.forget(key)
        if self.followed is not None:
            self.followed.want(key, None)
        if self.ray_clusters is not None:
            self.ray_clusters.want(key, None)
        if self.refused_pods is not None:
            self.refused_pods.want(key, False)

    def cannot_write(self) -> str:
        """Names the jobs whose status has been unwritten for at least UNWRITTEN_S; empty if there are none."""
        now = time.monotonic()
        late = [
            f"{'/'.join(key)} for {now - at:.0f} s"
            for key, at in self.unwritten.items()
            if now - at > UNWRITTEN_S
        ]
        return f"cannot write the status of {', '.join(sorted(late)[:10])}" if late else ""

    async def reconcile(self, key: JobKey) -> float | None:
        """Reconciles a job once. Returns the seconds until the next reconcile; None if none is needed before the next
        event, NEVER if the job is gone.

        Raises ApiError; the caller then tries again.
        """
        try:
            return await self._reconcile(key)
        except ManifestError as exc:  # the API server accepts specs that the models refuse
            text = "; ".join(str(problem) for problem in exc.problems)
            log.error("cannot read the job: %s", text)
            await self._write_not_ready(key, "InvalidSpec", text)
            return None
        except ApiError:
            raise
        except Exception as exc:
            self._note_bug(key, exc)
            await self._write_not_ready(key, "NotUnderstood", not_understood(exc))
            return AFTER_BUG_S

    async def _reconcile(self, key: JobKey) -> float | None:
        observed = self.cache.observed(key)
        if observed is None:
            self.forget(key)
            if self.setup.managed_by:  # of several operators, only the default one reports pods without a job
                return NEVER
            return await self.reports.report_missing(key, self._labeled(key))
        uid = observed.job.metadata.uid or ""
        if self.uids.setdefault(key, uid) != uid:  # what is kept belongs to an earlier job of this name
            self.forget(key)
            self.uids[key] = uid
        add_log_fields(uid=uid, generation=observed.generation)
        observed = self._with_what_is_kept(key, observed)
        decision = decide(observed, self.setup, self.now())
        if decision is None:
            if not self.setup.managed_by:  # of several operators, only the default one reports this
                elsewhere = events.managed_elsewhere(observed.job.spec.managed_by or "")
                await self.recorder.remark(key, observed.job.metadata, elsewhere)
            return None
        self.supervisors.want(key, decision.feeders, decision.certificates, ends=decision.ends_feeders)
        if self.autoscalers is not None:
            self.autoscalers.want(key, decision.scaling)
        if self.lookup is not None:
            self.lookup.request(key, decision.event_queries)
        if self.followed is not None:
            self.followed.want(key, decision.follow)
        if self.ray_clusters is not None:
            self.ray_clusters.want(key, decision.ray_cluster)
        if self.refused_pods is not None:
            self.refused_pods.want(key, observed.job.spec.trainers.attached)
        if observed.doubts:
            doubted = events.unknown_fields(observed.doubts, observed.generation)
            await self.recorder.remark(key, observed.job.metadata, doubted)
        await self.reports.report(key, observed, self._labeled(key))
        wrote = await self._execute(key, observed, decision)
        if decision.bug is not None:
            self._note_bug(key, decision.bug)
            return AFTER_BUG_S
        self.bugs.pop(key, None)
        if observed.refused:
            return 0.0  # reconcile again immediately, so that the status drops the message
        waits = AFTER_WRITE_S if wrote else None, decision.requeue_after_s
        return min((wait for wait in waits if wait is not None), default=None)

    def _note_bug(self, key: JobKey, error: Exception) -> None:
        """Counts an internal error, and logs its traceback once."""
        self.metrics.reconcile_errors.labels(ErrorKind.BUG.value).inc()
        if self.bugs.get(key) != (text := repr(error)):
            self.bugs[key] = text
            log.error("the operator cannot process this job", exc_info=error)

    def _with_what_is_kept(self, key: JobKey, observed: Observed) -> Observed:
        """Adds to the observed state of a job what this process remembers about the job."""
        refused = self.children.refused(key)
        return replace(
            observed, refused="; ".join((refused, *observed.doubts)) if refused else "",
            refused_texts=self.refused_texts.get(key, frozenset()),
            supervisor=self.supervisors.status(key),
            scaling=None if self.autoscalers is None else self.autoscalers.report(key),
            written_at=self.written_at.get(key), metrics_at=self.metrics_at.get(key),
            event_troubles={} if self.lookup is None else self.lookup.found(key),
            attached=self._labeled(key) if observed.job.spec.trainers.attached else (),
            followed=None if self.followed is None else self.followed.found(key),
            ray_cluster=None if self.ray_clusters is None else self.ray_clusters.found(key),
        )  # fmt: skip

    def _labeled(self, key: JobKey) -> tuple[Manifest, ...]:
        """Returns the pods whose label names a job."""
        return () if self.attached is None else self.attached.of(key)

    async def _execute(self, key: JobKey, observed: Observed, decision: Decision) -> bool:
        """Carries out a decision. Returns True if anything was written that may lead to further changes."""
        if decision.delete_job:
            await self.children.delete((KIND, key[1]), self.cache.job(key))
            return True
        wrote, failed = False, None
        try:
            wrote = await self._write_status(key, observed, decision) and not decision.only_counts
        except ApiError as exc:
            if exc.code in {CHANGED, *NOT_NOW} or not _goes_on(observed.status, decision.status):
                raise
            failed = exc
        for child in decision.delete:
            wrote = True
            await self.children.delete(child, observed.children[child])
        begun = any(kind in WORKLOADS for kind, _ in observed.children)
        wrote = (
            await self.children.apply(key, observed, decision.apply, later=decision.later, begun=begun)
            or wrote
        )
        if failed is not None:
            raise failed
        return wrote

    async def _write_status(self, key: JobKey, observed: Observed, decision: Decision) -> bool:
        status = self._declared(decision.status)
        live = self.cache.live_status(key)
        cleared = any(live.get(field) and field not in status for field in ("startTime", "completionTime"))
        if not cleared and covers(live, status):
            self.unwritten.pop(key, None)
            return False
        written = await self._write(key, decision.status)
        if live.get("loader") != status.get("loader"):
            self.metrics_at[key] = self.written_at[key]
        await self.recorder.record(key, observed.job.metadata, observed.status, written)
        return True

    async def _write(self, key: JobKey, status: DataLoaderJobStatus) -> DataLoaderJobStatus:
        """Writes a status. If the API server rejects the messages in it, writes it without them. A container's output
        thus cannot keep the phase, the counts and the restarts from being written. Returns the status as written."""
        try:
            written = await self._write_with_texts(key, status)
        except ApiError as exc:
            if key not in self.unwritten:
                log.error("cannot write the status: %s", exc)
            self.unwritten.setdefault(key, time.monotonic())
            raise
        self.unwritten.pop(key, None)
        self.written_at[key] = self.now()
        return written

    async def _write_with_texts(self, key: JobKey, status: DataLoaderJobStatus) -> DataLoaderJobStatus:
        try:
            await self._apply_status(key, status)
        except ApiError as exc:
            status, texts = conditions.without_messages(status)
            if exc.code not in FOR_TEXT or not texts:
                raise
            log.error(
                "the API server rejected the message texts of the status, so it is written without them: %s; %a",
                exc,
                sorted(texts),
            )
            await self._apply_status(key, status)
            known = self.refused_texts.get(key, frozenset()) | texts
            self.refused_texts[key] = known if len(known) <= MAX_REFUSED_TEXTS else texts
        return status

    async def _apply_status(self, key: JobKey, status: DataLoaderJobStatus) -> None:
        while True:
            try:
                found = await self.api.apply_status(*key, self.cache.version(key), self._declared(status))
            except ApiError as exc:
                if not self._learn_undeclared(exc.message):
                    raise
            else:
                self.cache.put_written(found)
                return

    def _declared(self, status: DataLoaderJobStatus) -> dict[str, Any]:
        """Returns the status without the fields that the CustomResourceDefinition does not declare."""
        made, now = _plain(status), time.monotonic()
        for place, until in self.undeclared.items():
            inside: Any = made
            for step in place[:-1]:
                inside = inside.get(step) if isinstance(inside, dict) else None
            if now < until and isinstance(inside, dict):
                inside.pop(place[-1], None)
        return made

    def _learn_undeclared(self, refusal: str) -> bool:
        """Returns True if a status was refused because of a field that the definition does not declare. This happens if
        the definition is from another release than this operator, for instance during an upgrade."""
        found = UNDECLARED.search(refusal)
        place = tuple(found.group(1).split(".")) if found else ()
        now = time.monotonic()
        if not found or self.undeclared.get(place, 0.0) > now:
            return False
        log.error(
            "the CustomResourceDefinition is from a different release than this operator: it does not "
            "declare status.%s, which is omitted; install the definition from the operator's own chart", found.group(1),
        )  # fmt: skip
        self.undeclared[place] = now + UNDECLARED_S
        return True

    async def _write_not_ready(self, key: JobKey, reason: str, message: str) -> None:
        """Reports why the operator does nothing about a job. The rest of the status is kept. If the job has ended, its
        status does not change at all."""
        before, why = self.cache.status(key), ConditionState(False, reason, message)
        known = self.refused_texts.get(key, frozenset())
        after = conditions.not_ready(before, why, self.cache.generation(key), self.now(), refused_texts=known)
        if after == before or before.completion_time or not self.setup.manages(self.cache.managed_by(key)):
            return
        written = await self._write(key, after)
        await self.recorder.record(key, self.cache.about(key), before, written)


def _goes_on(before: DataLoaderJobStatus, after: DataLoaderJobStatus) -> bool:
    """Returns True if both statuses have the same attempt and end, and therefore the same children. The operator acts
    on a new attempt or an end only after it has written the status."""
    return (before.trainers.restarts, before.completion_time) == (
        after.trainers.restarts,
        after.completion_time,
    )
