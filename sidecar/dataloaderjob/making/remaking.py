"""Rebuilding recorded batches in this process, from their bundle, as the feeder or the trainer built them.

A process can load only one bundle (see `load_bundle`), because it takes on the state of the bundle's trainer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from dataloaderjob.batches.digest import batch_digest
from dataloaderjob.batches.encoding import encode
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.consumption import error_mark
from dataloaderjob.core.places import IN_FEEDER_VARIABLE
from dataloaderjob.core.ticket_codec import Ticket, unpack_ticket
from dataloaderjob.making.fetcher import Fetcher, SampleError, identity_of, preserved_generators
from dataloaderjob.making.sessions import begin_session, held_by, introduce
from dataloaderjob.shipping.bundles import UserCode, load_bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Remade:
    """A rebuilt batch, or the error raised in its place."""

    ticket: Ticket
    digest: int
    batch: Any = None
    error: BaseException | None = None


class Remaker:
    """The user's code and data of one bundle, loaded into this process."""

    def __init__(self, bundle: Bundle, store: BlobStore, *, in_process: bool) -> None:
        """Raises the errors of `load_bundle`. `in_process` is true if the trainer's own process made the batches,
        rather than a feeder."""
        os.environ[IN_FEEDER_VARIABLE] = "1"  # a loader inside the dataset must not act as a trainer's loader
        torch.set_num_threads(1)
        self.code: UserCode = load_bundle(bundle, store)
        os.environ[IN_FEEDER_VARIABLE] = "1"
        torch.set_num_threads(1)
        self.bundle = bundle
        self._held = held_by(self.code, bundle.held)
        self._in_process = in_process
        self._begun = False

    def make(self, number: int, payload: bytes, dataset: Any = None) -> Remade:
        """Rebuilds batch `number` of an epoch from `payload`, its packed ticket. `dataset` is a substitute for the
        bundle's dataset."""
        ticket = unpack_ticket(payload)
        if not self._in_process:
            self._as_worker(ticket.base_seed)
        fetcher = Fetcher(self.code.dataset if dataset is None else dataset, self.code.collate_fn, self._held)
        try:
            with preserved_generators():
                batch = fetcher.fetch(number, ticket)
        except SampleError as exc:
            return Remade(ticket=ticket, digest=error_mark(exc.cause), error=exc.cause)
        identity = identity_of(number, ticket)
        digest = batch_digest(batch, identity, allow_pickle=self.bundle.allow_pickle)
        return Remade(ticket=ticket, digest=digest, batch=batch)

    def body(self, remade: Remade) -> bytes:
        """Returns the batch as the bytes that a feeder would send. Raises UnsupportedBatch if the batch cannot be
        sent."""
        return b"".join(encode(remade.batch, allow_pickle=self.bundle.allow_pickle).buffers)

    def _as_worker(self, base_seed: int) -> None:
        about = {"index": 0, "num_workers": self.bundle.workers, "base_seed": base_seed}
        if self._begun:
            introduce(self.code.dataset, **about)
        else:
            begin_session(self.code, **about, held=self._held)
            self._begun = True
