"""Settings of libraries that scripts set at their top, and that no object of the dataset holds.

A setting of a library that is not loaded anyhow travels only if it differs from the library's own, for a feeder
would import the library to set it.
"""

from __future__ import annotations

import csv
import decimal
import mimetypes
import os
import socket
import sys
import tempfile
from typing import Any

import numpy as np
import torch

_PIXELS = 1024 * 1024 * 1024 // 4 // 3
_IMPORTED_FOR_EFFECT = ("hdf5plugin", "pillow_avif", "pillow_heif", "pillow_jxl")
"""Libraries that register themselves with another when they are imported."""
_DIALECT = (
    "delimiter", "doublequote", "escapechar", "lineterminator", "quotechar", "quoting", "skipinitialspace", "strict",
)  # fmt: skip
_TORCH_PRINTS: Any = torch._tensor_str.PRINT_OPTS  # noqa: SLF001  torch shows it nowhere else


def take() -> dict[str, Any]:
    return {
        "imports": [name for name in _IMPORTED_FOR_EFFECT if name in sys.modules],
        "pil": _pil(),
        "decimal": _decimal(),
        "csv": csv.field_size_limit(),
        "dialects": _dialects(),
        "tempdir": tempfile.tempdir,
        "flushes": _flushes_denormals(),
        "mime": _mime_types(),
        "socket": socket.getdefaulttimeout(),
        "unverified": _unverified(),
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


def _decimal() -> dict[str, Any]:
    context = decimal.getcontext()
    traps = [signal.__name__ for signal, trapped in context.traps.items() if trapped]
    return {"prec": context.prec, "rounding": context.rounding, "traps": traps}


def _unverified() -> bool:
    """Whether the script switched the check of certificates off, as it does to download from an old server."""
    ssl = sys.modules.get("ssl")
    return ssl is not None and ssl._create_default_https_context is ssl._create_unverified_context  # noqa: SLF001


def _mime_types() -> dict[str, str]:
    """All types, for the machine's own are in the table, too; none where the table was never used."""
    return dict(sorted(mimetypes.types_map.items())) if mimetypes.inited else {}


def _dialects() -> dict[str, dict[str, Any]]:
    """What the script registered."""
    found: dict[str, dict[str, Any]] = {}
    for name in set(csv.list_dialects()) - {"excel", "excel-tab", "unix"}:
        dialect = csv.get_dialect(name)
        found[name] = {attribute: getattr(dialect, attribute) for attribute in _DIALECT}
    return dict(sorted(found.items()))


def _flushes_denormals() -> bool:
    """Whether the script called torch.set_flush_denormal, which has no counterpart."""
    return float(torch.tensor(1e-38) * torch.tensor(0.1)) == 0.0


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
    context = decimal.getcontext()
    context.prec, context.rounding = state["decimal"]["prec"], state["decimal"]["rounding"]
    for signal in context.traps:
        context.traps[signal] = signal.__name__ in state["decimal"]["traps"]
    csv.field_size_limit(state["csv"])
    for name, attributes in state["dialects"].items():
        csv.register_dialect(name, **attributes)
    if state["tempdir"] is not None and os.path.isdir(state["tempdir"]):
        tempfile.tempdir = state["tempdir"]
    if state["flushes"]:
        torch.set_flush_denormal(True)
    socket.setdefaulttimeout(state["socket"])
    if state["unverified"]:
        import ssl

        ssl._create_default_https_context = ssl._create_unverified_context  # type: ignore[assignment]  # noqa: SLF001
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
