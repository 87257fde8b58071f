"""Draw numbers for the generators that a dataset holds. Each iterator has a different draw number, so that the draws of
two epochs differ.

Each loader of a dataset has a range of numbers, so even a loader that is rebuilt for each epoch gets new draws. The
range is part of the loader's state. An iterator that uses `dataloaderjob.context()` has a single number.
"""

from __future__ import annotations

import weakref
from typing import Any

EPOCHS = 1024
"""Size of one loader's range of numbers."""
OF_ITERATORS = 32 * EPOCHS
"""The first draw number for single iterators. Draws repeat once one dataset has more than 32 loaders or `OF_ITERATORS`
single iterators."""
_DEPTH = 20
_counts: dict[tuple[int, bool], tuple[weakref.ref[Any], int]] = {}
"""A weak reference to each dataset, and the number of its loaders or single iterators so far. The key is the dataset's
id and a bool: True for single iterators."""


def root_of(dataset: Any) -> Any:
    """Returns the dataset inside wrappers, such as torch's Subset."""
    for _ in range(_DEPTH):
        try:
            inner = dataset.dataset
            weakref.ref(inner)
        except Exception:  # the attribute may be missing, a name or a list, and reading it may run user code
            break
        dataset = inner
    return dataset


def next_range(dataset: Any) -> int:
    """Begins a range for a loader, and returns the range's first number."""
    return _next(dataset, is_single=False) % 32 * EPOCHS


def next_number(dataset: Any) -> int:
    """Returns a draw number for a single iterator."""
    return OF_ITERATORS + _next(dataset, is_single=True) % OF_ITERATORS


def go_on(dataset: Any, first: int) -> None:
    """Records that a loader or an iterator uses the numbers from `first` on, as a loaded state specifies."""
    is_single = first >= OF_ITERATORS
    given = first - OF_ITERATORS if is_single else first // EPOCHS
    root = root_of(dataset)
    _keep(root, max(_count(root, is_single), given + 1), is_single)


def _next(dataset: Any, *, is_single: bool) -> int:
    root = root_of(dataset)
    count = _count(root, is_single)
    _keep(root, count + 1, is_single)
    return count


def _count(root: Any, is_single: bool) -> int:
    found = _counts.get((id(root), is_single))
    return 0 if found is None or found[0]() is not root else found[1]


def _keep(root: Any, count: int, is_single: bool) -> None:
    key = id(root), is_single
    try:
        _counts[key] = weakref.ref(root, _forgetting(key)), count
    except TypeError:  # a list has no weak references: each of its loaders begins with the first range
        return


def _forgetting(key: tuple[int, bool]) -> Any:
    def forget(ref: weakref.ref[Any]) -> None:
        found = _counts.get(key)
        if found is not None and found[0] is ref:
            del _counts[key]

    return forget
