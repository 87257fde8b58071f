"""The end of the object that an attached job follows, derived from the object's own status. Pure.

Most controllers report an end in a condition, but the condition's type differs. KubeRay and Volcano use fields of their
own. The same rules apply to objects of unknown kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from dataloaderjob.api.attach import FollowSpec

MAX_TEXT = 600
COMPLETE = ("Complete", "Completed", "Succeeded", "SuccessCriteriaMet")
"""Condition types with which Jobs, JobSets, TrainJobs and Kubeflow's PyTorchJobs report success."""
FAILED = ("Failed", "FailureTarget")
RAY_GROUP = "ray.io"
RAY_SUCCEEDED, RAY_ENDED = "SUCCEEDED", frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
PHASES_COMPLETE = frozenset({"Succeeded", "Completed", "Complete"})
"""Phases with which Pods, and the jobs of Volcano and Argo, report success."""
PHASES_FAILED = frozenset({"Failed", "Error", "Aborted", "Terminated"})
CANNOT = "FollowedNotRead"
"""Condition reason if the followed object cannot be read."""
MISSING = "FollowedMissing"
"""Condition reason while the followed object does not exist yet."""


class FollowedState(Enum):
    """States of a followed object."""

    ACTIVE = auto()
    COMPLETE = auto()
    FAILED = auto()
    MISSING = auto()
    """The object does not exist, and perhaps never did."""
    UNREADABLE = auto()
    """The API server does not know the object's kind, or the operator does not have permission to read the object."""


@dataclass(frozen=True, slots=True)
class Followed:
    """The result of the last read of a followed object. Two results are equal if they have the same effect on the
    job."""

    state: FollowedState
    text: str = ""
    """The object's own explanation of its end; if the object cannot be read, the reason and the remedy."""
    uid: str = ""
    """The object's uid; empty if the object was not read."""


def read(thing: Mapping[str, Any], follow: FollowSpec) -> Followed:
    """Returns the state of a followed object. `thing`: the object as the API server sent it."""
    status, uid = _mapping(thing.get("status")), str(_mapping(thing.get("metadata")).get("uid") or "")
    found = _of_ray(status) if follow.group == RAY_GROUP else None
    state, text = found or _by_conditions(status) or _by_phase(status) or (FollowedState.ACTIVE, "")
    return Followed(state, " ".join(text.split())[:MAX_TEXT], uid)


def missing(follow: FollowSpec) -> Followed:
    """Returns the result for an object that does not exist."""
    return Followed(FollowedState.MISSING, f"{follow} does not exist in the job's namespace: create it there")


def unknown_kind(follow: FollowSpec) -> Followed:
    """Returns the result for a kind that the API server does not know."""
    return Followed(
        FollowedState.UNREADABLE,
        f"the API server does not know kind {follow.kind} in {follow.api_version}: install its "
        "CustomResourceDefinition, or correct spec.trainers.attach.follow",
    )


def forbidden(follow: FollowSpec, plural: str) -> Followed:
    """Returns the result for an object that the operator does not have permission to read."""
    resource = f"{plural}.{follow.group}" if follow.group else plural
    return Followed(
        FollowedState.UNREADABLE,
        f"the operator has no permission to read {follow}: add {resource} to the chart's value follow.resources",
    )


def _of_ray(status: Mapping[str, Any]) -> tuple[FollowedState, str] | None:
    """Returns the state of a RayJob and the explanation of its end. A failed attempt that is retried does not end the
    RayJob."""
    job, deployment = str(status.get("jobStatus") or ""), str(status.get("jobDeploymentStatus") or "")
    over = deployment in {"Complete", "Failed"} or (not deployment and job in RAY_ENDED)
    if not over:
        return FollowedState.ACTIVE, ""
    text = " ".join(str(status.get(name) or "") for name in ("reason", "message") if status.get(name))
    succeeded = job == RAY_SUCCEEDED and deployment != "Failed"
    return (FollowedState.COMPLETE if succeeded else FollowedState.FAILED), text or f"jobStatus {job}"


def _by_conditions(status: Mapping[str, Any]) -> tuple[FollowedState, str] | None:
    listed = status.get("conditions")
    for condition in listed if isinstance(listed, list) else ():
        if not isinstance(condition, Mapping) or condition.get("status") != "True":
            continue
        for kinds, state in ((COMPLETE, FollowedState.COMPLETE), (FAILED, FollowedState.FAILED)):
            if condition.get("type") in kinds:
                return state, _explained(condition)
    return None


def _explained(condition: Mapping[str, Any]) -> str:
    reason, message = str(condition.get("reason") or ""), str(condition.get("message") or "")
    return f"{reason}: {message}" if reason and message else reason or message or str(condition["type"])


def _by_phase(status: Mapping[str, Any]) -> tuple[FollowedState, str] | None:
    state = status.get("state")
    phase = str(status.get("phase") or (state.get("phase") if isinstance(state, Mapping) else state) or "")
    text = str(status.get("message") or "") or f"phase {phase}"
    if phase in PHASES_COMPLETE:
        return FollowedState.COMPLETE, text
    return (FollowedState.FAILED, text) if phase in PHASES_FAILED else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
