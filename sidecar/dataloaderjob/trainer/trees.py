"""Leaves of a batch, whatever holds them. Containers are those that torch's `pin_memory` goes into, and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode


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


def with_tensors(item: Any, of_tensor: Callable[[torch.Tensor], Any]) -> Any:
    """A deep copy of an object, whatever it is, whose tensors are what `of_tensor` makes of them. Raises TypeError for
    one that cannot be copied."""
    if item is None or isinstance(item, bool | int | float | complex):
        return item
    try:
        with _Copying(of_tensor):
            return copy.deepcopy(item)
    except TypeError as exc:
        raise TypeError(
            f"a {type(item).__name__} in a batch cannot be copied ({exc}): have device_stage= return dicts, sequences, "
            "named tuples or dataclasses of tensors"
        ) from exc


class _Copying(TorchFunctionMode):
    """Has deep copies of tensors made by a function."""

    def __init__(self, of_tensor: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._of_tensor = of_tensor

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.__deepcopy__:
            return self._of_tensor(args[0])
        return function(*args, **(kwargs or {}))


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
