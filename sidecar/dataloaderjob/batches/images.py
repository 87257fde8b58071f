"""PIL images, which are sent as their pixels. This module looks up PIL in `sys.modules` and never imports it."""

from __future__ import annotations

import sys
from types import NoneType
from typing import Any

from dataloaderjob.batches import allowed
from dataloaderjob.batches.special import Carrier, StaysError, exactly
from dataloaderjob.core import values

_BITS = {"1": 1, "I;16": 16, "I;16L": 16, "I;16B": 16, "I;16N": 16, "I": 32, "F": 32}
"""Bits per pixel in modes that do not have one byte per band."""


def is_image(cls: type) -> bool:
    """Returns True for PIL's image classes, except stubs, which run a program to load another image. Returns False if
    PIL has not been imported, because no image can exist yet."""
    module, files = sys.modules.get("PIL.Image"), sys.modules.get("PIL.ImageFile")
    if module is None or not allowed.full_name(cls).startswith("PIL."):
        return False
    bases = allowed.mro(cls)
    return module.Image in bases and (files is None or files.StubImageFile not in bases)


def _take(image: Any) -> tuple[Any, ...]:
    info, mode, size, palette, data, *more = image.__getstate__()
    if len(data) != _nbytes(mode, *size):
        raise StaysError(f" of mode {mode}")
    return info, mode, tuple(size), palette, data, more


def _make(cls: Any, content: Any) -> Any:
    info, mode, size, palette, data, more = exactly(content, dict, str, tuple, (list, NoneType), bytes, list)
    width, height = exactly(size, int, int)
    if min(width, height) < 0 or len(data) != _nbytes(mode, width, height):  # before PIL allocates memory
        raise ValueError(
            f"an image of {width} x {height} pixels in mode {mode} cannot have {len(data)} bytes"
        )
    values.pack([palette, more])  # raises unless these are plain values
    made = cls.__new__(cls)
    made.__setstate__([info, mode, size, palette, data, *more])
    return made


def _nbytes(mode: str, width: int, height: int) -> int:
    """Returns the size of an image's pixels in bytes. Raises KeyError for an unknown mode."""
    bits = _BITS.get(mode) or 8 * sys.modules["PIL.Image"].getmodebands(mode)
    return -(-width * bits // 8) * height


CARRIER = Carrier(take=_take, make=_make, fits=is_image, shared=True)
