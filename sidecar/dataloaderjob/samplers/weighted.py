"""Independent weighted draws with replacement. Each rank computes only its own draws, and keeps no list of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dataloaderjob.core.errors import InputError
from dataloaderjob.samplers.alias import AliasTable
from dataloaderjob.samplers.distributed import ElasticDistributedSampler, Order
from dataloaderjob.samplers.elastic import Tail
from dataloaderjob.samplers.permutation import make_keys, uniform

if TYPE_CHECKING:
    import torch

_OF_DRAWS = 1
"""A part of the keys for draws, which makes them differ from the keys for permutations."""


class ElasticWeightedSampler(ElasticDistributedSampler):
    """A `WeightedRandomSampler` with replacement, for any number of ranks. A different number of ranks can resume from
    its state.

    The draw at a position depends only on (seed, epoch, position). A table of 16 bytes for each weight is kept.

    Args:
        weights: a number of 0 or more for each sample; they need not add up to 1.
        num_samples: number of draws in an epoch, over all ranks.
        num_replicas, rank, seed, drop_last, tail, global_batch_size: as for `ElasticDistributedSampler`.

    Raises:
        InputError: weights are negative, infinite or all 0.
    """

    def __init__(
        self,
        weights: Sequence[float] | npt.NDArray[Any] | torch.Tensor,
        num_samples: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        tail: Tail | None = None,
        global_batch_size: int | None = None,
    ) -> None:
        super().__init__(
            range(num_samples), num_replicas, rank, seed=seed, drop_last=drop_last, tail=tail,
            global_batch_size=global_batch_size,
        )  # fmt: skip
        self.weights = weights
        values = check_weights(weights)
        self._table = AliasTable(values)
        self._digest = hashlib.sha256(values.astype("<f8").tobytes()).hexdigest()[:16]

    def order(self, epoch: int) -> Order:
        keys = make_keys(2, self.seed, epoch, _OF_DRAWS)

        return lambda positions: self._table.draw(uniform(positions, keys))

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "weights": self._digest}


def check_weights(weights: Any) -> npt.NDArray[np.float64]:
    """Returns the weights as a float64 array. Raises InputError if nothing can be drawn with them."""
    values = np.asarray(weights, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values.sum()) or (values < 0).any() or not (values > 0).any():
        shown = (
            f"{values.tolist()}"
            if values.size <= 10
            else f"{values.size} of {values.min()} to {values.max()}"
        )
        raise InputError(
            f"weights must be one-dimensional, finite, at least 0 and not all 0, but are {shown}: correct "
            "them"
        )
    return values
