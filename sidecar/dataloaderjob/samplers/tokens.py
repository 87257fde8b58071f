"""Batches with a token budget. The samples of a batch have similar lengths, and all ranks have the same number of
batches."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dataloaderjob.core.errors import InputError
from dataloaderjob.samplers import lengths as of
from dataloaderjob.samplers.elastic import ElasticSampler, OrderPlace, Tail, fit
from dataloaderjob.samplers.permutation import I64, Permutation


class ElasticTokenBatchSampler(ElasticSampler[list[int]]):
    """A `batch_sampler` that forms batches of variable size, each with at most `max_tokens` tokens.

    The order of an epoch is cut into chunks of `look_ahead` samples. A chunk is sorted by length and packed into
    batches, longest first, and the batches are shuffled. This sequence of batches does not depend on the ranks. Each of
    W ranks takes every W-th batch. A step therefore has W batches with about the same number of tokens, and all ranks
    have the same number of steps. After a checkpoint, a different world size resumes after the batches already
    consumed. Its steps consist of the same batches if all ranks together still take the same number of batches in a
    step.

    The number of batches in an epoch depends on the order. `len()` packs the whole current epoch the first time it is
    called, which takes 0.15 s for a million samples. The `position` of a state counts batches.

    Args:
        lengths: number of tokens in each sample.
        max_tokens: limit for one batch on one rank.
        padded: if true, the tokens of a batch are its longest sample's length times its number of samples. If false,
            they are the sum of its lengths, as for samples that are packed without padding.
        max_batch_size: maximum number of samples in a batch; None: limited only by `max_tokens`.
        look_ahead: number of samples sorted together. A larger number saves padding; a smaller one is closer to a plain
            shuffle.
        num_replicas, rank, shuffle, seed, drop_last, tail: as for `ElasticDistributedSampler`; `tail` applies to the
            last batches of the epoch.

    Raises:
        InputError: `lengths` are invalid, or a sample is longer than `max_tokens`.
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
                f"a batch must have room for the longest sample, number {longest} with "
                f"{self._lengths[longest]} tokens, but max_tokens is {max_tokens}: raise it, or truncate "
                "or drop such samples"
            )
        for name, value in (("look_ahead", look_ahead), ("max_batch_size", max_batch_size)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1 sample, but is {value}")
        self.max_tokens, self.padded, self.max_batch_size = max_tokens, padded, max_batch_size
        self.look_ahead = look_ahead
        self._chunks = -(-self._lengths.size // look_ahead)
        self._digest = of.digest(self._lengths)
        self._starts: tuple[int, list[tuple[int, int]]] = 0, [(0, 0)]
        """An epoch and, for each of its known chunks, (number of the first batch, number of the chunk). With these, a
        state can be resumed without packing all earlier chunks."""
        self._counted: tuple[int, int] | None = None
        """An epoch and its number of batches."""

    def __len__(self) -> int:
        ranks = self.num_replicas
        return (
            fit(
                self._count(self.epoch),
                ranks,
                self.tail,
                what="batches must be a multiple of the number of ranks",
            )
            // ranks
        )

    def identity(self) -> dict[str, Any]:
        own = {
            "lengths": self._digest, "max_tokens": self.max_tokens, "padded": self.padded,
            "max_batch_size": self.max_batch_size, "look_ahead": self.look_ahead,
        }  # fmt: skip
        return {"samples": self._lengths.size, **super().identity(), **own}

    def details(self, place: OrderPlace) -> dict[str, Any]:
        start, chunk = self._chunk_of(place)
        return {"chunk": chunk, "chunk_start": start}

    def read_details(self, place: OrderPlace, state: Mapping[str, Any]) -> None:
        start, chunk = operator.index(state["chunk_start"]), operator.index(state["chunk"])
        if not 0 <= start <= place.position or chunk < 0:
            raise ValueError(f"chunk {chunk} cannot begin at batch {start}")
        self._starts = place.epoch, [(start, chunk)]

    def blocks(self, place: OrderPlace) -> Iterator[list[list[int]]]:
        ranks = self.num_replicas
        if self.tail == "error":
            fit(
                self._count(place.epoch) - place.position,
                ranks,
                self.tail,
                what="remaining batches must be a multiple of the number of ranks",
            )
        start, chunk = self._chunk_of(place)
        if self._starts[0] != place.epoch:
            self._starts = place.epoch, [(start, chunk)]
        waiting: list[list[int]] = []  # batches that do not yet fill a step
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

    def _chunk_of(self, place: OrderPlace) -> tuple[int, int]:
        """Returns (number of the first batch, number of the chunk) for the last known chunk that begins at or before a
        place."""
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
        """Returns the samples of a chunk, longest first."""
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
        """Returns the index at which each batch begins, then the end of the last batch. `indices` are samples in
        descending order of length."""
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
