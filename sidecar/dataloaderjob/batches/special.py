"""Tensors and arrays that are not plain blocks of memory, such as subclasses, sparse tensors and masked arrays.

They are sent as the plain tensors and arrays that they consist of. Their dtypes become plain values in the schema.

A `Carrier` takes the content of one kind of object, and rebuilds the object. A class is sent by name, and the carrier
refuses classes of other kinds. The trainer runs no code that a feeder chooses: no pickle is loaded, and the user's
`__init__` and `__setstate__` do not run.
"""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import NoneType
from typing import Any

import numpy as np
import torch
from numpy import ma  # numpy would import it on first use, and decoding a batch imports nothing

from dataloaderjob.batches import allowed
from dataloaderjob.core import values
from dataloaderjob.core.errors import RemoteProtocolError

_REDUCED_BY = (
    "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__",
)  # fmt: skip
_MAX_COMPARED_DEPTH = 50
_COMPRESSED: dict[torch.layout, tuple[Callable[..., Any], Callable[..., Any]]] = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
_LAYOUTS = {str(layout): layout for layout in (*_COMPRESSED, torch.strided, torch.jagged)}
_IN_NUMPY = (
    "float64", "float32", "float16", "complex128", "complex64",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
)  # fmt: skip
_CARRIED = {
    "bfloat16": torch.int16,
    "complex32": torch.int32,
    "float8_e4m3fn": torch.uint8,
    "float8_e4m3fnuz": torch.uint8,
    "float8_e5m2": torch.uint8,
    "float8_e5m2fnuz": torch.uint8,
    "float8_e8m0fnu": torch.uint8,
    "float4_e2m1fn_x2": torch.uint8,
}
"""dtypes that numpy lacks, each with a dtype of the same size that carries its bytes."""
BYTE = np.dtype(np.uint8)
_QUANTIZED = (torch.int8, torch.uint8, torch.int32)
"""dtypes of the integers in quantized tensors (qint8, quint8 and qint32)."""
_MAX_ZERO_POINT = 1 << 31


