"""Digests of a batch tree: one that the batch has when it is sent to a trainer, and one for comparing loaders.

The second digest is canonical. It covers the structure, classes, keys and attributes, and the dtype, shape and bytes of
every leaf. NaNs with equal bytes are therefore equal, but 0.0 and -0.0 differ. The digest does not cover strides,
tensors' requires_grad or the identity of objects.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from dataloaderjob.batches import objects, special
from dataloaderjob.batches.encoding import encode, is_class_of_items
from dataloaderjob.batches.special import StaysError, attributes_beside
from dataloaderjob.core import digests, values
from dataloaderjob.core.consumption import error_mark, fold


def batch_digest(batch: Any, identity: int, *, allow_pickle: bool) -> int:
    """Returns the digest that a feeder would send with a batch. If no feeder could send it, returns the `error_mark` of
    the error instead."""
    return batch_digests(batch, identity, allow_pickle=allow_pickle)[0]


def batch_digests(batch: Any, identity: int, *, allow_pickle: bool) -> tuple[int, int]:
    """Returns the result of `batch_digest`, and a second digest. The two are equal unless no feeder could send the
    batch. In that case, the second also covers `identity`, so that it differs between batches."""
    try:
        encoded = encode(batch, allow_pickle=allow_pickle)
    except Exception as exc:  # encoding calls user code for the states of its objects
        mark = error_mark(exc)
        return mark, fold(mark, identity)
    digest = digests.of_parts(encoded.buffers, identity)
    return digest, digest


class Hasher(Protocol):
    """A hash object with the interface of `hashlib`."""

    def update(self, data: Any, /) -> None: ...


def digest_update(hasher: Hasher, batch: Any) -> None:
    """Feeds a batch to a hash. Objects that need `allow_pickle` are pickled, and the pickle is hashed."""
    _Walk(hasher.update).item(batch)


class _Walk:
    def __init__(self, update: Callable[[Any], None]) -> None:
        self.update = update
        self.open: list[Any] = []
        """Objects that contain the current item."""

    def item(self, item: Any) -> None:
        if type(item) in values.SCALARS:
            # A zero byte marks a value. The text that describes other items never starts with one.
            self.update(b"\0" + values.pack(item))
        elif type(item) in (torch.Tensor, torch.nn.Parameter) and _is_block(item):
            _tensor(self.update, item)
        elif (type(item) in (np.ndarray, np.memmap) or isinstance(item, np.generic)) and _is_plain(item):
            _array(self.update, item)
        elif isinstance(item, Mapping):
            self._mapping(item)
        elif type(item) in (list, tuple) or _is_named_tuple(item):
            self._items(item, item)
            self._attributes(_beside(item))
        elif type(item) in (set, frozenset):
            _open(self.update, item, len(item))
            for one in sorted(_encoded(child) for child in item):
                self.update(one)
        elif objects.is_dataclass(item):
            fields = [f.name for f in dataclasses.fields(item) if hasattr(item, f.name)]
            beside = {n: v for n, v in getattr(item, "__dict__", {}).items() if not n.startswith("__")}
            _open(self.update, item, len(fields))
            self._attributes({**{name: getattr(item, name) for name in fields}, **beside})
        else:
            self._object(item)

    def _items(self, item: Any, items: Iterable[Any]) -> None:
        items = list(items)
        _open(self.update, item, len(items))
        for child in items:
            self.item(child)

    def _mapping(self, item: Mapping[Any, Any]) -> None:
        own = {key: item[key] for key in item}
        self._items(item, [part for pair in own.items() for part in pair])
        if getattr(item, "__dict__", None):
            self._attributes(_beside(item, objects.made_from_dict(type(item), own)))

    def _object(self, item: Any) -> None:
        if any(item is one for one in self.open):
            return _open(self.update, item, -2)
        try:
            way, _, content, attributes = objects.take_apart(item)
        except StaysError:
            _open(self.update, item, -1)
            return self.update(pickle.dumps(item, protocol=5))
        self.open.append(item)
        self.update(f"made {way}\n".encode())
        self._items(item, [content])
        self._attributes(attributes)
        self.open.pop()
        return None

    def _attributes(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            self.item(name)
            self.item(value)


def _is_named_tuple(item: Any) -> bool:
    return isinstance(item, tuple) and (hasattr(item, "_fields") or is_class_of_items(type(item)))


def _beside(item: Any, made: Any = None) -> dict[str, Any]:
    try:
        return attributes_beside(item, made)
    except StaysError:  # the item is sent as a pickle
        return {"": pickle.dumps(item, protocol=5)}


def _open(update: Callable[[Any], None], item: Any, count: int) -> None:
    kind = type(item)
    update(f"{kind.__module__}.{kind.__qualname__} {count}\n".encode())


def _encoded(item: Any) -> bytes:
    parts: list[bytes] = []
    _Walk(lambda data: parts.append(bytes(data))).item(item)
    return b"".join(parts)


def _is_block(t: torch.Tensor) -> bool:
    known = special.TENSOR_TYPES.get(t.dtype)
    return known is not None and t.is_cpu and t.layout is torch.strided and not t.is_nested


def _is_plain(a: np.ndarray[Any, Any] | np.generic) -> bool:
    return special.describe(a.dtype) is not None


def _tensor(update: Callable[[Any], None], t: torch.Tensor) -> None:
    known = special.TENSOR_TYPES[t.dtype]
    update(f"tensor {known.name} {tuple(t.shape)}\n".encode())
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    _bytes(update, (t.view(known.carrier) if known.carrier else t).numpy())


def _array(update: Callable[[Any], None], a: np.ndarray[Any, Any] | np.generic) -> None:
    kind = "array" if isinstance(a, np.ndarray) else "scalar"
    update(f"{kind} {a.dtype} {a.shape}\n".encode())
    _bytes(update, np.ascontiguousarray(a))


def _bytes(update: Callable[[Any], None], a: np.ndarray[Any, Any]) -> None:
    """Feeds the bytes of `a`, which must be in C order."""
    if a.nbytes:
        update(a.reshape(-1).view(special.BYTE).data)
