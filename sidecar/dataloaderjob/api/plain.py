"""Models of a manifest as plain JSON, in the form that pods use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataloaderjob.api.base import Model, Quantity, Resources

Object = Mapping[str, Any]
"""A part of an API object as JSON. It is only read, never changed."""


def plain(model: Model) -> dict[str, Any]:
    """Dumps a model as the user wrote it. Fields set to null count as absent at any depth, and are omitted."""
    return dict(_without_nulls(model.model_dump(mode="json", by_alias=True, exclude_unset=True)))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def resources(model: Resources) -> dict[str, dict[str, str]]:
    """Returns the requests and limits of a spec, omitting empty ones."""
    dumped = model.model_dump(mode="json", by_alias=True)
    return {kind: values for kind, values in dumped.items() if values}


def same_amounts(one: Object, other: Object) -> bool:
    """Checks whether two mappings name the same resources in the same amounts, however the amounts are written."""
    return one.keys() == other.keys() and all(
        Quantity(str(value)) == Quantity(str(other[name])) for name, value in one.items()
    )
