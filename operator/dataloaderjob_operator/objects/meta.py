"""Parts that all children have in common: metadata, owner, the user's parts and the operator's put together. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.job import API_VERSION, KIND
from dataloaderjob_operator import names

Manifest = dict[str, Any]
"""An object of the API as JSON has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPod:
    """The operator's pod, as a NetworkPolicy selects it."""

    namespace: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """Settings of the operator for all jobs."""

    version: str
    """The operator's."""
    sidecar_image: str
    """Image for manifests that name none."""
    root_key: bytes
    """Key from which jobs' keys are derived."""
    operator: OwnPod | None = None
    """None: it is in none of the cluster's pods, and policies let it in nowhere."""


def labels(job: DataLoaderJob, role: names.Role | None = None) -> dict[str, str]:
    """Makes the labels of a child, or of its pods."""
    return {
        **names.labels(job.name, role),
        "app.kubernetes.io/managed-by": names.MANAGER,
        "app.kubernetes.io/part-of": job.name,
    }


def metadata(job: DataLoaderJob, name: str, role: names.Role | None = None) -> Manifest:
    """Name, namespace, labels and owner of a child. Raises ValueError for a job that is on no cluster."""
    if not job.metadata.uid or not job.metadata.namespace:
        raise ValueError(f"job {job.name} has no uid or namespace: it is on no cluster")
    return {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": labels(job, role),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.metadata.uid,
                "controller": True, "blockOwnerDeletion": True,
            }
        ],
    }  # fmt: skip


def digest(user_part: Any) -> str:
    """Hashes the user's part: twelve digits that change when it does."""
    text = json.dumps(user_part, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def by_name(ours: Iterable[Manifest], theirs: Iterable[Manifest]) -> list[Manifest]:
    """Joins named things, such as variables and volumes: ours first, then theirs whose names are not ours."""
    found = {item["name"]: item for item in ours}
    return [*found.values(), *(item for item in theirs if item["name"] not in found)]


def environment(variables: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in variables.items()]
