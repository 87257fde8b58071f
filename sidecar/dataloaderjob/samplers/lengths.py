"""Sample lengths, for samplers of batches. A length may be any number that is proportional to the work for a sample."""

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
"""A part of the keys for the order of batches, which makes them differ from the keys for the order of samples."""


def check_lengths(lengths: Lengths) -> I64:
    """Returns the lengths as an int64 array. Raises InputError unless they are a one-dimensional sequence of whole
    numbers of at least 0."""
    values = np.asarray(lengths)
    whole = values.size == 0 or np.issubdtype(values.dtype, np.integer)
    if values.ndim != 1 or not whole or (values < 0).any():
        raise InputError(
            "lengths must be a one-dimensional array with a whole number, at least 0, for each sample, but are "
            f"{values.dtype} of shape {values.shape}: count tokens, frames or bytes"
        )
    return values.astype(np.int64)


def digest(lengths: I64) -> str:
    """Returns a digest of all lengths, as 16 hex digits. It shows if a state belongs to different data."""
    return hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()[:16]


def longest_first(indices: I64, lengths: I64) -> I64:
    """Returns the indices sorted by length, longest first; samples of equal length keep their order."""
    return indices[np.argsort(-lengths[indices], kind="stable")]


def shuffled(count: int, seed: int, epoch: int, chunk: int) -> list[int]:
    """Returns a random order for the `count` batches of a chunk, which were formed in order of length."""
    found: list[int] = Permutation(count, seed, epoch, chunk, OF_BATCHES)(np.arange(count)).tolist()
    return found
