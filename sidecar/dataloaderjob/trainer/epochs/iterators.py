"""Iterators of the DataLoader: over the service, and in this process.

The service's iterator runs the user's own sampler a window ahead, as torch's iterator with workers does: `window` index
lists at `iter()`, then one more at each `next()`. The iterator in this process draws on demand, as torch's does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.batches.digest import batch_digests
from dataloaderjob.core import errors, frames
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.consumption import FOLD, Consumption, error_mark, fold
from dataloaderjob.core.control import W_DIGEST
from dataloaderjob.core.records import NO_BUNDLE, RowKind
from dataloaderjob.making.fetcher import Fetcher, SampleError, identity_of, preserved_generators
from dataloaderjob.making.held import NOTHING_HELD, HeldGenerators, state_of
from dataloaderjob.shipping.bundles import make_bundle
from dataloaderjob.trainer.device.transfer import Transfer, Way
from dataloaderjob.trainer.epochs.ahead import AheadTaker
from dataloaderjob.trainer.resume.progress import Epoch, Progress
from dataloaderjob.trainer.resume.recording import Recording, record_here, recorder
from dataloaderjob.trainer.resume.sampling import Recorded, first_keys
from dataloaderjob.trainer.session.client import Client
from dataloaderjob.trainer.session.iterated import Iterated
from dataloaderjob.trainer.session.service import launch_facts
from dataloaderjob.trainer.session.stream import Stream
from dataloaderjob.trainer.session.taking import Taker, Unopened
from dataloaderjob.trainer.session.tickets import as_keys, described, submit

_U64 = (1 << 64) - 1
_is_profiling: Any = vars(torch.autograd)["_profiler_enabled"]


class _Seeded(_BaseDataLoaderIter):
    """The base of both iterators: the seeds of an epoch, and torch's range in a profiler trace.

    Anything that is not an Exception, such as a KeyboardInterrupt, ends an iterator if it occurs within next(), because
    batches in transit may be lost. An Exception that occurs after a batch was taken, such as a signal handler's, also
    ends it. `progress` counts the batches that were returned.

    Slots, here and below, make next() cheaper: beyond 30 attributes CPython looks each attribute up in a dict.
    """

    __slots__ = (
        "_bare", "_broken", "_consumption", "_drawn", "_draws", "_epoch", "_epoch_seed", "_first", "_over", "_position",
        "_way",
    )  # fmt: skip

    def __init__(self, loader: Iterated, epoch: Epoch) -> None:
        # iter(sampler), then the base seed from loader.generator, in torch's order.
        super().__init__(cast("Any", loader))
        self._consumption: Consumption = loader.consumption
        self._bare = not loader._auto_collation  # noqa: SLF001  torch's word for batches made of samples
        self._way: Way = loader.way(pins=self._pin_memory, pin_device=self._pin_memory_device)
        self._begin(epoch, int(self._base_seed) & _U64)

    def _begin(self, epoch: Epoch, base_seed: int) -> None:
        self._epoch = epoch
        self._epoch_seed = epoch.seeded(base_seed)
        self._draws = epoch.draw_number
        self._drawn, self._position = epoch.first_batches, epoch.first_samples
        self._first = self._num_yielded = self._drawn
        """Number of batches of the epoch that were returned before this iterator was made."""
        self._over = False
        self._broken = ""
        """The reason why no further batch will arrive."""
        epoch.follow(self)
        self._begin_consumption()

    def _begin_consumption(self) -> int:
        """Returns the growth of the loader's digest since the last batch."""
        return self._consumption.begin()

    def _reset(self, loader: Iterated, first_iter: bool = False) -> None:
        """Begins a new epoch of the same iterator (`persistent_workers=True`). torch draws no seed here either."""
        epoch = loader.begin_epoch(again=True)
        super()._reset(loader, first_iter)
        self._begin(epoch, epoch.base_seed)

    def progress(self) -> Progress:
        """Returns the progress of the epoch. A batch that failed counts as returned."""
        batches, samples, keys = self._returned()
        source = self._sampler_iter
        sampler = source.after(batches) if type(source) is Recorded else None
        return batches, samples, self._over, first_keys(keys), sampler

    def refresh(self) -> None:
        """Reads arrived messages that belong in a state."""

    def _returned(self) -> tuple[int, int, Any]:
        """Returns the number of batches and of samples returned, and the keys of the last batch."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's state, as of this iterator."""
        return self._epoch.state()

    def __del__(self) -> None:
        epoch = getattr(self, "_epoch", None)
        if epoch is not None:
            try:  # noqa: SIM105  the interpreter, at its end, may have cleared this module's names
                epoch.ended(self, self.progress())
            except Exception:  # noqa: S110  it may be only partly constructed
                pass

    def __next__(self) -> Any:
        if self._broken:
            raise errors.ServiceError(self._broken)
        try:
            if _is_profiling():
                with torch.autograd.profiler.record_function(self._profile_name):
                    return self._next_data()
            return self._next_data()
        except BaseException as exc:
            if isinstance(exc, Exception) and not self._has_lost():
                if isinstance(exc, errors.InputError):  # the message is complete, the frames are internal
                    raise exc.with_traceback(None) from exc.__cause__
                raise
            self._broken = (
                f"{type(exc).__name__} came within next(), which ends an iterator: call iter(loader) for a new epoch, "
                "or resume this one from loader.state_dict()"
            )
            self._leave()
            raise

    def _has_lost(self) -> bool:
        """Returns True if a batch was taken that next() will not return."""
        return False

    def _new_transfer(self) -> Transfer | None:
        """Makes the transfer that sends the batches of one stream to their destination."""
        return self._way.transfer(self._epoch_seed)

    def _leave(self) -> None:
        """Abandons all outstanding requests, without waiting."""


