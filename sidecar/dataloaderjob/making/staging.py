"""The part of an IterableDataset's work that any feeder can do once a slot has read the samples.

A slot can only be read in order, by one feeder. Work on single samples, such as decoding, has no such limit. With
`stage=`, the slot delivers its samples as they were read, and any free feeder makes the batch from them.

A stage's seeds depend on the batch's position in its slot, and on the sample's position in its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.core.ticket_codec import ReadSamples, Ticket
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
"""The purpose of a stage's seeds. `fetcher` uses 1 and 2."""


class StageFetcher:
    """A builder of batches from samples that a slot has read."""

    def __init__(self, staged: Staged, held: HeldGenerators = NOTHING_HELD) -> None:
        self._staged = staged
        self.held = held
        self.on_collate: Callable[[], None] | None = None
        """Called after the stage has run for all samples of a batch, before collate_fn."""
        self.is_by_sample = True
        self._decoder = Decoder(allow_pickle=True)

    def fetch(self, ticket_no: int, ticket: Ticket, on_sample: OnSample | None = None) -> Any:  # noqa: ARG002
        """Does the same as `Fetcher.fetch`, but the batch does not depend on the ticket's number."""
        stack_in_private_memory()
        read = ticket.keys
        assert isinstance(read, ReadSamples)  # noqa: S101  the keys of a staged loader's tickets
        # Makes a copy, because user code may modify samples in place, as it may modify those of a dataset.
        samples = self._decoder.decode(np.array(np.frombuffer(read.body, np.uint8)))
        place = _OF_STAGE, read.slot, ticket.first_position
        at = -1

        def before(position: int) -> None:
            nonlocal at
            at = position
            if position < 0 and self.on_collate is not None:
                self.on_collate()
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
