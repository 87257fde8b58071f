"""What the operator has seen of one job and its children, as values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.status import DataLoaderJobStatus
from dataloaderjob_operator import names
from dataloaderjob_operator.objects import Manifest

Key = tuple[str, str]
"""(kind, name) of a child."""


class Trainers(Enum):
    """Where the Indexed Job of the present attempt is."""

    ABSENT = auto()
    LEAVING = auto()
    """It is being deleted: the name is free again when it is gone."""
    ACTIVE = auto()
    COMPLETE = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One look at a job. What is not in it is not there."""

    job: DataLoaderJob
    status: DataLoaderJobStatus = field(default_factory=DataLoaderJobStatus)
    """As it was written last."""
    children: Mapping[Key, Manifest] = field(default_factory=dict)
    """Live ones that the job owns, but pods."""
    pods: tuple[Manifest, ...] = ()
    refused: str = ""
    """What the API server said when it refused a child last; empty if it took them all."""

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
    """As Kubernetes writes it, in whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
