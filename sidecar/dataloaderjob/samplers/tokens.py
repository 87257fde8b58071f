"""Batches by their tokens: as many samples as a budget holds, of similar length, and as many batches on all ranks."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dataloaderjob.core.errors import InputError
from dataloaderjob.samplers import lengths as of
from dataloaderjob.samplers.elastic import ElasticSampler, Place, Tail, fit
from dataloaderjob.samplers.permutation import I64, Permutation


class ElasticTokenBatchSampler(ElasticSampler[list[int]]):
    """A `batch_sampler` of batches of different sizes that hold at most `max_tokens`.

    The order of an epoch is cut into chunks of `look_ahead` samples. A chunk is sorted by length, packed into batches
    longest first, and the batches are shuffled. This sequence of batches does not depend on the ranks, of which each
    takes every W-th: so a step has W batches of about the same tokens, all ranks have the same number of steps, and
    another world size goes on behind the batches that are consumed. Its steps have the same batches where W times
    the batches that a rank takes for a step is the same.

    How many batches an epoch has depends on its order: `len()` packs the whole epoch that is set, once, 0.15 s for
    a million samples. The `position` of a state counts batches.

    Args:
        lengths: tokens of each sample.
        max_tokens: of one batch on one rank.
        padded: a batch costs its longest sample times its samples; else, where samples are packed without padding,
            the sum of its lengths.
        max_batch_size: samples of a batch at most; None: as many as the budget holds.
        look_ahead: samples that are sorted together. More save padding, fewer are closer to a plain shuffle.
        num_replicas, rank, shuffle, seed, drop_last, tail: as those of `ElasticDistributedSampler`; the tail is that
            of the last batches of the epoch.

    Raises:
        InputError: lengths that are none, or a sample longer than `max_tokens`.
    """

    def __init__(
        self,
        lengths: of.Lengths,
        max_tokens: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        padded: bool = True,
        max_batch_size: int | None = None,
        look_ahead: int = 8192,
        tail: Tail | None = None,
    ) -> None:
        self.lengths = lengths
        self._lengths = of.check_lengths(lengths)
        super().__init__(
            self._lengths, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last, tail=tail
        )
        longest = int(self._lengths.argmax()) if self._lengths.size else None
        if longest is not None and self._lengths[longest] > max_tokens:
            raise InputError(
                f"a batch must hold the longest sample, number {longest} of {self._lengths[longest]} tokens, found "
                f"max_tokens={max_tokens}: raise it, or cut or leave out such samples"
            )
        for name, value in (("look_ahead", look_ahead), ("max_batch_size", max_batch_size)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be one sample or more, found {value}")
        self.max_tokens, self.padded, self.max_batch_size = max_tokens, padded, max_batch_size
        self.look_ahead = look_ahead
        self._chunks = -(-self._lengths.size // look_ahead)
        self._digest = of.digest(self._lengths)
        self._starts: tuple[int, list[tuple[int, int]]] = 0, [(0, 0)]
        """An epoch, and of its chunks as far as they are known the first batch and the number, so that a state can be
        taken up without packing all chunks before."""
        self._counted: tuple[int, int] | None = None
        """An epoch and its batches."""

    def __len__(self) -> int:
        ranks = self.num_replicas
        return fit(self._count(self.epoch), ranks, self.tail, what="batches over ranks") // ranks

    def identity(self) -> dict[str, Any]:
        own = {
            "lengths": self._digest, "max_tokens": self.max_tokens, "padded": self.padded,
            "max_batch_size": self.max_batch_size, "look_ahead": self.look_ahead,
        }  # fmt: skip
        return {"samples": self._lengths.size, **super().identity(), **own}

    def details(self, place: Place) -> dict[str, Any]:
        start, chunk = self._chunk_of(place)
        return {"chunk": chunk, "chunk_start": start}

    def read_details(self, place: Place, state: Mapping[str, Any]) -> None:
        start, chunk = operator.index(state["chunk_start"]), operator.index(state["chunk"])
        if not 0 <= start <= place.position or chunk < 0:
            raise ValueError(f"chunk {chunk} cannot begin at batch {start}")
        self._starts = place.epoch, [(start, chunk)]

    def blocks(self, place: Place) -> Iterator[list[list[int]]]:
        ranks = self.num_replicas
        if self.tail == "error":
            fit(
                self._count(place.epoch) - place.position,
                ranks,
                self.tail,
                what="batches that are left over ranks",
            )
        start, chunk = self._chunk_of(place)
        if self._starts[0] != place.epoch:
            self._starts = place.epoch, [(start, chunk)]
        waiting: list[list[int]] = []  # batches that do not make a step yet
        skip = place.position - start
        for number in range(chunk, self._chunks):
            made = self._batches(place.epoch, number)
            start += len(made)
            self._note(place.epoch, start, number + 1)
            waiting += made[skip:]
            skip = max(skip - len(made), 0)
            whole = len(waiting) // ranks * ranks
            yield waiting[self.rank : whole : ranks]
            del waiting[:whole]
        if waiting and self.tail == "pad":
            waiting += itertools.islice(itertools.cycle(self._batches(place.epoch, 0)), ranks - len(waiting))
            yield [waiting[self.rank]]

    def _chunk_of(self, place: Place) -> tuple[int, int]:
        """The first batch and the number of the last known chunk that does not begin behind a place."""
        epoch, starts = self._starts
        if epoch != place.epoch or starts[0][0] > place.position:
            return 0, 0
        return starts[bisect.bisect_right(starts, place.position, key=operator.itemgetter(0)) - 1]

    def _note(self, epoch: int, start: int, chunk: int) -> None:
        known, starts = self._starts
        if known == epoch and starts[-1][1] == chunk - 1:
            starts.append((start, chunk))

    def _count(self, epoch: int) -> int:
        if self._counted is None or self._counted[0] != epoch:
            count = sum(len(self._cuts(self._chunk(epoch, chunk))) - 1 for chunk in range(self._chunks))
            self._counted = epoch, count
        return self._counted[1]

    def _chunk(self, epoch: int, number: int) -> I64:
        """The samples of a chunk, longest first."""
        stop = min((number + 1) * self.look_ahead, self._lengths.size)
        indices = np.arange(number * self.look_ahead, stop)
        if self.shuffle:
            indices = Permutation(self._lengths.size, self.seed, epoch)(indices)
        return of.longest_first(indices, self._lengths)

    def _batches(self, epoch: int, number: int) -> list[list[int]]:
        indices = self._chunk(epoch, number)
        samples = indices.tolist()
        made = [samples[first:stop] for first, stop in itertools.pairwise(self._cuts(indices))]
        if self.shuffle:
            made = [made[i] for i in of.shuffled(len(made), self.seed, epoch, number)]
        return made

    def _cuts(self, indices: I64) -> list[int]:
        """Where batches begin among samples of falling length, and where the last one ends."""
        lengths = self._lengths[indices]
        sums = np.cumsum(lengths)
        cuts = [0]
        while cuts[-1] < indices.size:
            first = cuts[-1]
            if self.padded:
                size = self.max_tokens // max(int(lengths[first]), 1)
            else:
                before = int(sums[first] - lengths[first])
                size = int(np.searchsorted(sums, before + self.max_tokens, side="right")) - first
            size = min(size, self.max_batch_size or size)
            cuts.append(min(first + max(size, 1), indices.size))
        return cuts
