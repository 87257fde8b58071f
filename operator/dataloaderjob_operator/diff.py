"""Comparison of a live object with what is wanted: if it already is so, nothing has to be sent. Pure.

The API server fills in defaults, writes quantities in its own way, and others own fields of the same object: what
counts is that each field that we set is there with our value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataloaderjob.api.base import Quantity
from dataloaderjob_operator.kinds import KINDS, Comparison
from dataloaderjob_operator.names import ANNOTATION_MADE_BY, ANNOTATION_TEMPLATE
from dataloaderjob_operator.objects import Manifest
from dataloaderjob_operator.objects.meta import digest

ANNOTATION_APPLIED = "dataloading.dev/applied"
"""Hash of what we sent last: a field that we no longer set is taken back by sending anew."""
_KEYS = ("name", "mountPath", "containerPort", "type", "uid", "key")
"""Fields by which items of a list are distinguished, in this order."""
_QUANTITIES = frozenset({"requests", "limits", "capacity"})
_SIZE = "sizeLimit"


def sealed(desired: Manifest) -> Manifest:
    """The manifest with its own hash in it."""
    metadata = desired["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_APPLIED: digest(desired)}
    return {**desired, "metadata": {**metadata, "annotations": annotations}}


def hash_of(sent: Manifest) -> str:
    """The hash in a sealed manifest."""
    return str(sent["metadata"]["annotations"][ANNOTATION_APPLIED])


def needed(desired: Manifest, live: Mapping[str, Any] | None) -> Manifest | None:
    """Makes what has to be sent to the API server, None if nothing has."""
    if live is None:
        return sealed(desired)
    compared = KINDS[desired["kind"]].compared
    if compared is Comparison.CREATED_ONLY:
        return None
    wanted = sealed(_keep_template(desired, live))
    if compared is Comparison.EXACT and any(live["spec"].get(k) != v for k, v in desired["spec"].items()):
        return wanted
    ours = {
        name: value for name, value in wanted.items() if name not in ("apiVersion", "kind")
    }  # not in lists
    return None if covers(live, ours) else wanted


def _keep_template(desired: Manifest, live: Mapping[str, Any]) -> Manifest:
    """Keeps pods that another version of the operator made, as long as the user's part is the same."""
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
    """Checks whether each value in `wanted` is in `live`."""
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
    key = next((k for k in _KEYS if wanted and all(isinstance(w, Mapping) and k in w for w in wanted)), None)
    if key is None:
        return len(live) == len(wanted) and all(covers(a, b) for a, b in zip(live, wanted, strict=True))
    found = {item.get(key): item for item in live if isinstance(item, Mapping)}
    return all(covers(found.get(item[key]), item) for item in wanted)


def _same_quantity(live: Any, wanted: Any) -> bool:
    try:
        return Quantity(live) == Quantity(wanted)
    except (ValueError, TypeError):
        return bool(live == wanted)
