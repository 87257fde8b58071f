"""Draws by weights in constant time: Walker's alias method, with a table that is made without a loop.

Each of n columns has room for 1/n of the probability: a sample's own, and where that is less, the rest from one sample
that has more, its alias. Samples that have more give to those that have less one after the other, in order; where the
last one that a sample gives to takes too much of it, it is filled up by the next. So who gives to whom follows from two
running sums, of what is lacking and of what is too much.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dataloaderjob.samplers.permutation import I64

F64 = npt.NDArray[np.float64]


class AliasTable:
    """16 bytes for each weight."""

    __slots__ = ("aliases", "own")

    def __init__(self, weights: F64) -> None:
        """Weights are finite, 0 or more, and not all 0."""
        # The last of the running sums: sum() adds in an order that depends on the processor.
        share = weights / np.cumsum(weights)[-1] * weights.size
        self.own = np.minimum(share, 1.0)
        """How much of its column is a sample's own."""
        self.aliases: I64 = np.arange(weights.size)
        rich, poor = np.flatnonzero(share >= 1.0), np.flatnonzero(share < 1.0)
        if not poor.size or not rich.size:
            return
        spare, lack = np.cumsum(share[rich] - 1.0), np.cumsum(1.0 - share[poor])
        lack_before = np.concatenate(([0.0], lack[:-1]))
        last = rich.size - 1
        self.aliases[poor] = rich[np.minimum(np.searchsorted(spare, lack_before, side="right"), last)]
        taken = lack[np.minimum(np.searchsorted(lack, spare[:-1]), poor.size - 1)] - spare[:-1]
        self.own[rich[:-1]] = 1.0 - np.clip(taken, 0.0, 1.0)
        self.aliases[rich[:-1]] = rich[1:]

    def draw(self, uniform: F64) -> I64:
        """A sample for each number in [0, 1)."""
        size = self.own.size
        scaled = uniform * size
        columns = np.minimum(scaled.astype(np.int64), size - 1)
        found: I64 = np.where(scaled - columns < self.own[columns], columns, self.aliases[columns])
        return found
