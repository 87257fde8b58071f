"""Limits on peers: whom to disconnect when a listening socket has reached its limit, and how many may be admitted."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Crowds(Generic[T]):
    """Peers by address, the oldest first."""

    __slots__ = ("_members",)

    def __init__(self) -> None:
        self._members: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._members.values()))

    def __iter__(self) -> Iterator[T]:
        return itertools.chain.from_iterable(self._members.values())

    def add(self, address: str, peer: T) -> None:
        self._members.setdefault(address, {})[peer] = None

    def remove(self, address: str, peer: T) -> None:
        same = self._members[address]
        del same[peer]
        if not same:
            del self._members[address]

    def size(self, address: str) -> int:
        """Returns the number of peers from an address."""
        return len(self._members.get(address, ()))

    def of(self, address: str) -> list[T]:
        """Returns the peers from an address."""
        return list(self._members.get(address, ()))

    def first_to_go(self) -> T:
        """Returns the oldest peer from the address with the most peers, so that a stranger displaces only its own
        connections."""
        largest = max(self._members.values(), key=len)
        return next(iter(largest))


class Places:
    """Places for admitted peers. Each address may take a limited number. Threads may share them."""

    def __init__(self, most: int) -> None:
        self._most, self._taken, self._lock = most, Counter[str](), threading.Lock()

    @contextlib.contextmanager
    def one(self, address: str) -> Iterator[bool]:
        """Takes a place until the end of the block. Yields False if the address has none left."""
        with self._lock:
            free = self._taken[address] < self._most
            self._taken[address] += free
        try:
            yield free
        finally:
            with self._lock:
                self._taken[address] -= free
                if not self._taken[address]:
                    del self._taken[address]
