"""Samplers of single samples: each rank takes every W-th position of the global order, which is any function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np

from dataloaderjob.core.errors import InputError
from dataloaderjob.samplers.elastic import ElasticSampler, Place, Tail, fit
from dataloaderjob.samplers.permutation import I64, Permutation

BLOCK = 4096
"""Indices that are made together: 40 ns each, of which 18 are calls of numpy. 1024 take 98 ns each, 16,384 take 50,
since their arrays leave the cache."""
Order = Callable[[I64], I64]
"""A function of positions, each below the number of samples, to the dataset's indices."""


class ElasticDistributedSampler(ElasticSampler[int]):
    """`DistributedSampler` without a list of indices, and with a state that any number of ranks can go on with.

    The order of an epoch is one permutation, named by (seed, epoch, number of samples). Rank r of W takes positions r,
    r + W, r + 2W and so on, as torch's sampler does. So batches of B samples on W ranks are together the next W * B
    positions: any world size with the same product W * B, or W * B * k with k batches for a step, has the same global
    batches. After a checkpoint another world size goes on where all ranks had come to, and no sample is lost or comes
    twice.

    Args:
        dataset, num_replicas, rank, shuffle, seed, drop_last: as those of `DistributedSampler`.
        tail: "drop", "pad" or "error" for samples at the end that do not fill all ranks; None: by `drop_last`. All
            ranks have the same number of samples with each of them, also after a checkpoint of another world size.
        global_batch_size: has the tail fill global batches of that size rather than ranks, so that the last one is
            the same for every world size that divides it.

    Raises:
        ValueError: `rank`, as torch raises it, and without process group a missing `num_replicas` or `rank`.
        InputError: `tail`, or a global batch that the ranks cannot share.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        tail: Tail | None = None,
        global_batch_size: int | None = None,
    ) -> None:
        super().__init__(
            dataset, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last, tail=tail
        )
        self.global_batch_size = global_batch_size
        if global_batch_size is not None:
            check_shares(global_batch_size, self.num_replicas)
        self._samples = len(dataset)
        self.total_size = self._end(0)
        self.num_samples = self.total_size // self.num_replicas

    def order(self, epoch: int) -> Order:
        """The global order of an epoch. A subclass may give another."""
        return Permutation(self._samples, self.seed, epoch) if self.shuffle else lambda positions: positions

    def indices(self, start: int, stop: int) -> I64:
        """The global order of the epoch that is set, from position `start` to `stop`: int64, shape (stop - start,)."""
        return self._look_up(self.order(self.epoch), np.arange(start, stop))

    def identity(self) -> dict[str, Any]:
        return {"samples": self._samples, **super().identity()}

    def blocks(self, place: Place) -> Iterator[list[int]]:
        order, end = self.order(place.epoch), self._end(place.position)
        span = BLOCK * self.num_replicas
        for first in range(place.position, end, span):
            turns = np.arange(first, min(first + span, end), self.num_replicas)
            yield self._look_up(order, self._own(turns, place.epoch)).tolist()

    def _own(self, turns: I64, epoch: int) -> I64:  # noqa: ARG002  for subclasses
        """This rank's positions: one of the `num_replicas` from each of `turns` on."""
        return turns + self.rank

    def _look_up(self, order: Order, positions: I64) -> I64:
        if self._samples == 0:
            return positions[:0]
        if positions.max(initial=0) >= self._samples:
            positions = positions % self._samples
        return order(positions)

    def _end(self, start: int) -> int:
        """Where the epoch ends, if all ranks go on from `start`."""
        total = self._samples
        if self.global_batch_size is not None:
            total = fit(total, self.global_batch_size, self.tail, what="samples over global batches")
        rest = max(total - start, 0)
        return start + fit(rest, self.num_replicas, self.tail, what="samples that are left over ranks")


def check_shares(global_batch_size: int, ranks: int) -> None:
    """Raises InputError where the ranks cannot have equal parts of a global batch."""
    if global_batch_size < 1 or global_batch_size % ranks:
        raise InputError(
            f"a global batch must be one sample or more for each of {ranks} ranks, and as many for all, found "
            f"{global_batch_size}: choose a multiple of {ranks}"
        )
