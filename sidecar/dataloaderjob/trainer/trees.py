"""Leaves of a batch, whatever holds them. Containers are those that torch's `pin_memory` goes into, and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from torch.nn.utils.rnn import PackedSequence


def mapped(batch: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """The batch with each leaf replaced. A container that cannot be made again from its items becomes a dict or list,
    as with torch."""
    if isinstance(batch, str | bytes | bytearray | range):
        return batch
    if isinstance(batch, Mapping):
        return _mapping(batch, {key: mapped(value, of_leaf) for key, value in batch.items()})
    if isinstance(batch, PackedSequence):  # whose batch_sizes stay on the host
        leaves = (batch.data, batch.sorted_indices, batch.unsorted_indices)
        data, *indices = (None if leaf is None else of_leaf(leaf) for leaf in leaves)
        return PackedSequence(data, batch.batch_sizes.clone(), *indices)  # type: ignore[arg-type]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, of_leaf) for value in batch))
    if isinstance(batch, tuple):
        return tuple(mapped(value, of_leaf) for value in batch)
    if isinstance(batch, Sequence):
        return _sequence(batch, [mapped(value, of_leaf) for value in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        made = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(made, field.name, mapped(getattr(batch, field.name), of_leaf))
        return made
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
