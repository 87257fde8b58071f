"""The kinds of objects that the operator handles, one row each. A row has the kind's path in the API, and the parts
that the cache keeps. It also sets how the operator learns of changes, and how it compares a live object with the wanted
one. Pure.

To add a kind of child, or a watch, add a row here, and add its permissions to the chart's `dataloaderjob.rules`.

The operator sends nothing if a live object already matches the wanted one. The API server fills in defaults and
normalizes quantities, and other clients own fields of the same object. The comparison therefore checks only that each
field that the operator sets has the operator's value.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from dataloaderjob.api import GROUP, KIND, PLURAL, VERSION
from dataloaderjob.api.base import Quantity
from dataloaderjob_operator.names import ANNOTATION_MADE_BY, ANNOTATION_TEMPLATE

Object = Mapping[str, Any]
Manifest = dict[str, Any]
"""An API object as JSON."""
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
UNREAD_CONDITIONS = frozenset({"Initialized", "PodReadyToStartContainers"})
"""Conditions of pods that the cache drops, because other fields contain their causes."""
CONTAINER_STATUS = ("name", "ready", "started", "restartCount", "state", "lastState")
INTERNED = frozenset(
    {
        "type",
        "status",
        "reason",
        "phase",
        "restartPolicy",
        "kind",
        "apiVersion",
        "image",
        "protocol",
        "nodeName",
        "namespace",
        "labels",
        "ownerReferences",
    }
)
"""Fields with only a few distinct values across all objects, or across all pods of a job. The cache keeps each value
once, as it does for field names."""
ANNOTATION_APPLIED = "dataloading.dev/applied"
"""Hash of the manifest that the operator sent last. If the hash differs, the operator sends the manifest again, which
removes fields that the operator no longer sets."""
_KEYS = ("name", "mountPath", "containerPort", "type", "uid", "key")
"""Fields that may identify an item of a list. The first field that has a different value in every item is used."""
_QUANTITIES = frozenset({"requests", "limits", "capacity"})
_SIZE = "sizeLimit"


class Source(Enum):
    """Ways for the operator to learn of changes to an object."""

    WATCH = auto()
    NONE = auto()
    """The operator creates such objects, but never reads them. Creating one that exists fails with a conflict."""
    LOOKUP = auto()
    """The operator lists such objects on demand, when a decision about another object needs them."""


class Comparison(Enum):
    """Rules for deciding whether a live child matches the wanted one."""

    FIELDS = auto()
    """Each field that the operator sets must have the operator's value. Others may set more fields."""
    EXACT = auto()
    """Each field of the spec must equal the operator's. In a NetworkPolicy, any addition to a rule would admit more
    peers. An empty selector means all peers, but a missing one means none."""
    CREATED_ONLY = auto()
    """The operator leaves a live object alone whatever its content, because its spec cannot be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectKind:
    """A kind of object."""

    name: str
    group: str
    version: str
    plural: str
    source: Source = Source.WATCH
    compared: Comparison | None = None
    """The rule for comparing live children; None if objects of this kind are not children."""
    transform: Callable[[Object], Object] = lambda thing: thing
    """A function that drops parts that the cache does not need, in addition to UNREAD_METADATA."""
    packed: bool = True
    """True if the cache keeps the spec as text."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> tuple[str, str, str]:
        """The names that identify the kind in kopf."""
        return self.group, self.version, self.plural

    def path(self, namespace: str | None) -> str:
        """Returns the path of all objects in a namespace, or in all namespaces if `namespace` is None."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        return (
            f"{root}/{self.plural}" if namespace is None else f"{root}/namespaces/{namespace}/{self.plural}"
        )


class Packed(Mapping[str, Any]):
    """A part of an object, kept as JSON text. The text takes a quarter of the memory that the parsed part would take.
    Each access parses it. This suits parts that are compared after a change, but are seldom read otherwise."""

    __slots__ = ("_text",)

    def __init__(self, value: Mapping[str, Any]) -> None:
        self._text = json.dumps(value, separators=(",", ":"))

    def read(self) -> dict[str, Any]:
        return dict(json.loads(self._text))

    def __getitem__(self, name: str) -> Any:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Packed) else self.read() == other

    __hash__ = None  # type: ignore[assignment]  # like other mappings


MEMORY_LIMITS = "memoryLimits"
"""Field that the operator adds to the spec of a cached pod."""


def transform(thing: Object) -> dict[str, Any]:
    """Reduces an object to the parts that the cache keeps."""
    kind = KINDS[thing["kind"]]
    metadata = {name: value for name, value in thing["metadata"].items() if name not in UNREAD_METADATA}
    spec = thing.get("spec")
    packed = {"spec": Packed(spec)} if kind.packed and isinstance(spec, Mapping) else {}
    return dict(_interned(kind.transform({**thing, "metadata": metadata, **packed})))


def _pod(pod: Object) -> Object:
    """Keeps a pod's metadata, node, restart policies, memory limits and status."""
    metadata = {name: value for name, value in pod["metadata"].items() if name != "annotations"}
    spec, status = pod.get("spec") or {}, _only(pod.get("status") or {}, POD_STATUS)
    init = [_only(container, ("name", "restartPolicy")) for container in spec.get("initContainers") or ()]
    for group in ("containerStatuses", "initContainerStatuses"):
        if status.get(group):
            status[group] = [_only(container, CONTAINER_STATUS) for container in status[group]]
    if status.get("conditions"):
        status["conditions"] = [c for c in status["conditions"] if c.get("type") not in UNREAD_CONDITIONS]
    kept = {
        **_only(spec, ("restartPolicy", "nodeName")),
        "initContainers": init,
        MEMORY_LIMITS: _memory(spec),
    }
    return {"kind": "Pod", "metadata": metadata, "spec": kept, "status": status}


