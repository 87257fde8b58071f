"""One reconcile of a job: observe, decide, then write the status, delete, and apply what is to be there.

Level-triggered and idempotent: whatever it is interrupted by, the next call decides from what is there then. The
status goes first, so that an attempt is counted before its pods are deleted. Events are sent after it: one that cannot
be sent is lost, as is one whose operator dies between the status and it; the status has it all.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from dataloaderjob.api import KIND, DataLoaderJob, ManifestError
from dataloaderjob.api.status import DataLoaderJobStatus
from dataloaderjob_operator.client import ApiError, Changed, Client
from dataloaderjob_operator.decide import conditions, events
from dataloaderjob_operator.decide.decision import Decision, decide
from dataloaderjob_operator.decide.health import ConditionState
from dataloaderjob_operator.decide.observed import METRICS_EVERY_S, Key, Observed
from dataloaderjob_operator.keys import JobSecrets
from dataloaderjob_operator.kinds import (
    KINDS,
    Manifest,
    Source,
    applied_hash,
    covers,
    manifest_to_send,
    sealed,
)
from dataloaderjob_operator.monitoring import add_log_fields
from dataloaderjob_operator.objects import OperatorConfig
from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.observe.supervisor_poller import Supervisors
from dataloaderjob_operator.observe.watch import EventLookup
from dataloaderjob_operator.workqueue import NEVER

log = logging.getLogger(__name__)

METRICS_PER_S = 10
"""Writes for the sake of metrics alone, of all jobs together: with more than 150 of them each has fewer."""
FOR_GOOD = frozenset({400, 403, 409, 422})
"""Status codes that repeating alone does not change: the user has to know."""
FOR_TEXT = frozenset({400, 413, 422})
"""Status codes for a write of a status that one without texts may not get."""
MAX_REFUSED_TEXTS = 64
"""Texts of a job that are remembered as refused: those of seven of its statuses at least."""
AFTER_WRITE_S = 0.3
"""Seconds from a write until the next reconcile: no watch reports the operator's own write as a change."""
EVENT_TIMEOUT_S = 5.0
NOT_UNDERSTOOD = (
    "the operator fails at this job: check the templates for a part that has the wrong type or is null"
)
NOT_TYPED = (
    "field not declared in schema",
    "failed to create typed patch object",
    "failed to convert new object",
)
"""Messages for a template with a field that is not known or has the wrong type; the API server sends them with 500."""


@dataclass(slots=True)
class EventRecorder:
    """Sends events of jobs. It never fails, and waits for seconds at most."""

    api: Client
    now: Callable[[], datetime]
    clock: Callable[[], float] = time.monotonic
    host: str = field(default_factory=socket.gethostname)
    budget: events.Budget = field(default_factory=events.Budget)
    jobs: dict[JobKey, str] = field(default_factory=dict)
    """Uids of the jobs that have had events."""

    async def record(
        self, key: JobKey, job: DataLoaderJob, before: DataLoaderJobStatus, after: DataLoaderJobStatus
    ) -> None:
        """Sends the events of a change: `after` has been written in place of `before`."""
        uid = self.jobs[key] = job.metadata.uid or ""
        for event in events.events_of(before, after):
            log.log(
                logging.WARNING if event.type == "Warning" else logging.INFO, "%s: %s", event.reason, event.message
            )  # fmt: skip
            if self.budget.take(uid, event.reason, self.clock()):
                await self._send(event, job)

    async def _send(self, event: events.Event, job: DataLoaderJob) -> None:
        try:
            async with asyncio.timeout(EVENT_TIMEOUT_S):
                await self.api.create_event(events.manifest(event, job, self.now(), self.host))
        except (ApiError, TimeoutError) as exc:
            log.warning("cannot send the event %s: %s", event.reason, exc or f"{EVENT_TIMEOUT_S:.0f} s")

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self.budget.forget(self.jobs.pop(key, ""))


def _version(thing: Manifest) -> str:
    return str(thing["metadata"].get("resourceVersion", ""))


