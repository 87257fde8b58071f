"""Weighted draws in constant time: Walker's alias method, with a table that is built without a Python loop.

Each of n columns holds 1/n of the probability. A column is filled by its own sample. If that sample has a probability
below 1/n (a poor sample), an alias fills the rest of the column. An alias is a sample with a probability above 1/n (a
rich sample). Rich samples fill up poor ones in order. Once a rich sample has less than 1/n left for its own column, the
next rich sample fills up the rest of that column. The assignment follows from two running sums, one of the deficits and
one of the excesses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dataloaderjob.samplers.permutation import I64

F64 = npt.NDArray[np.float64]


class AliasTable:
    """A table for weighted draws, with 16 bytes for each weight."""

    __slots__ = ("aliases", "own")

    def __init__(self, weights: F64) -> None:
        """Requires weights that are finite, at least 0, and not all 0."""
        # Uses the last running sum, because sum() adds in an order that depends on the processor.
        share = weights / np.cumsum(weights)[-1] * weights.size
        self.own = np.minimum(share, 1.0)
        """Share of each column that belongs to its own sample."""
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
        """Returns the index of a sample for each of the uniform random numbers, which are in [0, 1)."""
        size = self.own.size
        scaled = uniform * size
        columns = np.minimum(scaled.astype(np.int64), size - 1)
        found: I64 = np.where(scaled - columns < self.own[columns], columns, self.aliases[columns])
        return found
