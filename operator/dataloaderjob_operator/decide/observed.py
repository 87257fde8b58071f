"""One job and its children as the operator observed them: values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.status import DataLoaderJobStatus
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.supervisor_status import Cause, SupervisorStatus
from dataloaderjob_operator.decide.troubles import Trouble
from dataloaderjob_operator.objects import Manifest

METRICS_EVERY_S = 15.0
Key = tuple[str, str]
"""(kind, name) of a child."""


class Trainers(Enum):
    """Phases of the present attempt's Indexed Job."""

    ABSENT = auto()
    LEAVING = auto()
    """It is being deleted: the name is free again when it is gone."""
    ACTIVE = auto()
    COMPLETE = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A job as one reconcile observes it. What is not in it is not there."""

    job: DataLoaderJob
    status: DataLoaderJobStatus = field(default_factory=DataLoaderJobStatus)
    """The status that was written last."""
    children: Mapping[Key, Manifest] = field(default_factory=dict)
    """Live ones that the job owns, but pods."""
    pods: tuple[Manifest, ...] = ()
    refused: str = ""
    """The API server's message when it refused a child last; empty if it took them all."""
    refused_texts: frozenset[str] = frozenset()
    """Messages for which it refused a status."""
    supervisor: SupervisorStatus | None = None
    """The supervisor's last report, or that it is silent; None while it has not been polled."""
    written_at: datetime | None = None
    """The moment at which this operator wrote the status last."""
    metrics_at: datetime | None = None
    """The moment at which it wrote the loader's metrics last."""
    metrics_every_s: float = METRICS_EVERY_S
    """Minimum interval between two writes for their sake alone."""
    event_troubles: Mapping[str, Trouble] = field(default_factory=dict)
    """Troubles that events reported of objects that hold the job up, by uid."""

    @property
    def attempt(self) -> int:
        return self.status.trainers.restarts

    @property
    def generation(self) -> int:
        return self.job.metadata.generation or 0

    def of_role(self, role: names.Role) -> tuple[Manifest, ...]:
        """Pods of a role that are not being deleted."""
        return tuple(
            pod
            for pod in self.pods
            if pod["metadata"].get("labels", {}).get(names.LABEL_ROLE) == role.value and not leaving(pod)
        )

    def serving(self) -> int:
        """The number of pods whose feeders serve, by the supervisor's report. While it is silent, none is added."""
        if self.supervisor is not None and not self.supervisor.silent:
            return self.supervisor.ready // self.job.spec.feeders.processes_per_pod
        feeders = self.children.get(("Deployment", names.feeders(self.job.name)), {})
        return min(self.status.feeders.ready, int(feeders.get("status", {}).get("readyReplicas") or 0))

    def describe(self, cause: Cause) -> str:
        """Puts the name of the pod that has a cause before it."""
        pods = (p["metadata"]["name"] for p in self.pods if p.get("status", {}).get("podIP") == cause.host)
        pod = next(pods, None) if cause.host else None
        return f"pod {pod}: {cause.text}" if pod else cause.text

    def trainers(self) -> Trainers:
        found = self.children.get(("Job", names.trainers(self.job.name, self.attempt)))
        if found is None:
            return Trainers.ABSENT
        if leaving(found):
            return Trainers.LEAVING
        if has_condition(found, "Complete") or has_condition(found, "SuccessCriteriaMet"):
            return Trainers.COMPLETE
        if has_condition(found, "Failed") or has_condition(found, "FailureTarget"):
            return Trainers.FAILED
        return Trainers.ACTIVE


def leaving(thing: Mapping[str, Any]) -> bool:
    return thing["metadata"].get("deletionTimestamp") is not None


def has_condition(thing: Mapping[str, Any], kind: str) -> bool:
    return (condition_of(thing, kind) or {}).get("status") == "True"


def condition_of(thing: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    conditions = thing.get("status", {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == kind), None)


def parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def show_time(moment: datetime) -> str:
    """Writes a time as Kubernetes does, in whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
