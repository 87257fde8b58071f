"""Settings of libraries that scripts set at their top, and that no object of the dataset holds.

A setting of a library that is not loaded anyhow travels only if it differs from the library's own, for a feeder
would import the library to set it.
"""

from __future__ import annotations

import csv
import mimetypes
import sys
from typing import Any

import numpy as np
import torch

_PIXELS = 1024 * 1024 * 1024 // 4 // 3
_IMPORTED_FOR_EFFECT = ("hdf5plugin", "pillow_avif", "pillow_heif", "pillow_jxl")
"""Libraries that register themselves with another when they are imported."""
_TORCH_PRINTS: Any = torch._tensor_str.PRINT_OPTS  # noqa: SLF001  torch shows it nowhere else


def take() -> dict[str, Any]:
    return {
        "imports": [name for name in _IMPORTED_FOR_EFFECT if name in sys.modules],
        "pil": _pil(),
        "csv": csv.field_size_limit(),
        "mime": _mime_types(),
        "numpy": np.geterr(),
        "numpy prints": _plain(np.get_printoptions()),
        "torch prints": _plain(vars(_TORCH_PRINTS)),
    }


def _pil() -> dict[str, Any]:
    image, file = sys.modules.get("PIL.Image"), sys.modules.get("PIL.ImageFile")
    found: dict[str, Any] = {}
    if file is not None and getattr(file, "LOAD_TRUNCATED_IMAGES", False):
        found["truncated"] = True
    if image is not None and getattr(image, "MAX_IMAGE_PIXELS", _PIXELS) != _PIXELS:
        found["pixels"] = image.MAX_IMAGE_PIXELS
    return found


def _mime_types() -> dict[str, str]:
    """All types, for the machine's own are in the table, too; none where the table was never used."""
    return dict(sorted(mimetypes.types_map.items())) if mimetypes.inited else {}


def _plain(options: Any) -> dict[str, Any]:
    return {k: v for k, v in options.items() if isinstance(v, str | int | float)}


# In a feeder


def apply(state: dict[str, Any]) -> None:
    for name in state["imports"]:
        try:
            __import__(name)
        except ImportError:
            continue  # what needs it will say so
    _apply_pil(state["pil"])
    csv.field_size_limit(state["csv"])
    for extension, kind in state["mime"].items():
        mimetypes.add_type(kind, extension)
    np.seterr(**state["numpy"])
    np.set_printoptions(**state["numpy prints"])
    vars(_TORCH_PRINTS).update(state["torch prints"])


def _apply_pil(pil: dict[str, Any]) -> None:
    if not pil:
        return
    try:
        from PIL import Image, ImageFile
    except ImportError:
        return
    if "truncated" in pil:
        ImageFile.LOAD_TRUNCATED_IMAGES = pil["truncated"]
    if "pixels" in pil:
        Image.MAX_IMAGE_PIXELS = pil["pixels"]
