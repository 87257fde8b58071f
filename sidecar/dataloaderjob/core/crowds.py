"""Chooses the peer to disconnect when a listening socket has reached its limit of peers. Pure."""

from __future__ import annotations

import itertools
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

    def first_to_go(self) -> T:
        """Returns the oldest peer from the address with the most peers: a stranger with many displaces its own."""
        largest = max(self._members.values(), key=len)
        return next(iter(largest))
