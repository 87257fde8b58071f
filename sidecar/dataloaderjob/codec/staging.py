"""The part of an IterableDataset's work that any feeder can do, once a slot has read the samples. Neighbour: `fetcher`.

A slot can only be read in order, at one place. What is done to each sample alone, such as to decode it, needs none of
that: with `stage=` the slot gives its samples as they were read, and whoever is free makes the batch of them.

The seeds of a stage follow from the batch's place in its slot, and the sample's in its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, default_collate, default_convert

from dataloaderjob.codec.decoding import Decoder
from dataloaderjob.codec.fetcher import (
    COLLATE,
    OnSample,
    SampleError,
    derive_seed,
    seed_generators,
    stack_in_private_memory,
)
from dataloaderjob.core.frames import ReadSamples, Ticket

STAGE = "stage"
"""The phase of a fetch in which the user's function runs."""
_OF_STAGE = 3
"""Purpose of a seed; 1 and 2 are `fetcher`'s."""
Stage = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Staged:
    """What a loader with a stage sends to feeders as its collate_fn."""

    stage: Stage
    collate_fn: Callable[[Any], Any] | None


def unchanged(samples: Any) -> Any:
    """The collate_fn of the slots."""
    return samples


class StageFetcher:
    """Makes batches of samples that were read."""

    def __init__(self, staged: Staged) -> None:
        self._staged = staged
        self._decoder = Decoder(allow_pickle=True)

    def fetch(self, ticket_no: int, ticket: Ticket, on_sample: OnSample | None = None) -> Any:  # noqa: ARG002
        """Does what `Fetcher.fetch` does; the number of the ticket says nothing of what the batch is."""
        stack_in_private_memory()
        read = ticket.keys
        assert isinstance(read, ReadSamples)  # noqa: S101  what a staged loader asks for
        # A copy, which user code may change, as it may change what a dataset gives.
        samples = self._decoder.decode(np.array(np.frombuffer(read.body, np.uint8)))
        seeds = ticket.base_seed, _OF_STAGE, read.slot, ticket.first_position
        made = []
        for position, sample in enumerate([samples] if ticket.bare else samples):
            if on_sample is not None:
                on_sample(position)
            seed_generators(derive_seed(*seeds, position))
            try:
                made.append(self._staged.stage(sample))
            except (Exception, SystemExit) as exc:
                raise SampleError(STAGE, exc, position=position) from exc
        seed_generators(derive_seed(*seeds))
        collate = self._staged.collate_fn or (default_convert if ticket.bare else default_collate)
        try:
            return collate(made[0] if ticket.bare else made)
        except (Exception, SystemExit) as exc:
            raise SampleError(COLLATE, exc) from exc


class StagedDataset(IterableDataset[Any]):
    """The dataset with its stage, where one process makes all of a batch."""

    def __init__(self, dataset: IterableDataset[Any], stage: Stage) -> None:
        self._dataset, self._stage = dataset, stage

    def __iter__(self) -> Iterator[Any]:
        return map(self._stage, self._dataset)

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # where there is none, torch expects the TypeError
