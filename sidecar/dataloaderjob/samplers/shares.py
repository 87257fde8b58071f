"""Which of several parts a position belongs to, such that each part has its share of every prefix.

A position belongs to the left of two parts if the rounded count of those, position times share, rises with it; that
count is also its number within the part. More than two are split again, by a tree of Huffman's, whose paths get short
fast enough that no part is ever more than two positions from its share, however many parts there are.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dataloaderjob.samplers.permutation import I64

_BITS = 31
"""A share has so many bits: products of it and half a position fit 63."""
_ONE = 1 << _BITS
_HALF = _ONE >> 1


@dataclass(frozen=True, slots=True)
class _Split:
    share: int
    """The left one's, in 2**-31."""
    left: _Split | int
    right: _Split | int
    """A further split, or the number of a part."""


class Shares:
    """A schedule of parts by their weights; those of weight 0 have no position."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Weights are finite, 0 or more, and not all 0."""
        self._parts = len(weights)
        order = itertools.count()  # ties are broken by age, so that the tree is the same everywhere
        heap: list[tuple[float, int, _Split | int]] = [
            (float(weight), next(order), part) for part, weight in enumerate(weights) if weight > 0
        ]
        heapq.heapify(heap)
        while len(heap) > 1:
            (small, _, left), (large, _, right) = heapq.heappop(heap), heapq.heappop(heap)
            split = _Split(round(small / (small + large) * _ONE), left, right)
            heapq.heappush(heap, (small + large, next(order), split))
        self._root = heap[0][2]

    def split(self, positions: I64) -> Iterator[tuple[int, I64, I64]]:
        """The parts that have any of the positions, each with which ones, and their numbers within the part."""
        return _walk(self._root, np.arange(positions.size), positions)

    def counts(self, stop: int) -> list[int]:
        """How many positions below `stop` each part has."""
        found = [0] * self._parts
        left: list[tuple[_Split | int, int]] = [(self._root, stop)]
        while left:
            node, count = left.pop()
            if isinstance(node, int):
                found[node] = count
            else:
                of_left = _portion(count, node.share)
                left += [(node.left, of_left), (node.right, count - of_left)]
        return found


def _walk(node: _Split | int, which: I64, numbers: I64) -> Iterator[tuple[int, I64, I64]]:
    if not which.size:
        return
    if isinstance(node, int):
        yield node, which, numbers
        return
    before = _portions(numbers, node.share)
    is_left = _portions(numbers + 1, node.share) > before
    yield from _walk(node.left, which[is_left], before[is_left])
    yield from _walk(node.right, which[~is_left], (numbers - before)[~is_left])


def _portion(count: int, share: int) -> int:
    return (count * share + _HALF) >> _BITS


def _portions(counts: I64, share: int) -> I64:
    """The same for an array: by halves, since a product of 63 bits and 31 fits none of its integers."""
    upper, lower = counts >> _BITS, counts & (_ONE - 1)
    return upper * share + ((lower * share + _HALF) >> _BITS)
