"""Events about attached pods and their controllers. Pure.

Pods with the label attach to the job that the label names. Admission refuses most pods whose job does not exist or
creates its own trainers. Some such pods exist nevertheless: they were injected from a file, are older than the guard,
or have outlived their job. The operator then records an event about their controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dataloaderjob.api import KIND
from dataloaderjob_operator.decide.events import Controller, JobEvent, Reason
from dataloaderjob_operator.names import LABEL_INJECT

_CONTROLLER = {"api_version": "apiVersion", "kind": "kind", "name": "name", "uid": "uid"}
"""The fields of Controller, each with the matching field of an owner reference."""


@dataclass(frozen=True, slots=True)
class AttachedPod:
    """An attached pod with a sidecar."""

    name: str
    controller: Controller | None = None
    """The pod's controller; None if the pod has none."""


def attached_pod(pod: Mapping[str, Any]) -> AttachedPod:
    """Returns the name and the controller of a pod."""
    metadata = pod["metadata"]
    owners = metadata.get("ownerReferences") or ()
    by: Mapping[str, Any] = next((owner for owner in owners if owner.get("controller")), {})
    fields = {field: str(by.get(name) or "") for field, name in _CONTROLLER.items()}
    return AttachedPod(str(metadata["name"]), Controller(**fields) if all(fields.values()) else None)


def of_pods(
    job: str, before: Mapping[str, AttachedPod], after: Mapping[str, AttachedPod]
) -> tuple[JobEvent, ...]:
    """Returns the events about pods that attached or left, and about controllers whose first pods attached. `before`
    and `after` hold the attached pods by uid."""
    came = (
        (Reason.ATTACHED, after[uid], "has the sidecar and receives batches", uid)
        for uid in after
        if uid not in before
    )
    went = (
        (Reason.DETACHED, before[uid], "is no longer attached", uid) for uid in before if uid not in after
    )
    of_job = (JobEvent(reason, f"pod {pod.name} {what}", uid) for reason, pod, what, uid in (*came, *went))
    known = {pod.controller for pod in before.values()}
    new = dict.fromkeys(pod.controller for pod in after.values() if pod.controller not in known)
    text = f"the pods have the sidecar of {KIND} {job}, and receive their batches from that job's feeders"
    of_controllers = (JobEvent(Reason.INJECTED, text, by.uid, by) for by in new if by is not None)
    return (*of_job, *of_controllers)


def of_missing_job(namespace: str, job: str, pods: Iterable[Mapping[str, Any]]) -> tuple[JobEvent, ...]:
    """Returns one event for each controller of pods whose label names a job that does not exist."""
    text = (
        f"the label {LABEL_INJECT} names {KIND} {namespace}/{job}, which does not exist, so no feeder makes batches for"
        " these pods: create the job, or remove the label"
    )
    return _not_attached(text, pods)


def of_own_trainers(job: str, pods: Iterable[Mapping[str, Any]]) -> tuple[JobEvent, ...]:
    """Returns one event for each controller of pods whose label names a job that creates its own trainers."""
    text = (
        f"the label {LABEL_INJECT} names {KIND} {job}, which creates its own trainers (spec.trainers.job), so its"
        " feeders make no batches for these pods: name a job with spec.trainers.attach, or remove the label"
    )
    return _not_attached(text, pods)


def _not_attached(text: str, pods: Iterable[Mapping[str, Any]]) -> tuple[JobEvent, ...]:
    found = dict.fromkeys(attached_pod(pod).controller or _itself(pod) for pod in pods)
    return tuple(JobEvent(Reason.NOT_ATTACHED, text, by.uid, by) for by in found)


def _itself(pod: Mapping[str, Any]) -> Controller:
    metadata = pod["metadata"]
    return Controller(
        api_version="v1", kind="Pod", name=str(metadata["name"]), uid=str(metadata.get("uid") or "")
    )
