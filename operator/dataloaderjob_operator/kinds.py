"""Kinds of objects that the operator handles: one row for each says where the API has it, how the operator learns what
becomes of it, how a live one is compared with what is wanted, and what of it the cache keeps. Pure.

A further child, or a further watch, is one row here and its rights in the chart's `dataloaderjob.rules`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from dataloaderjob.api import GROUP, KIND, PLURAL, VERSION

Object = Mapping[str, Any]
UNREAD_METADATA = frozenset({"managedFields", "selfLink"})
"""Fields of the metadata that the cache drops from every object."""
POD_STATUS = (
    "containerStatuses",
    "initContainerStatuses",
    "conditions",
    "phase",
    "podIP",
    "reason",
    "message",
)
CONTAINER_STATUS = ("name", "ready", "started", "restartCount", "state", "lastState")
INTERNED = frozenset(
    {"type", "status", "reason", "phase", "restartPolicy", "kind", "apiVersion", "image", "protocol"}
)
"""Fields of which a few texts make up the values of all objects: the cache keeps each text once, as names of fields."""


class Source(Enum):
    """Ways in which the operator learns what becomes of an object."""

    WATCH = auto()
    POLL = auto()
    """Read by its name now and then, since nobody should have to list the kind."""
    LOOKUP = auto()
    """Listed for one other object, when a decision needs it."""


class Comparison(Enum):
    """Rules by which a live child is as it is wanted."""

    FIELDS = auto()
    """Each field that the operator sets is there with its value; others may set more."""
    EXACT = auto()
    """Each field of the spec is the operator's as a whole: what somebody adds to a rule of a NetworkPolicy lets in what
    we shut out, and an empty selector means all where a missing one means nothing."""
    CREATED_ONLY = auto()
    """A live object is left alone, whatever it has: its spec cannot be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of objects."""

    name: str
    group: str
    version: str
    plural: str
    source: Source = Source.WATCH
    compared: Comparison | None = None
    """None: the operator makes none as a child of a job."""
    transform: Callable[[Object], Object] = lambda thing: thing
    """Drops what the cache does not need, beside UNREAD_METADATA."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> tuple[str, str, str]:
        """The kind by the names that kopf knows it by."""
        return self.group, self.version, self.plural

    def path(self, namespace: str | None) -> str:
        """The path of all objects in a namespace; None: in all of them."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        return (
            f"{root}/{self.plural}" if namespace is None else f"{root}/namespaces/{namespace}/{self.plural}"
        )


def transform(thing: Object) -> dict[str, Any]:
    """Reduces an object to what the cache keeps."""
    metadata = {name: value for name, value in thing["metadata"].items() if name not in UNREAD_METADATA}
    return dict(_interned(KINDS[thing["kind"]].transform({**thing, "metadata": metadata})))


def _pod(pod: Object) -> Object:
    """Keeps whose a pod is, how its containers are started again, and its status."""
    metadata = {name: value for name, value in pod["metadata"].items() if name != "annotations"}
    spec, status = pod.get("spec") or {}, _only(pod.get("status") or {}, POD_STATUS)
    init = [_only(container, ("name", "restartPolicy")) for container in spec.get("initContainers") or ()]
    for group in ("containerStatuses", "initContainerStatuses"):
        if status.get(group):
            status[group] = [_only(container, CONTAINER_STATUS) for container in status[group]]
    return {
        "kind": "Pod", "metadata": metadata, "spec": {**_only(spec, ("restartPolicy",)), "initContainers": init},
        "status": status,
    }  # fmt: skip


def _only(thing: Object, names: Sequence[str]) -> dict[str, Any]:
    return {name: thing[name] for name in names if name in thing}


def _interned(value: Any, field: str = "") -> Any:
    if isinstance(value, Mapping):
        return {_intern(name): _interned(inner, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_interned(inner) for inner in value]
    return _intern(value) if field in INTERNED and isinstance(value, str) else value


def _intern(value: str) -> str:
    return sys.intern(value) if type(value) is str else value


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name=KIND, group=GROUP, version=VERSION, plural=PLURAL),
        Kind(
            name="Deployment", group="apps", version="v1", plural="deployments", compared=Comparison.FIELDS,
        ),
        Kind(name="Job", group="batch", version="v1", plural="jobs", compared=Comparison.CREATED_ONLY),
        Kind(name="Pod", group="", version="v1", plural="pods", transform=_pod),
        Kind(name="Service", group="", version="v1", plural="services", compared=Comparison.FIELDS),
        Kind(name="ConfigMap", group="", version="v1", plural="configmaps", compared=Comparison.FIELDS),
        Kind(
            name="NetworkPolicy", group="networking.k8s.io", version="v1", plural="networkpolicies",
            compared=Comparison.EXACT,
        ),
        Kind(
            name="Secret", group="", version="v1", plural="secrets", source=Source.POLL,
            compared=Comparison.CREATED_ONLY,
        ),
        Kind(name="Event", group="", version="v1", plural="events", source=Source.LOOKUP),
    )
}  # fmt: skip
WATCHED = tuple(kind for kind in KINDS.values() if kind.source is Source.WATCH)
"""The jobs themselves come first."""
CHILDREN = tuple(kind for kind in KINDS.values() if kind.compared is not None)
"""Kinds of which the operator makes objects for a job."""
