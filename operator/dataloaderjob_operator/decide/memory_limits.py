"""The memory limit of a container in a job's pod, and the field of the manifest that has it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataloaderjob.api.feeders import CONTAINER
from dataloaderjob.api.ray import HEAD_CONTAINER
from dataloaderjob.core.memory import FEEDERS_FIELD
from dataloaderjob_operator.names import LABEL_ROLE, Role
from dataloaderjob_operator.objects.workloads import SIDECAR

_OWN = {
    (Role.FEEDER, CONTAINER): FEEDERS_FIELD,
    (Role.HEAD, HEAD_CONTAINER): "spec.ray.managed.head.resources.limits.memory",
    (Role.TRAINER, SIDECAR): "spec.sidecar.resources.limits.memory",
}
_TEMPLATES = {
    Role.FEEDER: "spec.feeders.template",
    Role.HEAD: "spec.ray.managed.head.template",
    Role.TRAINER: "spec.trainers.job.template",
}


def want_of_memory(pod: Mapping[str, Any], container: str) -> str:
    """Describes that a container was killed for want of memory, with its limit and the field to raise."""
    limit = _limit(pod, container)
    field = _field(pod, container)
    if limit is None:
        return f"killed for want of memory, without a limit of its own: its node had no more; set {field}"
    return f"killed for want of memory, its limit is {limit}: raise {field}"


def _limit(pod: Mapping[str, Any], container: str) -> str | None:
    spec = pod.get("spec", {})
    for group in ("initContainers", "containers"):
        for found in spec.get(group) or ():
            if found.get("name") == container:
                limit = ((found.get("resources") or {}).get("limits") or {}).get("memory")
                return None if limit is None else str(limit)
    return None


def _field(pod: Mapping[str, Any], container: str) -> str:
    role = Role((pod["metadata"].get("labels") or {}).get(LABEL_ROLE, Role.TRAINER))
    own = _OWN.get((role, container))
    return own or f"resources.limits.memory of container {container} in {_TEMPLATES[role]}"
