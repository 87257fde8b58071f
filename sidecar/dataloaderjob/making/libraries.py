"""Adjustments to OpenCV and MONAI, so that samples are the same in every process. This module imports neither
library."""

from __future__ import annotations

import sys
from typing import Any

_UNNAMED = "_dataloaderjob_unnamed"


def seed(number: int) -> None:
    """Seeds the generators that are internal to a library. Called before each sample."""
    if (cv2 := sys.modules.get("cv2")) is not None:
        seed_opencv(cv2, number)
    leave_out_identities()


def seed_opencv(cv2: Any, number: int) -> None:
    """Seeds OpenCV's generator of the calling thread. Its state cannot be read, so it is not restored."""
    put = getattr(cv2, "setRNGSeed", None)  # absent while the module is being imported
    if put is not None:
        put(number & 0x7FFFFFFF)


def leave_out_identities() -> None:
    """Prevents MONAI's transforms from recording `id(self)` in their results (MONAI 1.6).

    The id differs between processes and runs, but `inverse` compares it with the id of the trainer's transform. If
    TraceKeys.NONE is recorded instead, MONAI relies only on the order of the transforms.
    """
    inverse = sys.modules.get("monai.transforms.inverse")
    traceable: Any = getattr(inverse, "TraceableTransform", None)
    if traceable is None or hasattr(traceable, _UNNAMED):
        return
    noted, keys = traceable.get_transform_info, inverse.TraceKeys  # type: ignore[union-attr]

    def get_transform_info(self: Any) -> Any:
        info = noted(self)
        if keys.ID in info:
            info[keys.ID] = keys.NONE
        return info

    traceable.get_transform_info = get_transform_info
    setattr(traceable, _UNNAMED, True)
