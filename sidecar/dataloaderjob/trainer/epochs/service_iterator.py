"""The base class of iterators that use the service. It handles the bundle, the streams, and the end of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.core import errors
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.consumption import fold
from dataloaderjob.core.control import W_DIGEST
from dataloaderjob.core.records import RowKind
from dataloaderjob.making.held import state_of
from dataloaderjob.shipping.bundles import make_bundle
from dataloaderjob.trainer.device.transfer import Transfer
from dataloaderjob.trainer.epochs.ahead import AheadTaker
from dataloaderjob.trainer.epochs.seeded_iterator import SeededIterator
from dataloaderjob.trainer.epochs.source import EpochSource
from dataloaderjob.trainer.resume.progress import Epoch
from dataloaderjob.trainer.resume.recording import Recording, recorder
from dataloaderjob.trainer.session.client import Client
from dataloaderjob.trainer.session.service import launch_facts, say_once
from dataloaderjob.trainer.session.spec import EpochSpec
from dataloaderjob.trainer.session.stream import Stream
from dataloaderjob.trainer.session.taking import Taker, Unopened

_U64 = (1 << 64) - 1


class ServiceIterator(SeededIterator):
    """Base class of iterators that take batches from the sidecar, in order, as views of the pool. Subclasses request
    the batches."""

    __slots__ = (
        "_bundle", "_client", "_kept", "_pickle_allowed", "_recording", "_stream", "_taken", "_taker", "_window",
        "_words",
    )  # fmt: skip
    _workers: tuple[()] = ()
    """Empty, because this iterator has no workers. Some code inspects torch's workers here."""

    _kept: int
    """The number of the bundle in the recording."""

    def __init__(
        self, loader: EpochSource, spec: EpochSpec, epoch: Epoch, client: Client, window: int
    ) -> None:
        self._client = client
        self._words: Any = client.control.words if spec.consumption.counts else {W_DIGEST: 0}
        self._window = window
        self._bundle: Bundle | None = None
        self._stream: Stream | None = None
        self._taker: Taker | AheadTaker | None = None
        super().__init__(loader, spec, epoch)
        self._pickle_allowed = spec.pickle_allowed

    @property
    def dead(self) -> bool:
        """True if this iterator can return no further batch, in this process or in any other."""
        return self._client.dead is not None

    def ship(self, loader: EpochSource, spec: EpochSpec) -> None:
        """Packs the user's code and data for feeders. Raises InputError if they cannot be packed."""
        raise NotImplementedError

    def start(self, *, again: bool = False) -> None:
        """Requests the first batches of an epoch. With `again`, calls the sampler's iter() once more, as torch's loader
        does."""
        raise NotImplementedError

    def _draw(self) -> None:
        """Requests batches until the requests are one window ahead of the batches taken."""
        raise NotImplementedError

    def _packed(self, spec: EpochSpec) -> tuple[Bundle, BlobStore]:
        """Returns the user's code and data, and the store that holds them. Raises InputError if they cannot be sent to
        feeders."""
        told = self._client.settings
        store = BlobStore(Path(str(told["blobs"])), told.get("scratch"))
        made = make_bundle(
            spec.dataset,
            spec.collate_fn,
            self._init_fn(spec),
            store=store,
            allow_pickle=self._pickle_allowed,
            slow=partial(_say_slow, spec),
        )
        facts = {**made.facts, **launch_facts()}
        return replace(made, held=self._held_by_classes(), facts=facts), store

    def _held_by_classes(self) -> dict[str, int]:
        """Returns the states of generators that a library's class holds, by path. Such generators are not sent with the
        dataset. Each state is a hash below 2**64."""
        return {where: state_of(one) for one, where in self._epoch.holds if where}

    def _init_fn(self, spec: EpochSpec) -> Callable[[int], Any] | None:
        """Returns the function that a process calls before it makes batches: the user's worker_init_fn, if any."""
        return spec.worker_init_fn

    def _open(self, first: int, window: int | None = None) -> Stream:
        """Opens a stream for the shipped bundle. `first` is the number of its first ticket. `window` is the number of
        tickets that may be outstanding, by default the iterator's own window."""
        taker = self._open_taker(first, window or self._window)
        transfer = self._new_transfer()
        if transfer is not None:
            taker.set_timeout(0.0)  # the trainer applies the timeout while it waits for the thread
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
        """Returns how many tickets ahead the sending thread may run."""
        return self._way.ahead

    def _new_transfer(self) -> Transfer | None:
        # A thread holds the transfer, so the transfer must not refer to this iterator.
        client = self._client
        return self._way.transfer(self._epoch_seed, client.claim, client.count_stage)

    def _reset(self, loader: EpochSource, first_iter: bool = False) -> None:
        before = self._taker if self._stream is not None else None
        super()._reset(loader, first_iter)
        self._restart(before)

    def _restart(self, before: Taker | AheadTaker | None) -> None:
        try:
            self.start()  # before the old stream is left, so that feeders keep the code and data
        finally:
            if before is not None:
                before.leave()
                self._client.close_collected()

    def _begin_consumption(self) -> int:
        words, grown = self._words, super()._begin_consumption()
        words[W_DIGEST] = (words[W_DIGEST] + grown) & _U64
        return grown

    def _advance(self, taken: int) -> None:
        """Advances the sampler before a batch is returned, as torch's iterator does."""
        self._taken = taken
        try:  # noqa: SIM105  contextlib.suppress takes ten times as long
            self._draw()
        except errors.ServiceError:
            pass  # the next call raises the error again, when no batch can be lost

    def _count(self, number: int, digest: int, kind: RowKind = RowKind.BATCH) -> None:
        """Counts batch `number`, or the error in its place, as returned. The caller must then return or raise at once,
        without another call."""
        consumption, words = self._consumption, self._words
        before = consumption.rolling
        after = fold(before, digest)
        if self._recording is not None:
            self._recording.give(number, digest, after, kind)
        consumption.rolling, self._num_yielded = after, number + 1
        words[W_DIGEST] = (words[W_DIGEST] + after - before) & _U64

    def _end_epoch(self) -> NoReturn:
        """Ends the epoch. All requested batches were taken, and none is left to request."""
        if self._recording is not None:
            self._recording.end()
        if not self._persistent_workers:
            self._leave()
            self._client.close_collected()
        self._finish()

    def _finish(self) -> NoReturn:
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


def _say_slow(spec: EpochSpec, elapsed_s: float) -> None:
    """Prints a note if packing was slow and the next iterator must pack again."""
    if not spec.persistent_workers:
        say_once(
            f"copying {type(spec.dataset).__name__} for feeders took {elapsed_s:.1f} s, and is done at each "
            "iter(): persistent_workers=True does it once",
            about="copying",
        )