class InProcessIterator(_Seeded):
    """The iterator for `num_workers=0`: the reference that every other mode must equal."""

    __slots__ = ("_fetcher", "_keys_of_last", "_pickle_allowed", "_recording", "_transfer")

    def __init__(self, loader: Iterated, epoch: Epoch, begun: _Seeded | None = None) -> None:
        """`begun` is an iterator that has already drawn from the loader's generators for this epoch."""
        if begun is None:
            super().__init__(loader, epoch)
        else:
            vars(self).update(vars(begun))
            self._bare = not loader._auto_collation  # noqa: SLF001
            self._consumption = loader.consumption
            self._way = loader.way(pins=self._pin_memory, pin_device=self._pin_memory_device)
            self._begin(epoch, int(self._base_seed) & _U64)
        self._fetcher = self._new_fetcher(loader)
        self._keys_of_last: Any = None
        self._place(self._sampler_iter)
        epoch.settle()
        self._pickle_allowed = bool(loader.pickle_allowed)
        self._recording = record_here(loader, self._consumption)
        self._transfer = self._new_transfer()

    def _new_fetcher(self, loader: Iterated) -> Fetcher:
        roots = loader.dataset, loader.collate_fn
        return Fetcher(*roots, HeldGenerators(*roots) if self._epoch.holds else NOTHING_HELD)

    def _place(self, iterator: Any) -> None:
        self._sampler_iter = self._epoch.place(iterator, 0, bare=self._bare)
        self._position = self._epoch.first_samples
        self._epoch.waits()

    def _reset(self, loader: Iterated, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._fetcher = self._new_fetcher(loader)
        self._place(self._sampler_iter)
        self._epoch.settle()
        self._recording = record_here(loader, self._consumption)
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
        ticket = frames.Ticket(self._epoch_seed, self._position, self._bare, keys, self._draws)
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
                self._transfer.follow()  # the batch may have been made on the trainer's stream
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
        # No call from here on, so that no signal handler runs before the batch is given.
        self._consumption.rolling, self._position, self._keys_of_last = rolling, position, keys
        self._drawn += 1
        self._num_yielded += kind is RowKind.BATCH


class ServiceIterator(_Seeded):
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

    def ship(
        self,
        loader: Iterated,
        begin_session: Callable[[], tuple[int, int]],
        slow: Callable[[float], None],
    ) -> None:
        """Packs the user's code and data for feeders. Raises InputError if that is impossible.

        `begin_session` returns the numbers of the loader and of this epoch; it is called once everything is packed.
        `slow` is called with the seconds that packing took, if packing was slow and the next iterator will have to
        repeat it.
        """
        made, store = self._packed(loader, slow)
        number, epoch = begin_session()
        self._bundle = replace(made, loader=number, epoch=epoch, workers=int(loader.num_workers))
        own = recorder(self._consumption)
        self._kept = NO_BUNDLE if own is None else own.keep(self._bundle, store)

    def _packed(self, loader: Iterated, slow: Callable[[float], None]) -> tuple[Bundle, BlobStore]:
        """Returns the user's code and data, and the store that holds them. Raises InputError if they cannot travel."""
        told = self._client.settings
        store = BlobStore(Path(str(told["blobs"])), told.get("scratch"))
        made = make_bundle(
            loader.dataset,
            loader.collate_fn,
            self._init_fn(loader),
            store=store,
            allow_pickle=self._pickle_allowed,
            slow=slow,
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
                self._fail(number, error_mark(exc))
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

    def _fail(self, number: int, mark: int) -> None:
        """Counts batch `number`, which failed, as returned."""
        consumption, words = self._consumption, self._words
        before = consumption.rolling
        after = fold(before, mark)
        if self._recording is not None:
            self._recording.give(number, mark, after, RowKind.FAILED)
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
