"""What scripts of the parity suite print: a canonical description of a value, equal only for equal values."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import sys
from typing import Any

import numpy as np
import torch

_FEW = 8
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice)


def show(*values: Any) -> None:
    """Prints the descriptions of values on one line."""
    sys.stdout.write(" ".join(map(describe, values)) + "\n")
    sys.stdout.flush()


def describe(value: Any) -> str:
    """Type, structure, dtype, shape, contents (their digest if there are many) and attributes."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        return f"{_name(value)}[{value.dtype} {value.shape} {_contents(value)}]{_attributes(value)}"
    if isinstance(value, np.generic):
        return f"numpy.{type(value).__name__}({value})"
    if isinstance(value, enum.Enum):
        return f"{_name(value)}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{f.name}={describe(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{_name(value)}({inner})"
    if isinstance(value, dict) or (hasattr(value, "items") and hasattr(value, "keys")):
        inner = ", ".join(f"{describe(k)}: {describe(v)}" for k, v in value.items())
        return f"{_name(value)}{{{inner}}}{_attributes(value)}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        inner = ", ".join(f"{name}={describe(v)}" for name, v in zip(value._fields, value, strict=True))
        return f"{_name(value)}({inner})"
    if isinstance(value, (list, tuple)):
        return f"{_name(value)}[{', '.join(map(describe, value))}]{_attributes(value)}"
    if isinstance(value, (set, frozenset)):
        return f"{_name(value)}{{{', '.join(sorted(map(describe, value)))}}}"
    if type(value) in _PLAIN:
        return repr(value)
    if type(value).__repr__ is not object.__repr__:
        return f"{_name(value)} {value!r}"
    return f"{_name(value)}{_attributes(value)}"


def _tensor(value: torch.Tensor) -> str:
    kind = "" if type(value) is torch.Tensor else _name(value)
    about = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if value.layout is torch.sparse_coo:
        whole = value.coalesce()
        return f"{kind}[{about} sparse {describe(whole.indices())} {describe(whole.values())}]"
    if value.layout is not torch.strided:
        return f"{kind}[{about} {value.layout} {describe(value.to_dense())}]"
    flags = " grad" if value.requires_grad else ""
    plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
    if not value.is_contiguous():
        flags += f" strides {value.stride()}"
    bits = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    few = plain.numel() <= _FEW and "float8" not in about
    contents = str(plain.tolist()) if few else _digest(bits.tobytes())
    return f"{kind}[{about}{flags} {contents}]{_attributes(value)}"


def _contents(array: np.ndarray) -> str:
    if array.size <= _FEW or array.dtype.hasobject:
        return str(array.tolist())
    return _digest(array.tobytes())


def _digest(data: bytes) -> str:
    return "#" + hashlib.sha256(data).hexdigest()[:12]


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _attributes(value: Any) -> str:
    found = {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}
    return f" with {{{', '.join(f'{k}: {describe(v)}' for k, v in sorted(found.items()))}}}" if found else ""
