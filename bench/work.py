"""The work that all cells share, and the proof that it was done. This module does not import torch.

Batches carry known bytes. Their sums are compared with the expected ones outside the measured time. A cell whose bytes
differ ends with an error and gives no figure.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

KINDS = 3
"""Number of contents in rotation. 3 divides neither pool size, so no slot gets the same bytes twice in a row."""
SMALL_NBYTES = 100_352
"""0.1 MB. Like the two sizes below, it is a whole number of 64-byte lines for 1, 8 and 32 tensors."""
MIDDLE_NBYTES = 1_003_520
LARGE_NBYTES = 38_535_168
"""256 x 3 x 224 x 224."""
_STRIDE = 97


def size_name(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def content(kind: int, nbytes: int) -> np.ndarray:
    """Returns random bytes of this kind, uint8 of shape (nbytes,). The first 8 are 0, for a stamp."""
    array = np.random.default_rng(kind).integers(0, 256, nbytes, dtype=np.uint8)
    array[:8] = 0
    return array


def sums(array: np.ndarray) -> tuple[int, int]:
    """Returns two sums of a contiguous uint8 array, modulo 2**64: of all its 8-byte words, and of every 97th."""
    words = array.reshape(-1).view(np.uint64)
    return int(words.sum(dtype=np.uint64)), int(words[::_STRIDE].sum(dtype=np.uint64))


class Proof:
    """A count of the verified batches, and a digest of their bytes."""

    def __init__(self) -> None:
        self.batches = 0
        self.nbytes = 0
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, number: int, arrays: list[np.ndarray], expected: list[tuple[int, int]]) -> None:
        """Adds a batch. Raises RuntimeError unless the sums of `arrays` are the expected ones."""
        found = [sums(a) for a in arrays]
        if found != expected:
            raise RuntimeError(
                f"batch {number}: the bytes that arrived differ: need {expected}, found {found}"
            )
        self.batches += 1
        self.nbytes += sum(a.nbytes for a in arrays)
        self._hash.update(repr(found).encode())

    def as_json(self) -> dict[str, Any]:
        if not self.batches:
            raise RuntimeError("no batch of this cell was verified; its figures prove nothing")
        return {"batches": self.batches, "nbytes": self.nbytes, "digest": self._hash.hexdigest()}


class Contents:
    """Contents of `tensors` equal parts of a batch, and their sums. Made once in each process."""

    def __init__(self, nbytes: int, tensors: int) -> None:
        if nbytes % (64 * tensors):
            raise ValueError(f"{nbytes} bytes do not split into {tensors} parts of whole 64-byte lines")
        self.nbytes = nbytes
        self.parts = [np.split(content(kind, nbytes), tensors) for kind in range(KINDS)]
        for parts in self.parts:
            for part in parts:
                part[:8] = 0
        self._sums = [[sums(part) for part in parts] for parts in self.parts]

    def expected(self, number: int, *, stamped: bool) -> list[tuple[int, int]]:
        """Returns the sums of batch `number`. With `stamped` each part carries the number."""
        stamp = number if stamped else 0
        return [((a + stamp) % 2**64, (b + stamp) % 2**64) for a, b in self._sums[number % KINDS]]
