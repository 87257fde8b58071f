"""The answers to admission reviews. A pod and the job that its label names determine a patch or a refusal. Pure."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dataloaderjob.api import KIND, ManifestError, parse_live
from dataloaderjob.api.injection import LABEL, CannotInject, Injection, inject, injection
from dataloaderjob.api.plain import Object

API_VERSION = "admission.k8s.io/v1"
FORBIDDEN = 403
UNREADABLE = 500
DONE = ("Complete", "Failed")
"""Conditions of a job that has ended."""
JobPatch = list[dict[str, Any]]


class ReviewResult(StrEnum):
    """Kinds of answers, for the metrics."""

    INJECTED = "injected"
    UNCHANGED = "unchanged"
    """The pod does not have the label, already has the current sidecar, or belongs to another operator's job."""
    REFUSED = "refused"
    """The pod or its job has to change."""
    FAILED = "failed"
    """The job could not be read."""


class BadReview(Exception):
    """The request is not an admission review of a pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """The review of a pod that is being created."""

    uid: str
    namespace: str
    pod: Object

    @property
    def job(self) -> str | None:
        """The name of the job; None if the pod does not have the label."""
        labels = (self.pod.get("metadata") or {}).get("labels") or {}
        return None if LABEL not in labels else str(labels[LABEL])

    @property
    def name(self) -> str:
        """The pod's name, or its prefix if the pod has no full name yet."""
        metadata = self.pod.get("metadata") or {}
        return str(metadata.get("name") or metadata.get("generateName") or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewAnswer:
    """The answer to a review."""

    result: ReviewResult
    pod: Object | None = None
    """The pod with the sidecar; None if the pod was not injected."""
    message: str = ""
    code: int = FORBIDDEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The injector's settings for all jobs. They match the operator's settings."""

    sidecar_image: str
    pull_secrets: tuple[str, ...] = ()
    manages: Callable[[str | None], bool] = lambda _: True
    """Returns True if the operator of this release manages a job with this `spec.managedBy`."""


_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
"""Kubernetes' rules for these texts. Anyone who reaches the injector can send it a review, so it checks them itself."""


def read_review(body: Any) -> Review:
    """Reads a request. Raises BadReview."""
    request = body.get("request") if isinstance(body, Mapping) else None
    if not isinstance(request, Mapping) or body.get("apiVersion") != API_VERSION or not request.get("uid"):
        raise BadReview(f"expected an AdmissionReview of {API_VERSION}")
    pod = request.get("object")
    if not isinstance(pod, Mapping) or pod.get("kind") != "Pod" or not request.get("namespace"):
        raise BadReview("expected a Pod in a namespace")
    metadata = pod.get("metadata") or {}
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("labels") or {}, Mapping):
        raise BadReview("expected a Pod with metadata and labels")
    review = Review(uid=str(request["uid"]), namespace=str(request["namespace"]), pod=pod)
    if not _NAMESPACE.fullmatch(review.namespace):
        raise BadReview("expected the name of a namespace")
    if review.job and not _LABEL_VALUE.fullmatch(review.job):
        raise BadReview(f"expected a valid value of the label {LABEL}")
    return review


def answer(review: Review, job: Object | None, setup: Setup) -> ReviewAnswer:
    """Returns the answer for a labeled pod. `job`: the DataLoaderJob as the API server returns it; None if it does not
    exist."""
    where = f"{KIND} {review.namespace}/{review.job}"
    if job is None:
        return ReviewAnswer(
            result=ReviewResult.REFUSED,
            message=f"the label {LABEL} names {where}, which does not exist: create it, or remove the label",
        )
    spec = job.get("spec") or {}
    if not setup.manages(spec.get("managedBy")):
        return ReviewAnswer(result=ReviewResult.UNCHANGED)
    if why := _over(job):
        return ReviewAnswer(
            result=ReviewResult.REFUSED,
            message=f"{where} {why}: create a new job, or remove the label {LABEL}",
        )
    try:
        made = inject(review.pod, injection_of(job, setup))
    except ManifestError as exc:
        return ReviewAnswer(result=ReviewResult.REFUSED, message=f"{where} cannot be used: {exc}")
    except (CannotInject, ValueError) as exc:
        return ReviewAnswer(result=ReviewResult.REFUSED, message=f"cannot add the sidecar of {where}: {exc}")
    if made == review.pod:
        return ReviewAnswer(result=ReviewResult.UNCHANGED)
    return ReviewAnswer(result=ReviewResult.INJECTED, pod=made)


def injection_of(job: Object, setup: Setup) -> Injection:
    """Builds the injection for a live job. Raises CannotInject and ManifestError."""
    parsed, _ = parse_live(job, source=str((job.get("metadata") or {}).get("name")))
    return injection(parsed, image=setup.sidecar_image, pull_secrets=setup.pull_secrets)


def _over(job: Object) -> str:
    """Returns the reason why a job accepts no more pods; empty if it accepts them."""
    if (job.get("metadata") or {}).get("deletionTimestamp"):
        return "is being deleted"
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition.get("type") in DONE and condition.get("status") == "True":
            return f"is {condition['type']}"
    return ""


def unreadable(review: Review, why: str) -> ReviewAnswer:
    """Builds the answer for a pod whose job the API server did not return. The pod's controller retries later."""
    message = f"cannot read {KIND} {review.namespace}/{review.job}, which the label {LABEL} names: {why}"
    return ReviewAnswer(result=ReviewResult.FAILED, message=message, code=UNREADABLE)


def response(review: Review, found: ReviewAnswer) -> dict[str, Any]:
    """Builds the AdmissionReview to send in response."""
    allowed = found.result in (ReviewResult.INJECTED, ReviewResult.UNCHANGED)
    made: dict[str, Any] = {"uid": review.uid, "allowed": allowed}
    if not allowed:
        made["status"] = {"code": found.code, "message": found.message}
    if found.pod is not None:
        made |= {"patchType": "JSONPatch", "patch": _encoded(patch(review.pod, found.pod))}
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": made}


def patch(before: Object, after: Object) -> JobPatch:
    """Returns the JSON patch that turns `before` into `after`. It sets each field of metadata and spec that differs."""
    return [
        {"op": "add", "path": f"/{part}/{field}", "value": value}
        for part in ("metadata", "spec")
        for field, value in after[part].items()
        if (before.get(part) or {}).get(field) != value
    ]


def _encoded(operations: JobPatch) -> str:
    return base64.b64encode(json.dumps(operations).encode()).decode()
