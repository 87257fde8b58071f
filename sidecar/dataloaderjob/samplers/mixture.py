"""A weighted mixture of datasets, each in its own order. A position alone determines its sample."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np

from dataloaderjob.core.errors import InputError
from dataloaderjob.samplers.distributed import ElasticDistributedSampler, Order
from dataloaderjob.samplers.elastic import OrderPlace, Tail
from dataloaderjob.samplers.permutation import I64, Permutation, hash_below, make_keys
from dataloaderjob.samplers.shares import Shares
from dataloaderjob.samplers.weighted import check_weights

if TYPE_CHECKING:
    from torch.utils.data import ConcatDataset

Weights = Sequence[float] | Mapping[int, Sequence[float]] | Callable[[int], Sequence[float]]
_permutation = functools.lru_cache(maxsize=64)(Permutation)
"""Cached permutations. Computing their keys again for each block would take a tenth of the total time."""
_OF_TURNS = 2
"""A part of the keys for turns, which makes them differ from the keys for permutations."""


class ElasticMixtureSampler(ElasticDistributedSampler):
    """Samples of several datasets in proportion to weights, for a loader over their `ConcatDataset`.

    In every prefix of an epoch, the number of samples from a dataset is within two samples of its share. With two
    datasets, it is within half a sample. An exhausted dataset starts another pass, in a different order. The assignment
    of samples to ranks is random, so no rank systematically gets more samples of a dataset than the others.

    Args:
        datasets: a `ConcatDataset`, or a list of its datasets in the same order.
        weights: one for each dataset. For a curriculum: {epoch: weights from that epoch on}, or a function that returns
            an epoch's weights. A state holds the weights of its epoch, so the function is called only once for each
            epoch.
        num_samples: number of samples in an epoch, over all ranks; None: the total length of the datasets.
        continuous: if true, each dataset continues after the last sample that the previous epoch took from it. No
            sample of a dataset is then seen much less often than the others. If false, each epoch starts all datasets
            from the beginning.
        num_replicas, rank, shuffle, seed, drop_last, tail, global_batch_size: as for `ElasticDistributedSampler`.

    Raises:
        InputError: the weights do not fit the datasets, or a dataset without samples has a weight.
    """

    def __init__(
        self,
        datasets: ConcatDataset[Any] | Sequence[Sized],
        weights: Weights,
        num_samples: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        continuous: bool = False,
        tail: Tail | None = None,
        global_batch_size: int | None = None,
    ) -> None:
        self.datasets = datasets
        parts: Any = getattr(datasets, "datasets", datasets)
        self._lengths = [len(part) for part in parts]
        samples = sum(self._lengths) if num_samples is None else num_samples
        super().__init__(
            range(samples), num_replicas, rank, shuffle, seed, drop_last, tail=tail,
            global_batch_size=global_batch_size,
        )  # fmt: skip
        self.weights = weights
        self.continuous = continuous
        self._offsets = [sum(self._lengths[:part]) for part in range(len(self._lengths))]
        self._known: dict[int, tuple[float, ...]] = {}
        """Weights by epoch."""
        self._drawn = 0, [0] * len(self._lengths)
        """An epoch, and the number of samples of each dataset that were drawn before that epoch."""
        self.weights_of(0)

    def weights_of(self, epoch: int) -> tuple[float, ...]:
        """Returns the weights of an epoch, one for each dataset."""
        if epoch not in self._known:
            self._known[epoch] = self._checked(self._given(epoch), epoch)
        return self._known[epoch]

    def order(self, epoch: int) -> Order:
        shares, drawn = Shares(self.weights_of(epoch)), self._drawn_before(epoch)

        def mix(positions: I64) -> I64:
            found = np.empty_like(positions)
            for part, which, numbers in shares.split(positions):
                found[which] = self._of_part(part, numbers + drawn[part], epoch)
            return found

        return mix

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "lengths": list(self._lengths), "continuous": self.continuous}

    def details(self, place: OrderPlace) -> dict[str, Any]:
        return {"weights": list(self.weights_of(place.epoch)), "drawn": list(self._drawn_before(place.epoch))}

    def read_details(self, place: OrderPlace, state: Mapping[str, Any]) -> None:
        weights = self._checked(state["weights"], place.epoch)
        drawn = [operator.index(count) for count in state["drawn"]]
        if not callable(self.weights) and weights != self.weights_of(place.epoch):
            raise InputError(
                f"the weights of epoch {place.epoch} are {list(self.weights_of(place.epoch))} here and "
                f"{list(weights)} in the state, so its position is meaningless: use the earlier weights, "
                "or begin a new epoch"
            )
        self._known[place.epoch] = weights
        if self.continuous:
            self._drawn = place.epoch, drawn

    def _own(self, turns: I64, epoch: int) -> I64:
        # The datasets alternate regularly. If ranks did too, each of two ranks might get only one of two datasets.
        key = make_keys(1, self.seed, epoch, _OF_TURNS)[0]
        first = hash_below(turns.astype(np.uint64), key, np.uint64(self.num_replicas)).view(np.int64)
        return turns + (first + self.rank) % self.num_replicas

    def _of_part(self, part: int, numbers: I64, epoch: int) -> I64:
        """Returns the indices of samples of dataset `part` in the concatenated dataset. `numbers` are the samples'
        numbers, counted across all passes over that dataset."""
        length = self._lengths[part]
        passes = numbers // length
        found = numbers - passes * length
        if self.shuffle:
            for number in np.unique(passes).tolist():
                mine = passes == number
                stream = (number,) if self.continuous else (number, epoch)
                found[mine] = _permutation(length, self.seed, part, *stream)(found[mine])
        found += self._offsets[part]
        return found

    def _drawn_before(self, epoch: int) -> list[int]:
        since, drawn = self._drawn if self._drawn[0] <= epoch else (0, [0] * len(self._lengths))
        if not self.continuous or since == epoch:
            return drawn
        for earlier in range(since, epoch):
            counts = Shares(self.weights_of(earlier)).counts(self._samples)
            drawn = list(map(operator.add, drawn, counts))
        self._drawn = epoch, drawn
        return drawn

    def _given(self, epoch: int) -> Sequence[float]:
        if callable(self.weights):
            return self.weights(epoch)
        if isinstance(self.weights, Mapping):
            begun = [first for first in self.weights if first <= epoch]
            if not begun:
                raise InputError(
                    f"epoch {epoch} has no weights, because those given apply from epochs "
                    f"{sorted(self.weights)} on: give weights from epoch 0 on"
                )
            return self.weights[max(begun)]
        return self.weights

    def _checked(self, weights: Sequence[float], epoch: int) -> tuple[float, ...]:
        values = check_weights(weights).tolist()
        if len(values) != len(self._lengths):
            raise InputError(
                f"epoch {epoch} must have a weight for each of {len(self._lengths)} datasets, but has "
                f"{values}"
            )
        empty = [part for part, weight in enumerate(values) if weight and not self._lengths[part]]
        if empty:
            raise InputError(f"datasets {empty} have no samples, but weights above 0: give them weight 0")
        return tuple(values)
