"""What two libraries need for samples to be the same wherever they are made. Neither is imported here."""

from __future__ import annotations

import sys
from typing import Any

_UNNAMED = "_dataloaderjob_unnamed"


def seed(number: int) -> None:
    """Seeds the generators that only their library can reach, before a sample."""
    if (cv2 := sys.modules.get("cv2")) is not None:
        seed_opencv(cv2, number)
    leave_out_identities()


def seed_opencv(cv2: Any, number: int) -> None:
    """OpenCV's generator, of the calling thread. Nobody can read it, so it is not put back."""
    put = getattr(cv2, "setRNGSeed", None)  # absent while the module is imported
    if put is not None:
        put(number & 0x7FFFFFFF)


def leave_out_identities() -> None:
    """Has MONAI's transforms note no `id(self)` in what they return (1.6).

    The number is another one in each process and each run, and `inverse` compares it with that of the trainer's
    transform: with TraceKeys.NONE in its place MONAI goes by the order of the transforms alone.
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