class StaysError(Exception):
    """The error for an object that cannot be decomposed. In messages, its text follows the name of the class: " of mode
    X"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """A way to send one kind of object."""

    take: Callable[[Any], Any]
    """Returns the content of an object: a batch tree, which may contain tensors. Raises StaysError if the object cannot
    be sent."""
    make: Callable[[Any, Any], Any]
    """Rebuilds the object from its class and its content. The class is None if none is sent. Raises an exception if the
    content does not fit."""
    fits: Callable[[type], bool] | None = None
    """Returns True if this carrier may make objects of a class. `fits` is None if no class is sent."""
    named: Callable[[type], type] | None = None
    """Returns the class that is sent instead of the object's own. None if the object's own class is sent."""
    attributes: bool = False
    """True if the content of `__dict__` is sent, too."""
    shared: bool = False
    """True if an object that occurs twice in a batch is a single object on arrival, too."""


def no_content(item: object) -> None:
    """Returns None as the content of an object that has none, such as one that consists only of attributes."""


def exactly(content: Any, *kinds: type | tuple[type, ...]) -> tuple[Any, ...]:
    """Returns `content` if it is a tuple whose items have exactly these types. Raises TypeError otherwise, because
    objects of other types could run code in `__index__`, `__iter__` or `__fspath__`."""
    if type(content) is not tuple or len(content) != len(kinds):
        raise TypeError(f"expected {len(kinds)} parts, got a {type(content).__name__}")
    for part, kind in zip(content, kinds, strict=True):
        if not any(type(part) is one for one in (kind if isinstance(kind, tuple) else (kind,))):
            raise TypeError(f"expected {kind}, got a {type(part).__name__}")
    return content


def is_rebuilt_from(cls: type, base: type) -> bool:
    """Returns True if `cls` is a subclass whose objects consist only of the content of `base` and a `__dict__`."""
    return (
        cls is not base
        and issubclass(cls, base)
        and all(allowed.static(cls, name) is allowed.static(base, name) for name in _REDUCED_BY)
        and cls not in copyreg.dispatch_table
        and not any(c.__dict__.get("__slots__") for c in cls.__mro__)
        and allowed.static(cls, "__del__") is None
    )


def attributes_beside(item: Any, made: Any = None) -> dict[str, Any]:
    """Returns the attributes of `item` that `made` lacks. `made` was rebuilt from the item's content alone.

    Raises StaysError for attributes that cannot be restored, so that nothing is lost silently.
    """
    own = getattr(item, "__dict__", None)
    slots = () if made is None else _slots(type(item))
    if own is item or not (own or slots):
        return {}
    basis = {} if made is None else getattr(made, "__dict__", {})
    found = {n: v for n, v in (own or {}).items() if n not in basis or not _same(v, basis[n])}
    found.pop("__orig_class__", None)  # set by typing for Generic[T]
    for name in found:
        if type(name) is not str or name.startswith("__"):
            raise StaysError(f" with an attribute {name!r}")
    for name in slots:
        if not _same(getattr(item, name, None), getattr(made, name, None)):
            raise StaysError(f" with {name!r} in __slots__")
    return found


def _slots(cls: type) -> list[str]:
    found: list[str] = []
    for c in cls.__mro__:
        slots = c.__dict__.get("__slots__", ())
        names = [slots] if isinstance(slots, str) else list(slots)
        found += [f"_{c.__name__.lstrip('_')}{n}" if n.startswith("__") else n for n in names]
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _same(a: Any, b: Any, depth: int = 0) -> bool:
    """Returns True if two attributes are certainly equal. If in doubt, returns False, so that the attribute is sent or
    refused."""
    if a is b:
        return True
    if type(a) is not type(b) or depth > _MAX_COMPARED_DEPTH:
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key], depth + 1) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y, depth + 1) for x, y in zip(a, b, strict=True))
    return type(a) in values.SCALARS and bool(a == b)


def way_of_tensor(t: torch.Tensor) -> str:
    """Returns the way for a tensor that is not a block of memory with a known dtype. Raises StaysError if none fits."""
    if is_tensor_subclass(type(t)):
        return "tensor"
    if type(t) is not torch.Tensor and t.layout is not torch.jagged:
        raise StaysError(
            ", a Tensor subclass with a state of its own (__torch_dispatch__, __slots__, __reduce__)"
        )
    if t.is_cpu:
        if t.is_nested:
            return "nested"
        if t.is_quantized:
            return "quantized"
        if t.layout is torch.sparse_coo:
            return "sparse"
        if t.layout in _COMPRESSED:
            return "compressed"
    raise StaysError(f" ({t.layout}, {t.dtype}, {t.device})")


def way_of_array(a: np.ndarray[Any, Any]) -> str:
    """Returns the way for an array that is not a block of memory with a known dtype. Raises StaysError if none fits."""
    if type(a) is ma.MaskedArray:
        return "masked"
    if type(a) is not np.ndarray and is_array_subclass(type(a)):
        return "ndarray"
    if type(a) is np.ndarray and a.dtype == object:
        return "objects"
    raise StaysError(f" of dtype {a.dtype}")


@allowed.remembered
def is_tensor_subclass(cls: Any) -> bool:
    base = torch.nn.Parameter if torch.nn.Parameter in allowed.mro(cls) else torch.Tensor
    return (
        allowed.is_allowed(cls, base)
        and is_rebuilt_from(cls, base)
        and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


@allowed.remembered
def is_array_subclass(cls: type) -> bool:
    return (
        allowed.is_allowed(cls, np.ndarray)
        and is_rebuilt_from(cls, np.ndarray)
        and not issubclass(cls, ma.MaskedArray)
    )


def _detached(t: torch.Tensor) -> torch.Tensor:
    if t.requires_grad and not t.is_leaf:
        raise StaysError(" with a grad_fn (an autograd graph cannot leave its process: call .detach())")
    return t.detach()


def _take_tensor(t: torch.Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  bypasses the user's __torch_function__
        return _detached(t).as_subclass(torch.Tensor), t.requires_grad


def _make_tensor(cls: Any, content: Any) -> torch.Tensor:
    plain, requires_grad = exactly(content, torch.Tensor, bool)
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        made: torch.Tensor = plain.as_subclass(cls)
        return made.requires_grad_() if requires_grad else made


def _take_sparse(t: torch.Tensor) -> tuple[Any, ...]:
    plain = _detached(t)
    return plain._indices(), plain._values(), tuple(t.shape), t.is_coalesced(), t.requires_grad  # noqa: SLF001


def _make_sparse(cls: Any, content: Any) -> torch.Tensor:  # noqa: ARG001
    indices, values, shape, coalesced, requires_grad = exactly(
        content, torch.Tensor, torch.Tensor, tuple, bool, bool
    )
    _plain(indices)
    _plain(values)
    return torch.sparse_coo_tensor(
        indices,
        values,
        shape,
        is_coalesced=coalesced or None,
        requires_grad=requires_grad,
        check_invariants=True,
    )


def _take_compressed(t: torch.Tensor) -> tuple[Any, ...]:
    outer, inner = _COMPRESSED[t.layout]
    plain = _detached(t)
    return str(t.layout), outer(plain), inner(plain), plain.values(), tuple(t.shape), t.requires_grad


def _make_compressed(cls: Any, content: Any) -> torch.Tensor:  # noqa: ARG001
    layout, outer, inner, values, shape, requires_grad = exactly(
        content, str, torch.Tensor, torch.Tensor, torch.Tensor, tuple, bool
    )
    for part in (outer, inner, values):
        _plain(part)
    return torch.sparse_compressed_tensor(
        outer,
        inner,
        values,
        shape,
        layout=_LAYOUTS[layout],
        requires_grad=requires_grad,
        check_invariants=True,
    )


def _take_nested(t: torch.Tensor) -> tuple[Any, ...]:
    return list(_detached(t).unbind()), str(t.layout), t.requires_grad


def _make_nested(cls: Any, content: Any) -> torch.Tensor:  # noqa: ARG001
    tensors, layout, requires_grad = exactly(content, list, str, bool)
    for one in tensors:
        exactly((one,), torch.Tensor)
        _plain(one)
    return torch.nested.nested_tensor(tensors, layout=_LAYOUTS[layout], requires_grad=requires_grad)


def _take_quantized(t: torch.Tensor) -> tuple[Any, ...]:
    if t.qscheme() == torch.per_tensor_affine:
        return t.int_repr(), t.q_scale(), t.q_zero_point()
    if t.qscheme() == torch.per_channel_affine:
        return t.int_repr(), t.q_per_channel_scales(), t.q_per_channel_zero_points(), t.q_per_channel_axis()
    raise StaysError(f" ({t.qscheme()})")


def _make_quantized(cls: Any, content: Any) -> torch.Tensor:  # noqa: ARG001
    if type(content) is tuple and len(content) == 3:
        numbers, scale, zero_point = exactly(content, torch.Tensor, float, int)
        _plain(numbers, *_QUANTIZED)
        if abs(zero_point) > _MAX_ZERO_POINT:
            raise ValueError(
                f"a zero point must be from -{_MAX_ZERO_POINT} to {_MAX_ZERO_POINT}, but is {zero_point}"
            )
        return torch._make_per_tensor_quantized_tensor(numbers, scale, zero_point)  # noqa: SLF001
    numbers, scales, zero_points, axis = exactly(content, torch.Tensor, torch.Tensor, torch.Tensor, int)
    _plain(numbers, *_QUANTIZED)
    _plain(scales, torch.float64)
    _plain(
        zero_points, torch.int64
    )  # with floats, torch would make another kind of tensor, which may crash the process
    if not 0 <= axis < numbers.ndim or not (numbers.shape[axis],) == scales.shape == zero_points.shape:
        # torch would read beyond the ends of the tensors
        raise ValueError(
            f"scales of shape {tuple(scales.shape)} and zero points of shape {tuple(zero_points.shape)} do not "
            f"match axis {axis} of a tensor of shape {tuple(numbers.shape)}"
        )
    return torch._make_per_channel_quantized_tensor(numbers, scales, zero_points, axis)  # noqa: SLF001


def _plain(t: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raises TypeError unless `t` is a plain block of memory with one of `dtypes`. If `dtypes` is empty, any dtype is
    allowed. torch's constructors do not expect other parts, and no encoder sends them."""
    if t.layout is not torch.strided or t.is_quantized or t.is_nested or (dtypes and t.dtype not in dtypes):
        needed = " or ".join(map(str, dtypes)) or "plain numbers"
        raise TypeError(f"expected a tensor of {needed}, got one of {t.dtype} ({t.layout})")


