"""The manifest's fields that set the resources of a job's pods, for messages about these resources. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dataloaderjob.api.feeders import CONTAINER
from dataloaderjob.api.ray import HEAD_CONTAINER, SUPERVISOR_CONTAINER
from dataloaderjob.api.sidecar import SIDECAR
from dataloaderjob.core.memory import FEEDERS_FIELD
from dataloaderjob_operator.kinds import MEMORY_LIMITS
from dataloaderjob_operator.names import LABEL_ROLE, Role

_OWN = {
    (Role.FEEDER, CONTAINER): FEEDERS_FIELD,
    (Role.HEAD, HEAD_CONTAINER): "spec.ray.managed.head.resources.limits.memory",
    (Role.HEAD, SUPERVISOR_CONTAINER): "spec.ray.managed.head.resources.limits.memory",
    (Role.TRAINER, SIDECAR): "spec.sidecar.resources.limits.memory",
}
_ASKED = {
    Role.FEEDER: "spec.feeders.resources",
    Role.HEAD: "spec.ray.managed.head.resources",
    Role.TRAINER: "spec.trainers.job.template or spec.sidecar.resources",
}
_RESOURCES = re.compile(
    r"(exceeded|failed) quota|(minimum|maximum) [\w.\-/]+ usage per|limit to request ratio|less than or equal to"
)
"""Kubernetes' messages about quotas and LimitRanges (version 1.34)."""
_TEMPLATES = {
    Role.FEEDER: "spec.feeders.template",
    Role.HEAD: "spec.ray.managed.head.template",
    Role.TRAINER: "spec.trainers.job.template",
}


def want_of_memory(pod: Mapping[str, Any], container: str) -> str:
    """Describes the out-of-memory kill of a container, with its limit and the field to raise."""
    limit = (pod.get("spec", {}).get(MEMORY_LIMITS) or {}).get(container)
    field = _field(pod, container)
    if limit is None:
        return (
            f"OOM-killed because its node ran out of memory; the container has no memory limit: set {field}"
        )
    return f"OOM-killed with a memory limit of {limit}: raise {field}"


def with_field(message: str, role: Role) -> str:
    """Adds the name of the field to change, if the API server's message says that a quota or a LimitRange rejects a
    pod."""
    if _RESOURCES.search(message) is None:
        return message
    return f"{message}; change this pod's resources in {_ASKED[role]}"


def _field(pod: Mapping[str, Any], container: str) -> str:
    role = Role((pod["metadata"].get("labels") or {}).get(LABEL_ROLE, Role.TRAINER))
    own = _OWN.get((role, container))
    return own or f"resources.limits.memory of container {container} in {_TEMPLATES[role]}"
