"""A canonical digest of a batch tree, to prove that two loaders give the same batches.

It covers structure, classes, keys, dtypes, shapes and the bytes of every leaf, so that equal NaNs count
as equal and 0.0 and -0.0 do not. It does not cover strides, requires_grad and identity.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from dataloaderjob.core import values
from dataloaderjob.fetch import dtypes


class Hasher(Protocol):
    """What `hashlib` makes."""

    def update(self, data: Any, /) -> None: ...


def digest_update(hasher: Hasher, batch: Any) -> None:
    """Feeds a batch to a hash. Objects that need allow_pickle count by their pickle."""
    _walk(hasher.update, batch)


def _walk(update: Callable[[Any], None], item: Any) -> None:
    if type(item) in values.SCALARS:
        update(values.pack(item))
    elif isinstance(item, torch.Tensor):
        _tensor(update, item)
    elif isinstance(item, np.ndarray | np.generic):
        _array(update, item)
    elif isinstance(item, Mapping):
        keys = list(item)
        _open(update, item, len(keys))
        for key in keys:
            _walk(update, key)
            _walk(update, item[key])
    elif isinstance(item, list | tuple):
        _open(update, item, len(item))
        for child in item:
            _walk(update, child)
    elif isinstance(item, set | frozenset):
        _open(update, item, len(item))
        for one in sorted(_encoded(child) for child in item):
            update(one)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = [f.name for f in dataclasses.fields(item) if hasattr(item, f.name)]
        _open(update, item, len(fields))
        for name in fields:
            _walk(update, name)
            _walk(update, getattr(item, name))
    else:
        _open(update, item, -1)
        update(pickle.dumps(item, protocol=5))


def _open(update: Callable[[Any], None], item: Any, count: int) -> None:
    kind = type(item)
    update(f"{kind.__module__}.{kind.__qualname__} {count}\n".encode())


def _encoded(item: Any) -> bytes:
    parts: list[bytes] = []
    _walk(lambda data: parts.append(bytes(data)), item)
    return b"".join(parts)


def _tensor(update: Callable[[Any], None], t: torch.Tensor) -> None:
    known = dtypes.TENSOR_TYPES.get(t.dtype)
    if known is None or not t.is_cpu or t.layout is not torch.strided:
        _open(update, t, -1)
        update(pickle.dumps(t, protocol=5))
        return
    update(f"tensor {known.name} {tuple(t.shape)}\n".encode())
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    _bytes(update, (t.view(known.carrier) if known.carrier else t).numpy())


def _array(update: Callable[[Any], None], a: np.ndarray[Any, Any] | np.generic) -> None:
    kind = "array" if isinstance(a, np.ndarray) else "scalar"
    descr = dtypes.describe(a.dtype)
    update(f"{kind} {a.dtype} {a.shape}\n".encode())
    if descr is None:
        update(pickle.dumps(np.asarray(a), protocol=5))
    else:
        _bytes(update, np.ascontiguousarray(a))


def _bytes(update: Callable[[Any], None], a: np.ndarray[Any, Any]) -> None:
    """`a` is in C order."""
    if a.nbytes:
        update(a.reshape(-1).view(dtypes.BYTE).data)
