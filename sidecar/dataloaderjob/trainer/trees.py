"""Leaves of a batch, whatever holds them. Containers are those that torch's `pin_memory` goes into."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any


def mapped(batch: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """The batch with each leaf replaced. A container that cannot be made again from its items becomes a dict or list,
    as with torch."""
    if isinstance(batch, str | bytes):
        return batch
    if isinstance(batch, Mapping):
        return _mapping(batch, {key: mapped(value, of_leaf) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, of_leaf) for value in batch))
    if isinstance(batch, tuple):
        return tuple(mapped(value, of_leaf) for value in batch)
    if isinstance(batch, Sequence):
        return _sequence(batch, [mapped(value, of_leaf) for value in batch])
    return of_leaf(batch)


def _mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return items
    try:
        if isinstance(batch, MutableMapping):  # it may have attributes of its own
            made = copy.copy(batch)
            made.update(items)
            return made
        return type(batch)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _sequence(batch: Sequence[Any], items: list[Any]) -> Any:
    if type(batch) is list:
        return items
    try:
        if isinstance(batch, MutableSequence):
            made = copy.copy(batch)
            for number, item in enumerate(items):
                made[number] = item
            return made
        return type(batch)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
