"""The part of an IterableDataset's work that any feeder can do, once a slot has read the samples. Neighbour: `fetcher`.

A slot can only be read in order, at one place. What is done to each sample alone, such as to decode it, needs none of
that: with `stage=` the slot gives its samples as they were read, and whoever is free makes the batch of them.

The seeds of a stage follow from the batch's place in its slot, and the sample's in its batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.core.frames import ReadSamples, Ticket
from dataloaderjob.making.fetcher import (
    OnSample,
    SampleError,
    derive_seed,
    seed_generators,
    stack_in_private_memory,
)
from dataloaderjob.making.held import NOTHING_HELD, HeldGenerators
from dataloaderjob.making.staged import COLLATE, STAGE, Staged

_OF_STAGE = 3
"""Purpose of a seed; 1 and 2 are `fetcher`'s."""


class StageFetcher:
    """Makes batches of samples that were read."""

    def __init__(self, staged: Staged, held: HeldGenerators = NOTHING_HELD) -> None:
        self._staged = staged
        self.held = held
        self._decoder = Decoder(allow_pickle=True)

    def fetch(self, ticket_no: int, ticket: Ticket, on_sample: OnSample | None = None) -> Any:  # noqa: ARG002
        """Does what `Fetcher.fetch` does; the number of the ticket says nothing of what the batch is."""
        stack_in_private_memory()
        read = ticket.keys
        assert isinstance(read, ReadSamples)  # noqa: S101  what a staged loader asks for
        # A copy, which user code may change, as it may change what a dataset gives.
        samples = self._decoder.decode(np.array(np.frombuffer(read.body, np.uint8)))
        place = _OF_STAGE, read.slot, ticket.first_position
        at = -1

        def before(position: int) -> None:
            nonlocal at
            at = position
            if on_sample is not None and position >= 0:
                on_sample(position)
            here = (*place, position) if position >= 0 else place
            seed_generators(derive_seed(ticket.base_seed, *here))
            if self.held:
                self.held.seed(derive_seed(ticket.draws, *here), ticket.base_seed)

        try:
            return self._staged(samples, before)
        except (Exception, SystemExit) as exc:
            if at < 0:
                raise SampleError(COLLATE, exc) from exc
            raise SampleError(STAGE, exc, position=at) from exc
