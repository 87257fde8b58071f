"""Labeled pods that were refused at creation, read from the events of their controllers. Pure.

If an admission policy or an injected file adds the sidecar, neither the operator nor the injector sees a refused pod.
However, the pod's controller reports the refusal in a Warning event. The operator therefore reads these events in the
namespaces of jobs with attached trainers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dataloaderjob.api import KIND, DataLoaderJob
from dataloaderjob.api.injection import LABEL, CannotInject, inject, injection
from dataloaderjob_operator.decide.events import MAX_MESSAGE_NBYTES, JobEvent, Reason, cut
from dataloaderjob_operator.decide.health import moment_of
from dataloaderjob_operator.decide.observed import Key
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import MANAGER
from dataloaderjob_operator.objects import OperatorConfig

AGAIN_S = 600.0
"""Seconds after which the same refusal may be reported again. Older refusals are not reported at all."""
GUARDED = "sidecars: see that the job exists"
"""Part of the guard's message about a pod that was not injected. The guard does not know the cause."""
WEBHOOK = "inject.dataloading.dev"
_DENIED = re.compile(r"denied (?:the )?request: (.*)", re.DOTALL)
_NAMED = re.compile(rf"\b{KIND} (?:[a-z0-9-]+/)?([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)")
_OURS = re.compile(rf"\b{KIND} |{re.escape(LABEL)}|policy '[^']*-injector(?:-guard)?'", re.IGNORECASE)
_UNREACHABLE = re.compile(rf'failed calling webhook "{re.escape(WEBHOOK)}"(?:.*: (.*))?', re.DOTALL)
_STRIPPED = re.compile(
    r"initContainers\[\d+\]\.startupProbe: Forbidden: may not be set for init containers without restartPolicy"
)
"""Kubernetes' own refusal of a sidecar that has lost its restartPolicy. It comes before the guard's refusal."""
LOST = (
    "the sidecar has lost its restartPolicy Always, without which the pod never starts: another webhook with old API"
    " types has removed it; exclude the pods from that webhook, or update it"
)
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_UNSTABLE = re.compile(r"\b\d+\.\d+\.\d+\.\d+(?::\d+)?\b|\bpods? \"[^\"]*\"")
"""Addresses and names of pods, which differ between attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPod:
    """A refusal of the pods of one controller."""

    job: str
    """The job that the refusal names. Empty if it names none, for instance because the webhook does not answer."""
    kind: str
    """The kind of the controller."""
    name: str
    uid: str
    cause: str
    """The reason and the remedy, in text that is the same for every attempt."""
    at: datetime
    """Time of the last attempt to create a pod."""
    is_general: bool = False
    """True if pods without the label may be refused with the same message. Only the pod template then shows whether the
    refusal concerns the job."""

    @property
    def identity(self) -> tuple[str, str]:
        """The refusal's identity, which stays the same if the refusal is repeated."""
        return self.uid, self.cause

    @property
    def source(self) -> Key | None:
        """The kind and name of the object with the pod template; None if the operator cannot read that object."""
        if not _NAME.fullmatch(self.name):  # the name becomes part of a path, and anyone may create an event
            return None
        if self.kind == "Job":
            return "Job", self.name
        stem = self.name.rpartition("-")[0]
        return ("Deployment", stem) if self.kind == "ReplicaSet" and stem else None


def refused_pods(events: Iterable[Mapping[str, Any]]) -> tuple[RefusedPod, ...]:
    """Returns the distinct refusals that events report, each with the time of its last attempt, newest first."""
    found = dict[tuple[str, str], RefusedPod]()
    for event in events:
        refusal = _refusal(event)
        if refusal is not None:
            known = found.get(refusal.identity)
            found[refusal.identity] = refusal if known is None or known.at < refusal.at else known
    return tuple(sorted(found.values(), key=lambda refusal: refusal.at, reverse=True))


def is_due(refusal: RefusedPod, reported: RefusedPod | None, now: datetime) -> bool:
    """Returns True if a refusal should be reported now. `reported`: the same refusal as last reported; None if it never
    was."""
    if (now - refusal.at).total_seconds() > AGAIN_S:
        return False
    return reported is None or (refusal.at - reported.at).total_seconds() >= AGAIN_S


def concerns(refusal: RefusedPod, owner: Manifest | None, job: str) -> bool:
    """Returns True if a refusal should be reported on this job. `owner`: the object with the pod template; None if the
    operator cannot read it."""
    label = "" if owner is None else label_of(owner)
    if not refusal.is_general:
        return label in ("", job)
    containers = (_template(owner or {}).get("spec") or {}).get("initContainers") or ()
    own = any("startupProbe" in c and c.get("restartPolicy") != "Always" for c in containers)
    return label == job and not own


def label_of(owner: Manifest) -> str:
    """Returns the job that a controller's pod template names; empty if it names none."""
    labels = (_template(owner).get("metadata") or {}).get("labels") or {}
    return str(labels.get(LABEL) or "")


def explained(refusal: RefusedPod, owner: Manifest | None, job: DataLoaderJob, setup: OperatorConfig) -> str:
    """Returns the cause of a refusal. The guard gives only a general cause, so this function finds the precise one by
    injecting the pod template. `owner`: the object with that template; None if the operator cannot read it."""
    if GUARDED not in refusal.cause or owner is None:
        return refusal.cause
    try:
        wanted = injection(job, image=setup.sidecar_image, pull_secrets=setup.sidecar_pull_secrets)
        inject(_template(owner), wanted)
    except (CannotInject, ValueError) as exc:
        return f"cannot add the sidecar of {KIND} {job.name}: {exc}"
    return refusal.cause


def event_of(refusal: RefusedPod, cause: str) -> JobEvent:
    """Returns the event about a refusal. The event gets a new identity every AGAIN_S seconds, regardless of the
    operator's restarts."""
    text = f"{refusal.kind} {refusal.name} cannot create its pods: {cause}"
    period = int(refusal.at.timestamp() // AGAIN_S)
    once = f"{refusal.uid}/{refusal.cause}/{period}"
    return JobEvent(Reason.POD_REFUSED, cut(text, MAX_MESSAGE_NBYTES), once)


def _refusal(event: Mapping[str, Any]) -> RefusedPod | None:
    about, text = event.get("involvedObject") or {}, str(event.get("message") or "")
    ours = (event.get("source") or {}).get("component") == MANAGER
    if ours or event.get("type") != "Warning" or about.get("kind") in (None, KIND, "Pod"):
        return None
    is_general = False
    if (unreachable := _UNREACHABLE.search(text)) is not None:
        job, cause = "", _no_answer(unreachable[1] or "no reason given")
    elif (denied := _DENIED.search(text)) is not None and _OURS.search(text):
        named = _NAMED.search(denied[1])
        job, cause = named[1] if named else "", _stable(denied[1])
    elif _STRIPPED.search(text) is not None:
        job, cause, is_general = "", LOST, True
    else:
        return None
    return RefusedPod(
        job=job, kind=str(about["kind"]), name=str(about.get("name") or ""), uid=str(about.get("uid") or ""),
        cause=cause, at=moment_of(event), is_general=is_general,
    )  # fmt: skip


def _no_answer(why: str) -> str:
    return (
        f"the injector does not respond ({_stable(why)}): see the pods labeled "
        "app.kubernetes.io/name=dataloaderjob-injector in the operator's namespace; the controller will "
        "retry"
    )


def _stable(text: str) -> str:
    return _UNSTABLE.sub("…", " ".join(text.split()))


def _template(owner: Manifest) -> dict[str, Any]:
    return dict((owner.get("spec") or {}).get("template") or {})
