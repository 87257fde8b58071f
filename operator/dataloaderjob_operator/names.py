"""The names, labels and metadata of a job's children, and the job's derived keys. Pure. The same job always has the
same names and keys. Nothing is therefore created twice, and a deleted Secret is recreated with the same bytes.

A key is the HMAC-SHA256 of a label and the job's uid under the operator's root key. A job's key reveals nothing about
the root key or other jobs' keys.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from dataloaderjob.api import API_VERSION, KIND, DataLoaderJob
from dataloaderjob.api.injection import LABEL
from dataloaderjob.api.injection import attachment as attachment
from dataloaderjob.api.pods import WorkloadMetadata

MANAGER = "dataloaderjob-operator"
"""Name of the field manager of all fields that the operator applies."""
LABEL_JOB = "dataloading.dev/job"
LABEL_ROLE = "dataloading.dev/role"
LABEL_ATTEMPT = "dataloading.dev/attempt"
"""Label of trainers: the number of restarts before this attempt."""
ANNOTATION_TEMPLATE = "dataloading.dev/template"
"""Hash of the user's part of a pod template. Pods are replaced only when it changes."""
ANNOTATION_MADE_BY = "dataloading.dev/made-by"
"""Version of the operator that built the pod template."""
LABEL_INJECT = LABEL
ROOT_NBYTES = 32


class Role(StrEnum):
    """Roles of a job's pods."""

    HEAD = "head"
    FEEDER = "feeder"
    TRAINER = "trainer"


def unique(namespace: str, job: str, uid: str) -> str:
    """Returns the name that identifies the job on its connections. No earlier job had this name, even if it had the
    same object name."""
    return f"{namespace}/{job}/{uid}"


def key_secret(job: str, uid: str, root: bytes) -> str:
    """Returns the name of the Secret with the job's keys under this root key. An earlier job of the same object name
    had a different Secret."""
    return f"{job}-keys-{uid[:8]}-{_derive(root, 'name', uid).hex()[:6]}"


def certificate_secret(job: str, uid: str, root: bytes, generation: int) -> str:
    """Returns the name of the Secret with the certificates of one generation. `root`: the root key from which they are
    derived."""
    return f"{job}-tls-{uid[:8]}-{_derive(root, 'name', uid).hex()[:6]}-{generation}"


def is_attached_secret(job: str, name: str) -> bool:
    """Returns True if `name` is the name of the Secret for a job's sidecars in attached pods. An earlier job may have
    had a Secret of the same name."""
    return name == attachment(job) or name.startswith(f"{attachment(job)}-tls-")


def settings_map(job: str, content: str) -> str:
    """Returns the name of the ConfigMap with settings. `content`: the digest of the settings."""
    return f"{job}-settings-{content}"


def head(job: str) -> str:
    """Returns the name of the head's Deployment."""
    return f"{job}-head"


def head_service(job: str) -> str:
    """Returns the name of the Service through which feeders and sidecars find the head."""
    return _service(job, "head")


def _service(job: str, role: str) -> str:
    """Returns the name of a Service. Service names begin with a letter (RFC 1035), but other names may begin with a
    digit. If the job's name begins with a digit, the Service gets a name that no other job uses."""
    return f"{role[0]}-{job}-svc" if job[0].isdigit() else f"{job}-{role}"


def feeders(job: str) -> str:
    return f"{job}-feeders"


def trainers(job: str, attempt: int) -> str:
    """Returns the name of an attempt's Indexed Job. The host name of each of its pods is this name, a hyphen and the
    replica's number."""
    return f"{trainers_stem(job)}-{attempt}"


def trainers_stem(job: str) -> str:
    """Returns the common prefix of the names of the job's Indexed Jobs. A hyphen and the attempt's number follow it."""
    return f"{job}-trainers"


def trainers_service(job: str) -> str:
    """Returns the name of the headless Service through which trainer pods find each other."""
    return _service(job, "trainers")


def policy(job: str, role: Role) -> str:
    """Returns the name of the NetworkPolicy of a role's pods."""
    return f"{job}-{role.value}"


def labels(job: str, role: Role | None = None) -> dict[str, str]:
    """Returns the labels of a child. They also serve to select the child's pods."""
    found = {LABEL_JOB: job}
    return found if role is None else {**found, LABEL_ROLE: role.value}


def selector(job: str, role: Role) -> str:
    """Returns the selector of a role's pods as text, for the scale subresource."""
    return ",".join(f"{name}={value}" for name, value in sorted(labels(job, role).items()))


def child_labels(
    job: DataLoaderJob, role: Role | None = None, theirs: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Returns all labels of a child or its pods: Kubernetes' recommended labels, the user's labels, and the labels used
    in selectors."""
    return {
        "app.kubernetes.io/managed-by": MANAGER,
        "app.kubernetes.io/part-of": job.name,
        **theirs,
        **labels(job.name, role),
    }


def metadata(
    job: DataLoaderJob, name: str, role: Role | None = None, theirs: WorkloadMetadata | None = None
) -> dict[str, Any]:
    """Builds the metadata of a child: name, namespace, labels, annotations and owner. Raises ValueError if the job is
    not on a cluster."""
    if not job.metadata.uid or not job.metadata.namespace:
        raise ValueError(f"job {job.name} has no uid or namespace, because it is not on a cluster")
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
    """Derives the job's 32-byte key. The keys of sidecars, feeders and controllers are derived from it
    (`dataloaderjob.core.keys`). Raises ValueError if the root key is too short."""
    return _derive(root, "links", uid)


def certificate_seed(root: bytes, uid: str) -> bytes:
    """Derives the secret from which the job's certificates are derived. Raises ValueError if the root key is too
    short."""
    return _derive(root, "tls", uid)


def ray_token(root: bytes, uid: str) -> str:
    """Derives the token of the job's Ray cluster, as 64 hexadecimal digits. Raises ValueError if the root key is too
    short."""
    return _derive(root, "ray", uid).hex()


def check_root(root: bytes) -> None:
    """Raises ValueError if a root key is too short."""
    if len(root) < ROOT_NBYTES:
        raise ValueError(f"the root key must have at least {ROOT_NBYTES} bytes, but has {len(root)}")


def _derive(root: bytes, label: str, uid: str) -> bytes:
    check_root(root)
    if not uid:
        raise ValueError("a job without a uid is not on a cluster and has no key")
    key = hashlib.sha256(root).digest()  # otherwise HMAC pads short roots with zeros, and two could be alike
    return hmac.new(key, f"dataloaderjob/{label}/{uid}".encode(), "sha256").digest()