def _plain(status: DataLoaderJobStatus) -> dict[str, Any]:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class Reconciler:
    """Brings jobs to the state that their specs ask for."""

    api: Client
    cache: Cache
    setup: OperatorConfig
    supervisors: Supervisors
    now: Callable[[], datetime] = _now
    uids: dict[JobKey, str] = field(default_factory=dict)
    """Uids of the jobs that the following entries are about."""
    refused: dict[JobKey, str] = field(default_factory=dict)
    """The API server's message for a child that it refuses, which the next reconcile reports."""
    written_at: dict[JobKey, datetime] = field(default_factory=dict)
    """Moments at which statuses were written last."""
    metrics_at: dict[JobKey, datetime] = field(default_factory=dict)
    """Moments at which metrics were written last."""
    refused_texts: dict[JobKey, frozenset[str]] = field(default_factory=dict)
    """Texts for which the API server refused a status."""
    no_ops: dict[JobKey, dict[Key, tuple[str, str]]] = field(default_factory=dict)
    """Version of a child, and hash of what was applied to it and changed nothing."""
    lookup: EventLookup | None = None
    """None: causes that only events have are not reported."""
    recorder: EventRecorder = field(init=False)
    secrets: JobSecrets = field(init=False)

    def __post_init__(self) -> None:
        self.secrets = JobSecrets(self.api)
        self.recorder = EventRecorder(self.api, self.now)

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        kept: tuple[dict[JobKey, Any], ...] = (
            self.uids, self.refused, self.refused_texts, self.written_at, self.metrics_at, self.no_ops
        )  # fmt: skip
        for known in kept:
            known.pop(key, None)
        self.supervisors.want(key, None)
        self.recorder.forget(key)
        self.secrets.forget(key)
        if self.lookup is not None:
            self.lookup.forget(key)

    async def reconcile(self, key: JobKey) -> float | None:
        """Reconciles a job once. Returns the seconds until it is to be reconciled again, None for the next event, NEVER
        if it is gone.

        Raises ApiError, after which the call is to be repeated.
        """
        try:
            observed = self.cache.observed(key)
        except ManifestError as exc:  # the CRD of another version lets it pass
            log.error("cannot read the job: %s", exc)
            await self._write_not_ready(key, "InvalidSpec", str(exc))
            return None
        if observed is None:
            self.forget(key)
            return NEVER
        uid = observed.job.metadata.uid or ""
        if self.uids.setdefault(key, uid) != uid:  # what is kept is of an earlier job of this name
            self.forget(key)
            self.uids[key] = uid
        add_log_fields(uid=uid, generation=observed.generation)
        observed = self._with_what_is_kept(key, observed)
        try:
            decision = decide(observed, self.setup, self.now())
        except Exception as exc:
            await self._write_not_ready(
                key, "NotUnderstood", f"{NOT_UNDERSTOOD}: {type(exc).__name__}: {exc}"
            )
            raise
        if decision is None:
            return None
        self.supervisors.want(key, decision.feeders)
        if self.lookup is not None:
            self.lookup.request(key, decision.event_queries)
        try:
            wrote = await self._execute(key, observed, decision)
        except Changed:
            raise  # decided anew once the watch has reported it
        except ApiError as exc:
            if exc.code in FOR_GOOD or any(words in exc.message for words in NOT_TYPED):
                self.refused[key] = exc.message
            raise
        if self.refused.pop(key, None):
            return 0.0  # reconcile again at once, so that the status drops the message
        waits = AFTER_WRITE_S if wrote else None, decision.requeue_after_s
        return min((wait for wait in waits if wait is not None), default=None)

    def _with_what_is_kept(self, key: JobKey, observed: Observed) -> Observed:
        """Adds what this operator knows beside the job's objects."""
        return replace(
            observed, refused=self.refused.get(key, ""), refused_texts=self.refused_texts.get(key, frozenset()),
            supervisor=self.supervisors.status(key),
            written_at=self.written_at.get(key), metrics_at=self.metrics_at.get(key),
            metrics_every_s=max(METRICS_EVERY_S, len(self.supervisors) / METRICS_PER_S),
            event_troubles={} if self.lookup is None else self.lookup.found(key),
        )  # fmt: skip

    async def _execute(self, key: JobKey, observed: Observed, decision: Decision) -> bool:
        """Does what was decided. Returns whether anything was written."""
        if decision.delete_job:
            await self._delete((KIND, key[1]), self.cache.job(key))
            return True
        wrote = await self._write_status(key, observed, decision)
        for child in decision.delete:
            wrote = True
            await self._delete(child, observed.children[child])
        for manifest in decision.apply:
            if KINDS[manifest["kind"]].source is Source.NONE:
                wrote = await self.secrets.keep(key, sealed(manifest), observed) or wrote
            else:
                wrote = await self._apply(key, manifest) or wrote
        return wrote

    async def _delete(self, what: Key, thing: Manifest | None) -> None:
        """Deletes just this object, and not one that has its name since; the cache has the outcome at once."""
        if thing is None:
            return
        metadata = thing["metadata"]
        left = await self.api.delete(metadata["namespace"], what, metadata["uid"])
        if left is not None:
            self.cache.put_written(left)
        else:
            self.cache.remove(thing)

    async def _write_status(self, key: JobKey, observed: Observed, decision: Decision) -> bool:
        status = _plain(decision.status)
        live = self.cache.live_status(key)
        cleared = any(live.get(field) and field not in status for field in ("startTime", "completionTime"))
        if not cleared and covers(live, status):
            return False
        written = await self._write(key, decision.status)
        if live.get("loader") != status["loader"]:
            self.metrics_at[key] = self.written_at[key]
        await self.recorder.record(key, observed.job, observed.status, written)
        return True

    async def _write(self, key: JobKey, status: DataLoaderJobStatus) -> DataLoaderJobStatus:
        """Returns what was written: this, or without its texts if the API server takes it only so. Nothing that a
        container prints keeps phase, counts and restarts from being written."""
        try:
            await self._apply_status(key, status)
        except ApiError as exc:
            status, texts = conditions.without_messages(status)
            if exc.code not in FOR_TEXT or not texts:
                raise
            log.error(
                "the API server refuses the texts of the status; it is written without them: %s; %a",
                exc,
                sorted(texts),
            )
            await self._apply_status(key, status)
            known = self.refused_texts.get(key, frozenset()) | texts
            self.refused_texts[key] = known if len(known) <= MAX_REFUSED_TEXTS else texts
        self.written_at[key] = self.now()
        return status

    async def _apply_status(self, key: JobKey, status: DataLoaderJobStatus) -> None:
        self.cache.put_written(await self.api.apply_status(*key, self.cache.version(key), _plain(status)))

    async def _write_not_ready(self, key: JobKey, reason: str, message: str) -> None:
        """Reports why nothing is done about a job; the rest of its status stays."""
        before, why = self.cache.status(key), ConditionState(False, reason, message)
        after = conditions.not_ready(
            before,
            why,
            self.cache.generation(key),
            self.now(),
            refused_texts=self.refused_texts.get(key, frozenset()),
        )
        if after != before and not self.cache.managed_elsewhere(key):
            await self._write(key, after)

    async def _apply(self, key: JobKey, manifest: Manifest) -> bool:
        child = manifest["kind"], manifest["metadata"]["name"]
        found = self.cache.child(key, child) or await self._unobserved(key[0], child, manifest)
        if found is not None and found["metadata"].get("deletionTimestamp"):
            return False  # made anew when it is gone
        wanted = manifest_to_send(manifest, found)
        if wanted is None or self._is_no_op(key, child, wanted, found):
            return False
        made = {**await self.api.apply(wanted), "kind": child[0]}
        self.cache.put_written(made)
        if found is None or _version(made) != _version(found):
            return True
        self.no_ops.setdefault(key, {})[child] = _version(made), applied_hash(wanted)
        return False

    def _is_no_op(self, key: JobKey, child: Key, wanted: Manifest, live: Manifest | None) -> bool:
        """Checks whether just this, applied to just this object, changed nothing: the API server alters it."""
        return live is not None and self.no_ops.get(key, {}).get(child) == (
            _version(live),
            applied_hash(wanted),
        )

    async def _unobserved(self, namespace: str, child: Key, wanted: Manifest) -> Manifest | None:
        """Reads a child that no watch has reported, which may be new. Raises ApiError for one that is somebody else's:
        an apply would take it over."""
        found = await self.api.read(namespace, child)
        if found is None:
            return None
        uid, found = wanted["metadata"]["ownerReferences"][0]["uid"], {**found, "kind": child[0]}
        if any(owner.get("uid") == uid for owner in found["metadata"].get("ownerReferences") or ()):
            self.cache.put(found)
            return found
        raise ApiError(
            409,
            f"{child[0]} {child[1]} is there and is not this job's: delete it, or give the job another name",
        )
