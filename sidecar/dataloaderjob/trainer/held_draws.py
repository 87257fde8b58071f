"""How many iterators generators that a dataset holds have served: what makes the draws of two epochs differ.

Each loader of a dataset has a range of numbers, so that one that is made anew for each epoch draws anew, too. Which
range it is, is part of its state.
"""

from __future__ import annotations

import weakref
from typing import Any

EPOCHS = 1024
"""Numbers of one loader. Beyond them, and beyond 64 loaders, draws repeat."""
_DEPTH = 20
_loaders: dict[int, tuple[weakref.ref[Any], int]] = {}
"""Loaders that each dataset had, by its id."""


def root_of(dataset: Any) -> Any:
    """The dataset that wrappers, such as torch's Subset, are of."""
    for _ in range(_DEPTH):
        inner = getattr(dataset, "dataset", None)
        if inner is None:
            break
        dataset = inner
    return dataset


def next_range(dataset: Any) -> int:
    """Begins a range for a loader; returns its first number."""
    root = root_of(dataset)
    found = _loaders.get(id(root))
    count = 0 if found is None or found[0]() is not root else found[1]
    _keep(root, count + 1)
    return count * EPOCHS


def go_on(dataset: Any, first: int) -> None:
    """Notes that a loader has the range that begins with `first`, of a state that was loaded."""
    root = root_of(dataset)
    found = _loaders.get(id(root))
    count = 0 if found is None or found[0]() is not root else found[1]
    _keep(root, max(count, first // EPOCHS + 1))


def _keep(root: Any, count: int) -> None:
    try:
        _loaders[id(root)] = weakref.ref(root, _forgetting(id(root))), count
    except TypeError:  # a list: each loader of it begins with the first range
        return


def _forgetting(key: int) -> Any:
    def forget(ref: weakref.ref[Any]) -> None:
        found = _loaders.get(key)
        if found is not None and found[0] is ref:
            del _loaders[key]

    return forget
