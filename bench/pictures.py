"""B19: JPEGs decoded by feeders or by the trainer's device_stage, whose device is the CPU here.

Phases and figures are B3's. The pictures are made here and have the average size of ImageNet's. Every party cuts them
to the same middle as it decodes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch

from bench import endtoend
from bench.endtoend import SIDE

STAGE, FEEDERS = "decoded by the stage", "decoded by feeders"
KINDS = (STAGE, FEEDERS)
WIDTH, HEIGHT = 500, 375
_DIFFERENT = 64
_QUALITY, _GRAIN = 90, 6.0
"""Settings that give files of about 100 kB."""


@dataclass(frozen=True, slots=True)
class Case(endtoend.Case):
    kind: str = STAGE

    @property
    def name(self) -> str:
        return self.kind

    def images(self) -> Decoded:
        return Decoded(self)


def files() -> list[bytes]:
    """Makes JPEGs of soft shapes with some grain."""
    from PIL import Image

    rng, made = np.random.default_rng(11), []
    for _ in range(_DIFFERENT):
        shapes = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize((WIDTH, HEIGHT))
        grain = rng.normal(0.0, _GRAIN, (HEIGHT, WIDTH, 3))
        picture = np.clip(np.asarray(shapes) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(picture).save(file := BytesIO(), "JPEG", quality=_QUALITY)
        made.append(file.getvalue())
    return made


def decoded(jpeg: Any) -> np.ndarray:
    """Returns the middle of a picture, uint8 of shape (3, 224, 224). `jpeg` is any bytes-like object."""
    from PIL import Image

    whole = np.asarray(Image.open(BytesIO(jpeg)))
    top, left = (HEIGHT - SIDE) // 2, (WIDTH - SIDE) // 2
    return np.ascontiguousarray(whole[top : top + SIDE, left : left + SIDE].transpose(2, 0, 1))


class Files(torch.utils.data.Dataset[Any]):
    """JPEGs, undecoded."""

    def __init__(self, case: Case) -> None:
        self._length, self._files = case.batch * case.batches, files()

    def __len__(self) -> int:
        return self._length

    def file(self, index: int) -> bytes:
        return self._files[index % _DIFFERENT]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.file(index), index


class Decoded(Files):
    """Decoded pictures."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return torch.from_numpy(decoded(self.file(index))), index

    def stacked(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns a whole batch as arrays: pictures and int64 indices."""
        return np.stack([decoded(self.file(int(i))) for i in indices]), np.asarray(indices, dtype=np.int64)


def stage(batch: Any, _: torch.Generator) -> Any:
    """Decodes a batch of `Files`."""
    jpegs, indices = batch
    return torch.stack([torch.from_numpy(decoded(view.numpy())) for view in jpegs.views()]), indices


def with_link(found: dict[str, Any], case: Case, status: dict[str, Any]) -> dict[str, Any]:
    """Adds the kB per picture that crossed the link, from a receiver's figures."""
    pictures = status["batches"] * case.batch
    found["figures"][case.name]["link_kb_per_picture"] = status["nbytes"] / pictures / 1e3
    return found
