"""Names, labels and metadata of a job's children, and its derived keys. Pure: the same job has the same names and keys,
so nothing is ever made twice, and a Secret that was deleted comes back with the same bytes.

Keys are HMAC-SHA256 with the operator's root key over a label and the job's uid. Who has a job's key learns nothing of
the root key or of another job's.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from dataloaderjob.api import API_VERSION, KIND, DataLoaderJob
from dataloaderjob.api.pods import WorkloadMetadata

MANAGER = "dataloaderjob-operator"
"""Field manager of everything that the operator applies."""
LABEL_JOB = "dataloading.dev/job"
LABEL_ROLE = "dataloading.dev/role"
LABEL_ATTEMPT = "dataloading.dev/attempt"
"""Label of trainers: how often they were all started before."""
ANNOTATION_TEMPLATE = "dataloading.dev/template"
"""Hash of the user's part of a pod template: pods are replaced when it changes, and only then."""
ANNOTATION_MADE_BY = "dataloading.dev/made-by"
"""Version of the operator that made the pod template."""
ROOT_NBYTES = 32


class Role(StrEnum):
    """Roles of a job's pods."""

    HEAD = "head"
    FEEDER = "feeder"
    TRAINER = "trainer"


def unique(namespace: str, job: str, uid: str) -> str:
    """The job's name on its connections: no other job, nor an earlier one of this name, has it."""
    return f"{namespace}/{job}/{uid}"


def key_secret(job: str, uid: str) -> str:
    """The Secret with the job's keys; no other job, nor an earlier one of this name, has it."""
    return f"{job}-key-{uid[:8]}"


def settings_map(job: str, content: str) -> str:
    """The ConfigMap with settings of this content, by its digest."""
    return f"{job}-settings-{content}"


def head(job: str) -> str:
    """The head's Deployment."""
    return f"{job}-head"


def head_service(job: str) -> str:
    """The Service under which feeders, sidecars and the operator find the head."""
    return _service(job, "head")


def _service(job: str, role: str) -> str:
    """Names of Services begin with a letter (RFC 1035), those of all else may begin with a digit. The name for the
    Service of a job that does is no other job's."""
    return f"{role[0]}-{job}-svc" if job[0].isdigit() else f"{job}-{role}"


def feeders(job: str) -> str:
    return f"{job}-feeders"


def trainers(job: str, attempt: int) -> str:
    """The Indexed Job; its pods' host names are this, a hyphen and the replica's number."""
    return f"{trainers_stem(job)}-{attempt}"


def trainers_stem(job: str) -> str:
    """What the names of all its Indexed Jobs begin with, before a hyphen and the attempt."""
    return f"{job}-trainers"


def trainers_service(job: str) -> str:
    """The headless Service under which trainer pods find each other."""
    return _service(job, "trainers")


def policy(job: str, role: Role) -> str:
    """The NetworkPolicy of a role's pods."""
    return f"{job}-{role.value}"


def labels(job: str, role: Role | None = None) -> dict[str, str]:
    """Labels of a child; also the selector of its pods."""
    found = {LABEL_JOB: job}
    return found if role is None else {**found, LABEL_ROLE: role.value}


def selector(job: str, role: Role) -> str:
    """The same as text, for the scale subresource."""
    return ",".join(f"{name}={value}" for name, value in sorted(labels(job, role).items()))


def child_labels(
    job: DataLoaderJob, role: Role | None = None, theirs: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """All labels of a child, or of its pods: Kubernetes' own, the user's, and those that select it."""
    return {
        "app.kubernetes.io/managed-by": MANAGER,
        "app.kubernetes.io/part-of": job.name,
        **theirs,
        **labels(job.name, role),
    }


def metadata(
    job: DataLoaderJob, name: str, role: Role | None = None, theirs: WorkloadMetadata | None = None
) -> dict[str, Any]:
    """Name, namespace, labels, annotations and owner of a child. Raises ValueError for a job that is on no cluster."""
    if not job.metadata.uid or not job.metadata.namespace:
        raise ValueError(f"job {job.name} has no uid or namespace: it is on no cluster")
    return {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": child_labels(job, role, theirs.labels if theirs else {}),
        **({"annotations": dict(theirs.annotations)} if theirs and theirs.annotations else {}),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.metadata.uid,
                "controller": True, "blockOwnerDeletion": True,
            }
        ],
    }  # fmt: skip


def job_key(root: bytes, uid: str) -> bytes:
    """Key of the connections between sidecars, feeders and supervisor, 32 bytes. Raises ValueError for a short root."""
    return _derive(root, "links", uid)


def ray_token(root: bytes, uid: str) -> str:
    """Token of the job's Ray cluster, 64 hexadecimal digits. Raises ValueError for a short root."""
    return _derive(root, "ray", uid).hex()


def check_root(root: bytes) -> None:
    """Raises ValueError for a root key that is too short."""
    if len(root) < ROOT_NBYTES:
        raise ValueError(f"the root key needs {ROOT_NBYTES} bytes at least, found {len(root)}")


def _derive(root: bytes, label: str, uid: str) -> bytes:
    check_root(root)
    if not uid:
        raise ValueError("a job without a uid has no key: it is not on a cluster")
    key = hashlib.sha256(root).digest()  # HMAC itself pads with zeros: roots that end in some would be alike
    return hmac.new(key, f"dataloaderjob/{label}/{uid}".encode(), "sha256").digest()
