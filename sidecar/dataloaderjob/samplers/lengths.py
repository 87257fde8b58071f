"""What samplers of batches know of their samples: a length for each, or whatever its work is proportional to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dataloaderjob.core.errors import InputError
from dataloaderjob.samplers.permutation import I64, Permutation

Lengths = Sequence[int] | npt.NDArray[Any] | torch.Tensor
OF_BATCHES = 3
"""A stream of keys beside that of the permutation of samples."""


def check_lengths(lengths: Lengths) -> I64:
    """Lengths as an array. Raises InputError for what is no row of counts."""
    values = np.asarray(lengths)
    whole = values.size == 0 or np.issubdtype(values.dtype, np.integer)
    if values.ndim != 1 or not whole or (values < 0).any():
        raise InputError(
            f"lengths must be a row of whole numbers, 0 or more, one for each sample, found {values.dtype} of shape "
            f"{values.shape}: count tokens, frames or bytes"
        )
    return values.astype(np.int64)


def digest(lengths: I64) -> str:
    """A name for all lengths, by which a state of other data is told."""
    return hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()[:16]


def longest_first(indices: I64, lengths: I64) -> I64:
    """The same indices, those of the longest samples first; equal ones stay in their order."""
    return indices[np.argsort(-lengths[indices], kind="stable")]


def shuffled(count: int, seed: int, epoch: int, chunk: int) -> list[int]:
    """An order for the batches of a chunk, which were made longest first."""
    found: list[int] = Permutation(count, seed, epoch, chunk, OF_BATCHES)(np.arange(count)).tolist()
    return found
