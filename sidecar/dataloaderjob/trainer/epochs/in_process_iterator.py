"""The iterator of a DataLoader whose batches are made in this process. It draws keys on demand, as torch's iterator
does."""

from __future__ import annotations

from typing import Any

from dataloaderjob.batches.digest import batch_digests
from dataloaderjob.core import ticket_codec
from dataloaderjob.core.consumption import error_mark, fold
from dataloaderjob.core.records import RowKind
from dataloaderjob.making.fetcher import Fetcher, SampleError, identity_of, preserved_generators
from dataloaderjob.making.held import NOTHING_HELD, HeldGenerators
from dataloaderjob.trainer.epochs.seeded_iterator import SeededIterator
from dataloaderjob.trainer.epochs.source import EpochSource
from dataloaderjob.trainer.resume.progress import Epoch
from dataloaderjob.trainer.resume.recording import record_here
from dataloaderjob.trainer.session.spec import EpochSpec
from dataloaderjob.trainer.session.tickets import as_keys, described

_U64 = (1 << 64) - 1


class InProcessIterator(SeededIterator):
    """The iterator for `num_workers=0`: the reference that every other mode must match."""

    __slots__ = ("_fetcher", "_keys_of_last", "_pickle_allowed", "_recording", "_transfer")

    def __init__(
        self, loader: EpochSource, spec: EpochSpec, epoch: Epoch, begun: SeededIterator | None = None
    ) -> None:
        """`begun` is an iterator that has already drawn from the loader's generators for this epoch."""
        if begun is None:
            super().__init__(loader, spec, epoch)
        else:
            vars(self).update(vars(begun))
            self._bare = spec.bare
            self._consumption = spec.consumption
            self._way = loader.way(pins=self._pin_memory, pin_device=self._pin_memory_device)
            self._begin(epoch, int(self._base_seed) & _U64)
        self._fetcher = self._new_fetcher(spec)
        self._keys_of_last: Any = None
        self._place(self._sampler_iter)
        epoch.settle()
        self._pickle_allowed = spec.pickle_allowed
        self._recording = record_here(spec)
        self._transfer = self._new_transfer()

    def _new_fetcher(self, spec: EpochSpec) -> Fetcher:
        roots = spec.dataset, spec.collate_fn
        return Fetcher(*roots, HeldGenerators(*roots) if self._epoch.holds else NOTHING_HELD)

    def _place(self, iterator: Any) -> None:
        self._sampler_iter = self._epoch.place(iterator, 0, bare=self._bare)
        self._position = self._epoch.first_samples
        self._epoch.waits()

    def _reset(self, loader: EpochSource, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        spec = loader.epoch_spec()
        self._fetcher = self._new_fetcher(spec)
        self._place(self._sampler_iter)
        self._epoch.settle()
        self._recording = record_here(spec)
        self._transfer = self._new_transfer()

    def _returned(self) -> tuple[int, int, Any]:
        return self._drawn, self._position, self._keys_of_last

    def _next_data(self) -> Any:
        if self._drawn == self._first:
            if self._epoch.late():
                self._place(iter(self._index_sampler))
            self._epoch.draws()
        try:
            given = next(self._sampler_iter)
        except StopIteration:
            self._over = True
            if self._recording is not None:
                self._recording.end()
            raise
        keys, number = as_keys(given, bare=self._bare), self._drawn
        ticket = ticket_codec.Ticket(self._epoch_seed, self._position, self._bare, keys, self._draws)
        if self._recording is not None:
            self._recording.ask_here(number, ticket)
        try:
            with preserved_generators(), self._fetcher.held.preserved():
                batch = self._fetcher.fetch(number, ticket)
        except SampleError as exc:
            self._count(keys, error_mark(exc.cause), RowKind.FAILED)
            raise exc.cause from exc.cause.__cause__
        try:
            identity = identity_of(number, ticket)
            digest, name = batch_digests(batch, identity, allow_pickle=self._pickle_allowed)
            if self._transfer is not None:
                self._transfer.follow()  # work for the batch may be queued on the trainer's stream
                sent = self._transfer.send(batch, name, lambda: described(number, keys))
                batch = self._transfer.accept(sent)
        except Exception as exc:
            self._count(keys, error_mark(exc), RowKind.FAILED)
            raise
        self._count(keys, digest, RowKind.BATCH)
        return batch

    def _count(self, keys: Any, digest: int, kind: RowKind) -> None:
        position, rolling = self._position + len(keys), fold(self._consumption.rolling, digest)
        if self._recording is not None:
            self._recording.give(self._drawn, digest, rolling, kind)
        # There must be no call below this line, so that no signal handler runs before the batch is returned.
        self._consumption.rolling, self._position, self._keys_of_last = rolling, position, keys
        self._drawn += 1
        self._num_yielded += kind is RowKind.BATCH