def _memory(spec: Object) -> dict[str, str]:
    """Returns the memory limits of a pod's containers by container name."""
    containers = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    limits = {
        c.get("name"): ((c.get("resources") or {}).get("limits") or {}).get("memory") for c in containers
    }
    return {str(name): str(limit) for name, limit in limits.items() if limit is not None}


def _only(thing: Object, names: Sequence[str]) -> dict[str, Any]:
    return {name: thing[name] for name in names if name in thing}


def _interned(value: Any, *, shared: bool = False) -> Any:
    """Interns the strings in a value. `shared`: True if other objects have the same strings."""
    if isinstance(value, Packed):
        return value
    if isinstance(value, Mapping):
        return {
            _intern(name): _interned(inner, shared=name in INTERNED or shared)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_interned(inner, shared=shared) for inner in value]
    return _intern(value) if shared and isinstance(value, str) else value


def _intern(value: str) -> str:
    return sys.intern(value) if type(value) is str else value


KINDS: Mapping[str, ObjectKind] = {
    kind.name: kind
    for kind in (
        ObjectKind(name=KIND, group=GROUP, version=VERSION, plural=PLURAL),
        ObjectKind(
            name="Deployment", group="apps", version="v1", plural="deployments", compared=Comparison.FIELDS,
        ),
        ObjectKind(name="Job", group="batch", version="v1", plural="jobs", compared=Comparison.CREATED_ONLY),
        ObjectKind(name="Pod", group="", version="v1", plural="pods", transform=_pod, packed=False),
        ObjectKind(name="Service", group="", version="v1", plural="services", compared=Comparison.FIELDS),
        ObjectKind(name="ConfigMap", group="", version="v1", plural="configmaps", compared=Comparison.FIELDS),
        ObjectKind(
            name="NetworkPolicy", group="networking.k8s.io", version="v1", plural="networkpolicies",
            compared=Comparison.EXACT,
        ),
        ObjectKind(
            name="Secret", group="", version="v1", plural="secrets", source=Source.NONE,
            compared=Comparison.CREATED_ONLY,
        ),
        ObjectKind(
            name="HorizontalPodAutoscaler", group="autoscaling", version="v2", plural="horizontalpodautoscalers",
            source=Source.LOOKUP,
        ),
        ObjectKind(name="Event", group="", version="v1", plural="events", source=Source.LOOKUP),
    )
}  # fmt: skip
WATCHED = tuple(kind for kind in KINDS.values() if kind.source is Source.WATCH)
"""Kinds that the operator watches; the jobs themselves come first."""
CHILDREN = tuple(kind for kind in KINDS.values() if kind.compared is not None)
"""Kinds of a job's children."""


