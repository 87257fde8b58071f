"""The assignment of positions to parts. Every prefix contains each part in proportion to the part's share.

With two parts, the left part has round(n * share) of the first n positions. Position n belongs to the left part if this
count increases from n to n + 1. The count for n is then the position's number within the part. More than two parts are
split recursively by a Huffman tree. Its paths are so short that no part is ever more than two positions from its share,
for any number of parts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dataloaderjob.samplers.permutation import I64

_BITS = 31
"""Number of bits of a share. The product of a share and one half of a position (up to 32 bits) fits into 63 bits."""
_ONE = 1 << _BITS
_HALF = _ONE >> 1


@dataclass(frozen=True, slots=True)
class _Split:
    share: int
    """The left side's share, in units of 2**-31."""
    left: _Split | int
    right: _Split | int
    """Another split, or the number of a part."""


class Shares:
    """A schedule that assigns positions to parts in proportion to weights. A part with weight 0 gets no positions."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Requires weights that are finite, at least 0, and not all 0."""
        self._parts = len(weights)
        order = itertools.count()  # ties are broken by age, so that the tree is the same in every process
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
        """Yields (part, indices, numbers) for each part that has any of the positions. `indices` are places in
        `positions`, and `numbers` are the positions' numbers within the part."""
        return _walk(self._root, np.arange(positions.size), positions)

    def counts(self, stop: int) -> list[int]:
        """Returns the number of positions below `stop` in each part."""
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
    """Does the same as `_portion` for an array. Multiplies the two halves of each count separately, because no numpy
    integer can hold the product of a 63-bit and a 31-bit number."""
    upper, lower = counts >> _BITS, counts & (_ONE - 1)
    return upper * share + ((lower * share + _HALF) >> _BITS)
