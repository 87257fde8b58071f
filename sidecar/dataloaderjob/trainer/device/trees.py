"""Replacement of a batch's leaves, in dataclasses and in all containers that torch's `pin_memory` descends into."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from types import MemberDescriptorType, ModuleType, NoneType
from typing import Any, cast

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode


def mapped(batch: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """Returns the batch with each leaf replaced. A container that cannot be rebuilt from its items becomes a dict or a
    list, as in torch's `pin_memory`."""
    if isinstance(batch, str | bytes | bytearray | range):
        return batch
    if isinstance(batch, Mapping):
        return _mapping(batch, {key: mapped(value, of_leaf) for key, value in batch.items()}, of_leaf)
    if isinstance(batch, PackedSequence):  # its batch_sizes stay on the host
        leaves = (batch.data, batch.sorted_indices, batch.unsorted_indices)
        data, *indices = (None if leaf is None else of_leaf(leaf) for leaf in leaves)
        return PackedSequence(data, batch.batch_sizes.clone(), *indices)  # type: ignore[arg-type]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, of_leaf) for value in batch))
    if isinstance(batch, tuple):
        return tuple(mapped(value, of_leaf) for value in batch)
    if isinstance(batch, Sequence):
        return _sequence(batch, [mapped(value, of_leaf) for value in batch], of_leaf)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        made = copy.copy(batch)
        fields = [field.name for field in dataclasses.fields(batch) if hasattr(batch, field.name)]
        for name in fields:
            object.__setattr__(made, name, mapped(getattr(batch, name), of_leaf))
        return _with_attributes(made, of_leaf, fields)
    return of_leaf(batch)


def with_tensors(item: Any, of_tensor: Callable[[torch.Tensor], Any]) -> Any:
    """Returns a deep copy of any object, with its tensors replaced by the results of `of_tensor`. If the object is a
    tensor, returns only that result. Raises TypeError if the object cannot be copied."""
    if isinstance(item, torch.Tensor):
        return of_tensor(item)
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


def without_class(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as a plain torch.Tensor, or unchanged if its subclass affects computations."""
    if type(tensor) in _PLAIN or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  its documented name
        return tensor.as_subclass(torch.Tensor)


def with_class_of(
    tensor: torch.Tensor, made: torch.Tensor, of_tensor: Callable[[torch.Tensor], Any]
) -> torch.Tensor:
    """Returns `made` with the tensor's class and attributes. Only some classes keep these when torch copies a tensor to
    a device.

    `made` is a new tensor, copied from `without_class(tensor)`. Host tensors in attributes stay on the host, but are
    copied out of the pool. Device tensors in attributes are replaced by the results of `of_tensor`.
    """
    # A view created without gradients could not be modified in place by tensors with gradients.
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():  # noqa: SLF001  its documented name
        found = made.as_subclass(type(tensor))
    found.__dict__.update(tensor.__dict__)

    def where_it_is(beside: torch.Tensor) -> Any:
        return _apart(beside) if beside.device.type == "cpu" else of_tensor(beside)

    return cast("torch.Tensor", _with_attributes(found, lambda leaf: with_tensors(leaf, where_it_is)))


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _with_attributes(made: Any, of_leaf: Callable[[Any], Any], known: Sequence[str] = ()) -> Any:
    """Replaces the arrays and tensors in the attributes of a copied container or tensor, and returns `made`. Leaves the
    attributes in `known` unchanged. Host tensors that no device accepts stay on the host."""
    own = getattr(made, "__dict__", {})
    found = {name: _data(value, of_leaf) for name, value in own.items() if name not in known}
    own.update({name: new for name, new in found.items() if new is not own[name]})
    return made


def _data(value: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """Returns the value with its data replaced, or the same object if it contains no array or tensor."""
    if isinstance(value, torch.Tensor):
        is_dense = value.layout is torch.strided and not value.is_quantized
        return of_leaf(value) if is_dense or value.device.type != "cpu" else _apart(value)
    if isinstance(value, PackedSequence):
        return mapped(value, of_leaf)
    try:
        return of_leaf(value) if _holds_data(value) else value
    except (TypeError, RecursionError):  # a value that cannot be copied was not sent, and is not in the pool
        return value


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return copy.deepcopy(tensor)
    except RuntimeError:  # a tensor in a graph, or with attributes that torch cannot copy
        return tensor.clone()


def _holds_data(value: Any) -> bool:
    """Returns True if `value` is a tensor or an array, or refers to one, directly or indirectly."""
    seen: dict[int, Any] = {}
    """Objects already visited, by `id`. They are kept alive so that no other object gets the same `id`."""
    left = [value]
    while left:
        item = left.pop()
        if type(item) in _ATOMS or id(item) in seen:
            continue
        if isinstance(item, torch.Tensor | np.ndarray):
            return True
        seen[id(item)] = item
        left += _parts(item)
    return False


_ATOMS = frozenset({NoneType, bool, int, float, complex, str, bytes, bytearray, range, type, ModuleType})


def _parts(item: Any) -> list[Any]:
    """Returns the contents of an object: its attributes and, if it is a built-in container, its items. Other containers
    are composed of these."""
    own = getattr(item, "__dict__", None)
    parts = list(own.values()) if type(own) is dict else []
    for kind in type(item).__mro__:
        if "__slots__" in vars(kind):
            slots = [member for member in vars(kind).values() if type(member) is MemberDescriptorType]
            parts += (found for slot in slots if (found := _in_slot(slot, item)) is not None)
    if isinstance(item, dict):
        parts += dict.values(item)
    elif isinstance(item, list | tuple | set | frozenset | deque):
        parts += item
    return parts


def _in_slot(slot: MemberDescriptorType, item: Any) -> Any:
    try:
        return slot.__get__(item)
    except AttributeError:  # the slot was not set
        return None


class _Copying(TorchFunctionMode):
    """A torch mode that replaces the deep copy of a tensor with the result of a function."""

    def __init__(self, of_tensor: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._of_tensor = of_tensor

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.__deepcopy__:
            return self._of_tensor(args[0])
        return function(*args, **(kwargs or {}))


def _mapping(batch: Mapping[Any, Any], items: dict[Any, Any], of_leaf: Callable[[Any], Any]) -> Any:
    if type(batch) is dict:
        return items
    try:
        if not isinstance(batch, MutableMapping):
            return type(batch)(items)  # type: ignore[call-arg]
        made = copy.copy(batch)  # the container may have attributes of its own
        for key, item in items.items():  # a Counter's update() adds
            made[key] = item
    except TypeError:
        return items
    return _with_attributes(made, of_leaf, _stores(made, items))


def _sequence(batch: Sequence[Any], items: list[Any], of_leaf: Callable[[Any], Any]) -> Any:
    if type(batch) is list:
        return items
    try:
        if not isinstance(batch, MutableSequence):
            return type(batch)(items)  # type: ignore[call-arg]
        made = copy.copy(batch)
        for number, item in enumerate(items):
            made[number] = item
    except TypeError:
        return items
    return _with_attributes(made, of_leaf, _stores(made, items))


def _stores(made: Any, items: dict[Any, Any] | list[Any]) -> list[str]:
    """Returns the names of attributes that hold the container's items, such as `data` of a UserDict."""
    return [name for name, value in getattr(made, "__dict__", {}).items() if _has_same(value, items)]


def _has_same(value: Any, items: dict[Any, Any] | list[Any]) -> bool:
    if type(value) is not type(items) or len(value) != len(items):
        return False
    found, expected = (one.values() if isinstance(one, dict) else one for one in (value, items))
    return all(map(operator.is_, found, expected))
