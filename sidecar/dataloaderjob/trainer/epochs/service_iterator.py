"""The iterator of a DataLoader over the service.

It runs the user's own sampler a window ahead, as torch's iterator with workers does: `window` index lists at `iter()`,
then one more at each `next()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.core import errors, frames
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.consumption import FOLD, error_mark, fold
from dataloaderjob.core.control import W_DIGEST
from dataloaderjob.core.records import NO_BUNDLE, RowKind
from dataloaderjob.making.held import state_of
from dataloaderjob.shipping.bundles import make_bundle
from dataloaderjob.trainer.device.transfer import Transfer
from dataloaderjob.trainer.epochs.ahead import AheadTaker
from dataloaderjob.trainer.epochs.seeded_iterator import SeededIterator
from dataloaderjob.trainer.resume.progress import Epoch
from dataloaderjob.trainer.resume.recording import Recording, recorder
from dataloaderjob.trainer.session.client import Client
from dataloaderjob.trainer.session.iterated import Iterated
from dataloaderjob.trainer.session.service import launch_facts, say_once
from dataloaderjob.trainer.session.stream import Stream
from dataloaderjob.trainer.session.taking import Taker, Unopened
from dataloaderjob.trainer.session.tickets import as_keys, submit

_U64 = (1 << 64) - 1


class ServiceIterator(SeededIterator):
    """Batches from the sidecar, in order, as views of the pool."""

    __slots__ = (
        "_bundle", "_client", "_exhausted", "_kept", "_pickle_allowed", "_recording", "_sampler_error",
        "_stream", "_taken", "_taker", "_window", "_words",
    )  # fmt: skip
    _workers: tuple[()] = ()
    """Empty, for code that inspects torch's workers: this process has none."""

    def __init__(
        self, loader: Iterated, epoch: Epoch, client: Client, window: int, *, pickle_allowed: bool
    ) -> None:
        self._client = client
        self._words: Any = client.control.words if loader.consumption.counts else {W_DIGEST: 0}
        self._window = window
        self._bundle: Bundle | None = None
        self._stream: Stream | None = None
        self._taker: Taker | AheadTaker | None = None
        super().__init__(loader, epoch)
        self._pickle_allowed = pickle_allowed

    @property
    def dead(self) -> bool:
        """True if this iterator can return no further batch, in this process or in any other."""
        return self._client.dead is not None

    def ship(self, loader: Iterated) -> None:
        """Packs the user's code and data for feeders. Raises InputError if that is impossible."""
        made, store = self._packed(loader)
        number, epoch = loader.begin_session()
        self._bundle = replace(made, loader=number, epoch=epoch, workers=int(loader.num_workers))
        own = recorder(self._consumption)
        self._kept = NO_BUNDLE if own is None else own.keep(self._bundle, store)

    def _packed(self, loader: Iterated) -> tuple[Bundle, BlobStore]:
        """Returns the user's code and data, and the store that holds them. Raises InputError if they cannot travel."""
        told = self._client.settings
        store = BlobStore(Path(str(told["blobs"])), told.get("scratch"))
        made = make_bundle(
            loader.dataset,
            loader.collate_fn,
            self._init_fn(loader),
            store=store,
            allow_pickle=self._pickle_allowed,
            slow=partial(_say_slow, loader),
        )
        facts = {**made.facts, **launch_facts()}
        return replace(made, held=self._held_by_classes(), facts=facts), store

    def _held_by_classes(self) -> dict[str, int]:
        """Returns the states of generators that do not travel with the dataset."""
        return {where: state_of(one) for one, where in self._epoch.holds if where}

    def _init_fn(self, loader: Iterated) -> Callable[[int], Any] | None:
        """Returns the function that a process calls before it makes batches: the user's worker_init_fn, if any."""
        return loader.worker_init_fn

    def start(self, *, again: bool = False) -> None:
        """Asks for the first batches of an epoch. With `again` they are those of the sampler's second iter(), which
        torch's loader makes once it has workers; a sampler may do its work there."""
        stream = self._open(self._first)
        if again:
            self._sampler_iter = iter(self._index_sampler)
        self._sampler_iter = self._epoch.place(self._sampler_iter, self._window, bare=self._bare)
        self._position = self._epoch.first_samples
        self._taken = self._first
        self._exhausted = False
        self._sampler_error: BaseException | None = None
        self._draw()
        self._epoch.settle()
        self._client.flush(stream)

    def _open(self, first: int, window: int | None = None) -> Stream:
        """Opens a stream for the shipped bundle. `first` is the number of its first ticket. `window` is the number of
        tickets that may be outstanding, by default the iterator's own window."""
        taker = self._open_taker(first, window or self._window)
        transfer = self._new_transfer()
        if transfer is not None:
            taker.set_timeout(0.0)  # the trainer, which waits for the thread, applies it
            self._taker = AheadTaker(taker, transfer, float(self._timeout), self._tickets_ahead())
        return taker.stream

    def _open_taker(self, first: int, window: int) -> Taker:
        taker = self._taker = self._new_taker(first, window)
        self._stream = taker.stream
        own = recorder(self._consumption)
        self._recording = None if own is None else Recording(own, self._consumption, self._kept)
        return taker

    def _new_taker(self, first: int, window: int, decoder: Decoder | Unopened | None = None) -> Taker:
        assert self._bundle is not None  # noqa: S101  shipped before
        decoder = decoder or Decoder(allow_pickle=self._pickle_allowed)
        timeout_s = float(self._timeout)
        manifest, sends = self._bundle.manifest().decode(), self._way.device is not None
        return Taker(self._client, manifest, window, decoder, timeout_s, first, sends=sends)

    def _tickets_ahead(self) -> int:
        """Returns the number of tickets that the sending thread may be ahead."""
        return self._way.ahead

    def _new_transfer(self) -> Transfer | None:
        client = self._client  # a thread holds the transfer, which must not refer to this iterator
        return self._way.transfer(self._epoch_seed, client.claim, client.count_stage)

    def _reset(self, loader: Iterated, first_iter: bool = False) -> None:
        before = self._taker if self._stream is not None else None
        super()._reset(loader, first_iter)
        self._restart(before)

    def _restart(self, before: Taker | AheadTaker | None) -> None:
        try:
            self.start()  # first: feeders keep what an open stream uses, as persistent_workers promises
        finally:
            if before is not None:
                before.leave()
                self._client.close_collected()

    def _begin_consumption(self) -> int:
        words, grown = self._words, super()._begin_consumption()
        words[W_DIGEST] = (words[W_DIGEST] + grown) & _U64
        return grown

    def _begin_late(self, before: Taker | AheadTaker) -> Taker | AheadTaker:
        """Draws again, because the epoch was set after iter(). Nothing has been returned yet."""
        self._drawn = self._first
        self._sampler_iter = iter(self._index_sampler)
        self._restart(before)
        return self._taker or before

    def _returned(self) -> tuple[int, int, Any]:
        taker = self._taker
        batches = self._num_yielded
        if taker is None or batches == self._first:
            return self._first, self._epoch.first_samples, None
        recent = taker.stream.recent
        ticket = recent[(batches - 1) % len(recent)]
        if isinstance(ticket, tuple):
            _, position, keys, bare = ticket
            return batches, position + (1 if bare else len(keys)), keys
        assert ticket is not None  # noqa: S101  it was taken
        first, samples = frames.positions_of(ticket)
        return batches, first + samples, frames.ints_of(ticket)

    def _draw(self) -> None:
        """Advances the sampler to one window ahead of the batches taken."""
        target = self._taken + self._window
        stream = self._stream
        assert stream is not None  # noqa: S101  drawn only while a stream is open
        while self._drawn < target and not self._exhausted:
            try:
                given = next(self._sampler_iter)
            except StopIteration:
                self._exhausted = True
                self._client.flush(stream)
                break
            except Exception as exc:  # raised at its turn, so that nothing already drawn is lost
                self._exhausted, self._sampler_error = True, exc
                break
            try:
                keys = given if type(given) is list and not self._bare else as_keys(given, bare=self._bare)
                self._ask_for(stream, keys)
            except Exception as exc:  # invalid keys, or keys that cannot travel: the sampler's error, too
                self._exhausted, self._sampler_error = True, exc
                break
            self._drawn, self._position = self._drawn + 1, self._position + len(keys)
            if stream.asked - stream.sent >= stream.together:
                self._client.flush(stream)
        taker = self._taker
        if type(taker) is AheadTaker:
            taker.order(self._drawn)

    def _ask_for(self, stream: Stream, keys: Any) -> None:
        """Asks for the next batch."""
        place = self._epoch_seed, self._position, self._drawn
        submit(stream, *place, keys, bare=self._bare, draws=self._draws)
        if self._recording is not None:
            self._recording.ask(self._drawn, stream.pending[self._drawn])

    def _next_data(self) -> Any:
        taker = self._taker
        if taker is None or self._stream is None:
            self._finish()
        number = taker.taken
        if number == self._first and self._epoch.late():
            taker = self._begin_late(taker)
        if number >= self._drawn:
            self._end_epoch()
        try:
            batch = taker.take()
        except Exception as exc:
            if taker.taken != number:
                self._count(number, error_mark(exc), RowKind.FAILED)
            self._advance(taker.taken)
            raise
        self._advance(taker.taken)
        consumption, words = self._consumption, self._words
        before = consumption.rolling
        after = (before * FOLD + taker.digest) & _U64
        if self._recording is not None:
            self._recording.give(number, taker.digest, after)
        # No call from here on, so that no signal handler runs before the batch is given.
        consumption.rolling, self._num_yielded = after, number + 1
        words[W_DIGEST] = (words[W_DIGEST] + after - before) & _U64
        return batch

    def _has_lost(self) -> bool:
        taker = self._taker
        return self._stream is not None and taker is not None and taker.taken != self._num_yielded

    def _advance(self, taken: int) -> None:
        """Advances the sampler, before a batch is returned, as torch's iterator does."""
        self._taken = taken
        try:  # noqa: SIM105  contextlib.suppress takes ten times as long
            self._draw()
        except errors.ServiceError:
            pass  # the next call raises it again, when there is no batch to lose

    def _count(self, number: int, digest: int, kind: RowKind = RowKind.BATCH) -> None:
        """Counts batch `number`, or the error in its place, as returned. The caller calls nothing before it returns."""
        consumption, words = self._consumption, self._words
        before = consumption.rolling
        after = fold(before, digest)
        if self._recording is not None:
            self._recording.give(number, digest, after, kind)
        consumption.rolling, self._num_yielded = after, number + 1
        words[W_DIGEST] = (words[W_DIGEST] + after - before) & _U64

    def _end_epoch(self) -> NoReturn:
        """Ends the epoch: everything requested was taken, and nothing is left to request."""
        if self._recording is not None:
            self._recording.end()
        if not self._persistent_workers:
            self._leave()
            self._client.close_collected()
        self._finish()

    def _finish(self) -> NoReturn:
        """Raises the sampler's error, if any, else StopIteration."""
        error = getattr(self, "_sampler_error", None)
        if error is not None:
            self._sampler_error = None
            raise error
        self._over = True
        raise StopIteration

    def _leave(self) -> None:
        taker, stream = getattr(self, "_taker", None), getattr(self, "_stream", None)
        if taker is not None and stream is not None:
            taker.leave()
            self._stream = None

    def __del__(self) -> None:
        super().__del__()
        self._leave()


def _say_slow(loader: Iterated, elapsed_s: float) -> None:
    """Prints a note if the packing was slow and the next iterator will have to repeat it."""
    if not loader.persistent_workers:
        say_once(
            f"copying {type(loader.dataset).__name__} for feeders took {elapsed_s:.1f} s, and is done at each "
            "iter(): persistent_workers=True does it once",
            about="copying",
        )
