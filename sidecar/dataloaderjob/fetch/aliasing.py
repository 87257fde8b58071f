"""Does user code still hold the memory of the batch that it returned?

A body is sent as it lies, while the next batch is being made. A collate_fn that fills one buffer again and
again, or a dataset that returns slices of an array, would change bytes that are on their way; such a batch
is copied first. A fresh one, as default_collate makes it, is not.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

_REFERENCES = 4
"""Its container or the caller's variable, our variable, `_held`'s argument, getrefcount's argument."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None), np.generic)


def aliased(batch: Any) -> bool:
    """Whether any tensor or array of `batch` is, or shares memory with, something held elsewhere.

    Looks into lists, tuples and dicts; an array within anything else counts as held.
    """
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return _held(batch)
    return _held_within(batch) if _open(batch) else not isinstance(batch, _PLAIN)


def _held_within(container: Any) -> bool:
    if sys.getrefcount(container) > _REFERENCES:
        return True  # user code keeps it, and may fill its arrays again
    for element in container.values() if type(container) is dict else container:
        if isinstance(element, (torch.Tensor, np.ndarray)):
            if _held(element):
                return True
        elif _open(element):
            if _held_within(element):
                return True
        elif not isinstance(element, _PLAIN):
            return True
    return False


def _open(value: Any) -> bool:
    return type(value) in (list, dict) or isinstance(value, tuple)


def _held(array: Any) -> bool:
    if sys.getrefcount(array) > _REFERENCES:
        return True
    if isinstance(array, np.ndarray):
        return array.base is not None
    if array.layout is not torch.strided:
        return True  # it has no storage to ask, and is refused or pickled anyway
    storage = array.untyped_storage()
    if not storage.resizable():  # over memory that is not torch's: nobody can say who holds it
        return True
    # the tensor's and that of the Python object just made
    return torch._C._storage_Use_Count(storage._cdata) > 2  # noqa: SLF001
