"""Properties of torch's and other samplers that a loader's state needs: epoch, rank, and the sampler's own state."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler

from dataloaderjob.core.errors import InputError
from dataloaderjob.core.places import RANK_VARIABLES

_NESTED = ("batch_sampler", "sampler")
_RANKS = ("rank", "num_replicas"), ("process_index", "num_processes")
"""Attributes for the rank and the number of ranks, in torch's samplers and in Accelerate's."""
_PLAIN = (int, float, str, bytes, bool, type(None))


def chain(sampler: Any) -> Iterator[tuple[str, Any]]:
    """Yields a loader's index sampler and the samplers within it, each with its path, outermost first."""
    seen: set[int] = set()
    open_: list[tuple[str, Any]] = [("", sampler)]
    while open_:
        path, one = open_.pop(0)
        if one is None or id(one) in seen or isinstance(one, list | tuple | range):
            continue
        seen.add(id(one))
        yield path, one
        inner = getattr(one, "__dict__", {})
        open_ += [(f"{path}.{name}".lstrip("."), inner[name]) for name in _NESTED if name in inner]


# Epochs


class Unset(int):
    """An epoch that has not been set since a state was loaded. In states and in copies, it becomes a plain number."""

    __slots__ = ()

    def __deepcopy__(self, _: Any) -> int:
        return int(self)


def _with_epoch(sampler: Any) -> Iterator[Any]:
    for _, one in chain(sampler):
        if isinstance(getattr(one, "epoch", None), int) and callable(getattr(one, "set_epoch", None)):
            yield one


def epoch_of(sampler: Any) -> int | None:
    """Returns the epoch that `set_epoch` was last called with or, without such a call, the sampler's initial epoch.
    Returns None if no sampler has an epoch."""
    return next((int(one.epoch) for one in _with_epoch(sampler)), None)


def set_epoch(sampler: Any, epoch: int) -> None:
    """Sets the epoch of each sampler that has one."""
    for _, one in chain(sampler):
        if callable(getattr(one, "set_epoch", None)):
            one.set_epoch(epoch)


def mark_unset(sampler: Any) -> None:
    """Marks the epoch without changing its value, so that `is_unset` can detect whether the epoch is set later."""
    for one in _with_epoch(sampler):
        if type(getattr(one, "__dict__", {}).get("epoch")) is int:
            one.epoch = Unset(one.epoch)


def is_unset(sampler: Any) -> bool:
    """Returns True if the epoch has not been set since `mark_unset`."""
    return any(type(one.epoch) is Unset for one in _with_epoch(sampler))


# Ranks


def _place(sampler: Any) -> tuple[int, int] | None:
    for _, one in chain(sampler):
        for names in _RANKS:
            rank, count = (getattr(one, name, None) for name in names)
            if type(count) is int and type(rank) is int:
                return rank, count
    return None


def ranks_of(sampler: Any) -> int | None:
    """Returns the number of ranks to which a sampler deals, or None if the sampler does not report a number."""
    place = _place(sampler)
    return None if place is None else place[1]


def rank_of(sampler: Any) -> int:
    """Returns the rank for which a sampler yields keys, or the process's rank if the sampler has none. Returns 0 if
    neither is known."""
    place = _place(sampler)
    if place is not None:
        return place[0]
    named = next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), "0")
    return int(named) if named.isdecimal() else 0


# State of their own


def with_state(sampler: Any) -> Any:
    """Returns the sampler that can return its own state: the index sampler, or the sampler inside torch's BatchSampler.
    Returns None if neither can."""
    for one in (sampler, sampler.sampler) if type(sampler) is BatchSampler else (sampler,):
        if callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None)):
            return one
    return None


def state_of(sampler: Any) -> Any:
    """Returns a copy of a sampler's state, because the sampler may continue to modify it."""
    state = sampler.state_dict()
    if type(state) is dict and all(type(value) in _PLAIN for value in state.values()):
        return dict(state)
    return copy.deepcopy(state)


def load_state(sampler: Any, state: Any) -> None:
    """Loads `state` into the sampler. Raises InputError if the sampler does not accept the state."""
    try:
        sampler.load_state_dict(state)
    except InputError:
        raise
    except Exception as exc:  # user code
        raise InputError(
            f"{type(sampler).__name__} does not accept the sampler's state ({type(exc).__name__}: {exc}): "
            "load the result of state_dict()"
        ) from exc


def order_of(sampler: Any) -> str | None:
    """Returns a description of the order of an epoch: the innermost sampler's class, and whether the sampler
    shuffles."""
    innermost = [None, *(one for _, one in chain(sampler))][-1]
    if innermost is None:
        return None
    kind, shuffle = type(innermost), getattr(innermost, "shuffle", None)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if type(shuffle) is not bool else f"{name}(shuffle={shuffle})"


class TrackedSampler:
    """An iterator over the batches of a sampler with state. It records the sampler's state after each batch, because
    the sampler runs ahead of next()."""

    __slots__ = ("_drawn", "_first", "_iterator", "_kept", "_sampler", "_states")

    def __init__(self, sampler: Any, iterator: Iterator[Any], first: int, kept: int) -> None:
        """`sampler` is the sampler with the state, and `first` is the number of the next batch. `kept` is the maximum
        number of batches that the sampler draws ahead."""
        self._sampler, self._iterator, self._first, self._kept = sampler, iterator, first, kept + 2
        self._states: list[Any] = [state_of(sampler)]
        self._drawn: list[Any] = []

    def begin_anew(self, index_sampler: Any) -> None:
        """Begins an epoch of a sampler whose state was loaded. The sampler may take that state for the end of the
        previous epoch."""
        try:
            keys = next(self)
        except StopIteration:
            self._iterator = iter(index_sampler)
        else:
            self._drawn.append(keys)

    def __iter__(self) -> TrackedSampler:
        return self

    def __next__(self) -> Any:
        if self._drawn:
            return self._drawn.pop()
        keys = next(self._iterator)
        self._states.append(state_of(self._sampler))
        if len(self._states) > 2 * self._kept:
            drop = len(self._states) - self._kept
            del self._states[:drop]
            self._first += drop
        return keys

    def after(self, batches: int) -> Any:
        """Returns the state after `batches` batches were drawn."""
        return self._states[batches - self._first]


SEEN = 4
"""Number of keys of the last batch that a state contains."""


def first_keys(keys: Any) -> list[int] | None:
    """Returns the first keys of a batch, if they are integers."""
    if type(keys) is int:
        return [keys]
    if not isinstance(keys, list):
        return None
    some = keys[:SEEN]
    return some if all(type(key) is int for key in some) else None


def skipped(batches: Iterator[Any], count: int, *, bare: bool) -> tuple[int, int, Any]:
    """Draws and discards up to `count` batches. Returns (number of batches drawn, number of samples in them, keys of
    the last batch)."""
    number, samples, last = 0, 0, None
    for last in itertools.islice(batches, count):
        number += 1
        samples += 1 if bare else len(last)
    return number, samples, last
