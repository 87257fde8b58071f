"""Objects with nothing in them that is not looked at: a cluster may have ten thousand pods of jobs. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

METADATA = frozenset({"managedFields", "selfLink"})
"""Left out of every object."""
POD = ("containerStatuses", "initContainerStatuses", "conditions", "phase", "podIP", "reason", "message")
CONTAINER = ("name", "ready", "started", "restartCount", "state", "lastState")
SHARED_CHARS = 64
"""Texts up to this length are kept once, however many objects have them: names of fields, images, phases."""


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


def _shared(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_text(name): _shared(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shared(inner) for inner in value]
    return _text(value) if isinstance(value, str) else value


def _text(value: str) -> str:
    return sys.intern(value) if type(value) is str and len(value) <= SHARED_CHARS else value
