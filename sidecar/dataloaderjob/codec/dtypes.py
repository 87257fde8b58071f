"""dtypes of torch and numpy as the plain values of a schema, and back."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dataloaderjob.core.errors import RemoteProtocolError

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
"""dtypes that numpy lacks, and the one of their size that carries the bytes."""
BYTE = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """How tensors of one dtype pass through numpy."""

    name: str
    dtype: torch.dtype
    numpy: np.dtype[Any]
    carrier: torch.dtype | None
    """dtype to view as, where numpy lacks this one."""


def _tensor_types() -> dict[torch.dtype, TensorType]:
    found = {}
    for name in (*_IN_NUMPY, *_CARRIED):
        dtype = getattr(torch, name, None)  # float4 and some float8 came with later versions of torch
        if dtype is not None:
            carrier = _CARRIED.get(name)
            seen_as = torch.empty(0, dtype=carrier or dtype).numpy().dtype
            found[dtype] = TensorType(name=name, dtype=dtype, numpy=seen_as, carrier=carrier)
    return found


TENSOR_TYPES = _tensor_types()
_BY_NAME = {known.name: known for known in TENSOR_TYPES.values()}


def tensor_type(name: Any, itemsize: int) -> TensorType:
    """The type that a schema names. Raises RemoteProtocolError when this torch has none of that size."""
    known = _BY_NAME.get(name) if isinstance(name, str) else None
    if known is None or known.numpy.itemsize != itemsize:
        raise RemoteProtocolError(f"no tensor dtype {name!r} of {itemsize} bytes here: use one torch version")
    return known


@lru_cache(maxsize=256)
def describe(dtype: np.dtype[Any]) -> Any:
    """Returns a plain value from which `array_type` makes `dtype`, or None if there is none.

    None for objects, variable-width strings and dtypes of other packages: their bytes mean nothing
    elsewhere.
    """
    if _holds_references(dtype):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metadata, which no batch needs
        descr = np.lib.format.dtype_to_descr(dtype)
        try:
            again = np.lib.format.descr_to_dtype(descr)
        except (TypeError, ValueError):
            return None
    return descr if again == dtype and again.type is dtype.type else None


def array_type(descr: Any, itemsize: int) -> np.dtype[Any]:
    """The dtype that a schema describes. Raises RemoteProtocolError, also for dtypes that hold references."""
    try:
        dtype = np.lib.format.descr_to_dtype(descr)
    except (TypeError, ValueError, IndexError, KeyError, SyntaxError) as exc:
        raise RemoteProtocolError(f"no array dtype {descr!r} here: {exc}") from exc
    if _holds_references(dtype) or dtype.itemsize != itemsize:
        raise RemoteProtocolError(f"an array dtype {descr!r} of {itemsize} bytes is not allowed")
    return dtype


def _holds_references(dtype: np.dtype[Any]) -> bool:
    # "T" is numpy's variable-width string, whose items point elsewhere.
    return bool(dtype.hasobject) or dtype.kind == "T"