def digest(part: Any) -> str:
    """Hashes a part of a manifest to twelve hexadecimal digits."""
    text = json.dumps(part, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def sealed(desired: Manifest) -> Manifest:
    """Returns the manifest with its own hash in an annotation."""
    metadata = desired["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_APPLIED: digest(desired)}
    return {**desired, "metadata": {**metadata, "annotations": annotations}}


def manifest_to_send(desired: Manifest, live: Mapping[str, Any] | None) -> Manifest | None:
    """Returns the manifest to send to the API server; None if the live object already matches."""
    if live is None:
        return sealed(desired)
    compared = KINDS[desired["kind"]].compared
    if compared is Comparison.CREATED_ONLY:
        return None
    wanted = sealed(desired)
    if compared is Comparison.EXACT and any(live["spec"].get(k) != v for k, v in desired["spec"].items()):
        return wanted
    # listed objects have neither of these fields
    ours = {name: value for name, value in wanted.items() if name not in ("apiVersion", "kind")}
    return None if covers(live, ours) else wanted


def keep_template(desired: Manifest, live: Mapping[str, Any]) -> Manifest:
    """Puts the live template into the manifest if another version of the operator built it and the user's part is the
    same. An upgrade of the operator thus keeps the pods."""
    ours, theirs = (_template(thing) for thing in (desired, live))
    if ours is None or theirs is None:
        return desired
    mine, old = (t["metadata"].get("annotations", {}) for t in (ours, theirs))
    same_asked = mine.get(ANNOTATION_TEMPLATE) == old.get(ANNOTATION_TEMPLATE)
    if not same_asked or mine.get(ANNOTATION_MADE_BY) == old.get(ANNOTATION_MADE_BY):
        return desired
    return {**desired, "spec": {**desired["spec"], "template": theirs}}


def _template(thing: Mapping[str, Any]) -> Any:
    return thing.get("spec", {}).get("template")


def covers(live: Any, wanted: Any, field: str = "") -> bool:
    """Returns True if `live` contains each value in `wanted`."""
    if isinstance(wanted, Mapping):
        if not isinstance(live, Mapping):
            return not wanted and live is None
        inner = field if field in _QUANTITIES else ""
        return all(covers(live.get(name), value, inner or name) for name, value in wanted.items())
    if isinstance(wanted, list):
        return _covers_list(live, wanted)
    if field in _QUANTITIES or field == _SIZE:
        return _same_quantity(live, wanted)
    return bool(live == wanted) or (live is None and wanted in ("", False, 0))


def _covers_list(live: Any, wanted: list[Any]) -> bool:
    if not isinstance(live, list):
        return not wanted and live is None
    keys = [k for k in _KEYS if wanted and all(isinstance(w, Mapping) and k in w for w in wanted)]
    if not keys:
        return len(live) == len(wanted) and all(covers(a, b) for a, b in zip(live, wanted, strict=True))
    for key in keys:
        found = {item.get(key): item for item in live if isinstance(item, Mapping)}
        if len(found) == len(live) and len({w[key] for w in wanted}) == len(wanted):
            return all(covers(found.get(item[key]), item) for item in wanted)
    # Without a unique key, items are compared as a whole: one port with two protocols, two tolerations of one key.
    return all(any(covers(item, w) for item in live) for w in wanted)


def _same_quantity(live: Any, wanted: Any) -> bool:
    try:
        return Quantity(live) == Quantity(wanted)
    except (ValueError, TypeError):
        return bool(live == wanted)