def _take_array(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    plain = a.view(np.ndarray)
    # The class restores numpy.record, which is the scalar type of record arrays.
    return plain.view(np.dtype((np.void, plain.dtype))) if plain.dtype.type is np.record else plain


def _make_array(cls: Any, content: Any) -> np.ndarray[Any, Any]:
    exactly((content,), np.ndarray)
    return np.ndarray.view(content, cls)


def _take_masked(a: Any) -> tuple[Any, ...]:
    if type(a.data) is not np.ndarray:
        raise StaysError(f" of {type(a.data).__name__}")
    return a.data, None if a.mask is ma.nomask else a.mask, a._fill_value, bool(a.hardmask)  # noqa: SLF001


def _make_masked(cls: Any, content: Any) -> Any:  # noqa: ARG001
    data, mask, fill_value, hard = exactly(
        content, np.ndarray, (np.ndarray, NoneType), (np.ndarray, NoneType), bool
    )
    mask = ma.nomask if mask is None else mask
    return ma.MaskedArray(data, mask=mask, fill_value=fill_value, hard_mask=hard)


def _take_objects(a: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return list(a.reshape(-1)), a.shape


def _make_objects(cls: Any, content: Any) -> np.ndarray[Any, Any]:  # noqa: ARG001
    items, shape = exactly(content, list, tuple)
    exactly(shape, *[int] * len(shape))
    if prod(shape) != len(items) or min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape} cannot hold {len(items)} objects")
    made = np.empty(len(items), object)
    for i, item in enumerate(items):  # made[:] = items would unpack items that are sequences
        made[i] = item
    return made.reshape(shape)


CARRIERS = {
    "tensor": Carrier(
        take=_take_tensor, make=_make_tensor, fits=is_tensor_subclass, attributes=True, shared=True
    ),
    "sparse": Carrier(take=_take_sparse, make=_make_sparse, shared=True),
    "compressed": Carrier(take=_take_compressed, make=_make_compressed, shared=True),
    "nested": Carrier(take=_take_nested, make=_make_nested, shared=True),
    "quantized": Carrier(take=_take_quantized, make=_make_quantized, shared=True),
    "ndarray": Carrier(
        take=_take_array, make=_make_array, fits=is_array_subclass, attributes=True, shared=True
    ),
    "masked": Carrier(take=_take_masked, make=_make_masked, shared=True),
    "objects": Carrier(take=_take_objects, make=_make_objects, shared=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Conversion of tensors of one dtype to and from numpy."""

    name: str
    dtype: torch.dtype
    numpy: np.dtype[Any]
    carrier: torch.dtype | None
    """The dtype that tensors are viewed as, if numpy lacks their own."""


def _tensor_types() -> dict[torch.dtype, TensorType]:
    found = {}
    for name in (*_IN_NUMPY, *_CARRIED):
        dtype = getattr(torch, name, None)  # float4 and some float8 need later versions of torch
        if dtype is not None:
            carrier = _CARRIED.get(name)
            seen_as = torch.empty(0, dtype=carrier or dtype).numpy().dtype
            found[dtype] = TensorType(name=name, dtype=dtype, numpy=seen_as, carrier=carrier)
    return found


TENSOR_TYPES = _tensor_types()
_BY_NAME = {known.name: known for known in TENSOR_TYPES.values()}


def tensor_type(name: Any, itemsize: int) -> TensorType:
    """Returns the type that a schema names. Raises RemoteProtocolError if this torch has no such type of that size."""
    known = _BY_NAME.get(name) if isinstance(name, str) else None
    if known is None or known.numpy.itemsize != itemsize:
        raise RemoteProtocolError(
            f"this process has no tensor dtype {name!r} of {itemsize} bytes: use the same torch version "
            "everywhere"
        )
    return known


@lru_cache(maxsize=256)
def describe(dtype: np.dtype[Any]) -> Any:
    """Returns a plain value from which `array_type` makes `dtype`, or None if no such value exists.

    Returns None for objects, variable-width strings and dtypes of other packages: their bytes have no meaning in
    another process.
    """
    if _holds_references(dtype):
        return None
    with warnings.catch_warnings(action="ignore"):  # about metadata, which no batch needs
        descr = np.lib.format.dtype_to_descr(dtype)
        try:
            again = np.lib.format.descr_to_dtype(descr)
        except (TypeError, ValueError):
            return None
    return descr if again == dtype and again.type is dtype.type else None


def array_type(descr: Any, itemsize: int) -> np.dtype[Any]:
    """Returns the dtype that a schema describes. Raises RemoteProtocolError if it is unknown or holds references."""
    try:
        dtype = np.lib.format.descr_to_dtype(descr)
    except (TypeError, ValueError, IndexError, KeyError, SyntaxError) as exc:
        raise RemoteProtocolError(f"this process has no array dtype {descr!r}: {exc}") from exc
    if _holds_references(dtype) or dtype.itemsize != itemsize:
        raise RemoteProtocolError(f"an array dtype {descr!r} of {itemsize} bytes is not allowed")
    return dtype


def _holds_references(dtype: np.dtype[Any]) -> bool:
    # "T" is numpy's variable-width string, whose items are pointers.
    return bool(dtype.hasobject) or dtype.kind == "T"
