"""Objects with nothing in them that is not looked at: a cluster may have ten thousand pods of jobs. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

METADATA = frozenset({"managedFields", "selfLink"})
"""Left out of every object."""
POD = ("containerStatuses", "initContainerStatuses", "conditions", "phase", "podIP", "reason", "message")
CONTAINER = ("name", "ready", "started", "restartCount", "state", "lastState")
SHARED = frozenset(
    {"type", "status", "reason", "phase", "restartPolicy", "kind", "apiVersion", "image", "protocol"}
)
"""Fields of which a few texts make up the values of all objects: kept once, as names of fields are."""


def slim(thing: Mapping[str, Any]) -> dict[str, Any]:
    """What the operator reads of it, of a pod little, of another child all that may have to be compared."""
    metadata = {name: value for name, value in thing["metadata"].items() if name not in METADATA}
    found = {**thing, "metadata": metadata}
    if thing["kind"] == "Pod":
        metadata.pop("annotations", None)
        found = {
            "kind": "Pod", "metadata": metadata, "spec": _pod_spec(thing.get("spec") or {}),
            "status": _pod_status(thing.get("status") or {}),
        }  # fmt: skip
    return dict(_shared(found))


def _pod_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """How its containers are started again."""
    init = [_only(container, ("name", "restartPolicy")) for container in spec.get("initContainers") or ()]
    return {**_only(spec, ("restartPolicy",)), "initContainers": init}


def _pod_status(status: Mapping[str, Any]) -> dict[str, Any]:
    found = _only(status, POD)
    for group in ("containerStatuses", "initContainerStatuses"):
        if found.get(group):
            found[group] = [_only(container, CONTAINER) for container in found[group]]
    return found


def _only(thing: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: thing[name] for name in names if name in thing}


def _shared(value: Any, field: str = "") -> Any:
    if isinstance(value, Mapping):
        return {_once(name): _shared(inner, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shared(inner) for inner in value]
    return _once(value) if field in SHARED and isinstance(value, str) else value


def _once(value: str) -> str:
    return sys.intern(value) if type(value) is str else value
