"""Fields of the manifest that have the resources of a job's pods, for messages about those. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dataloaderjob.api.feeders import CONTAINER
from dataloaderjob.api.ray import HEAD_CONTAINER
from dataloaderjob.core.memory import FEEDERS_FIELD
from dataloaderjob_operator.kinds import MEMORY_LIMITS
from dataloaderjob_operator.names import LABEL_ROLE, Role
from dataloaderjob_operator.objects.workloads import SIDECAR

_OWN = {
    (Role.FEEDER, CONTAINER): FEEDERS_FIELD,
    (Role.HEAD, HEAD_CONTAINER): "spec.ray.managed.head.resources.limits.memory",
    (Role.TRAINER, SIDECAR): "spec.sidecar.resources.limits.memory",
}
_ASKED = {
    Role.FEEDER: "spec.feeders.resources",
    Role.HEAD: "spec.ray.managed.head.resources",
    Role.TRAINER: "resources of the containers in spec.trainers.job.template, and spec.sidecar.resources",
}
_RESOURCES = re.compile(
    r"(exceeded|failed) quota|(minimum|maximum) [\w.\-/]+ usage per|limit to request ratio|less than or equal to"
)
"""Kubernetes' words of quotas and LimitRanges (1.34)."""
_TEMPLATES = {
    Role.FEEDER: "spec.feeders.template",
    Role.HEAD: "spec.ray.managed.head.template",
    Role.TRAINER: "spec.trainers.job.template",
}


def want_of_memory(pod: Mapping[str, Any], container: str) -> str:
    """Describes that a container was killed for want of memory, with its limit and the field to raise."""
    limit = (pod.get("spec", {}).get(MEMORY_LIMITS) or {}).get(container)
    field = _field(pod, container)
    if limit is None:
        return f"killed for want of memory, without a limit of its own: its node had no more; set {field}"
    return f"killed for want of memory, its limit is {limit}: raise {field}"


def with_field(message: str, role: Role) -> str:
    """Adds to the API server's refusal of a pod the field to change, where a quota or a LimitRange refuses it."""
    if _RESOURCES.search(message) is None:
        return message
    return f"{message}; what such a pod asks for: {_ASKED[role]}"


def _field(pod: Mapping[str, Any], container: str) -> str:
    role = Role((pod["metadata"].get("labels") or {}).get(LABEL_ROLE, Role.TRAINER))
    own = _OWN.get((role, container))
    return own or f"resources.limits.memory of container {container} in {_TEMPLATES[role]}"
