"""The iterator of a map-style DataLoader over the service.

It runs the user's own sampler one window ahead, as torch's iterator with workers does. It draws `window` index lists in
`iter()`, then one more in each `next()`. `next()` is optimized so that little code runs between two batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from dataloaderjob.core import ticket_codec
from dataloaderjob.core.consumption import FOLD, error_mark
from dataloaderjob.core.control import W_DIGEST
from dataloaderjob.core.records import NO_BUNDLE, RowKind
from dataloaderjob.trainer.epochs.ahead import AheadTaker
from dataloaderjob.trainer.epochs.service_iterator import ServiceIterator
from dataloaderjob.trainer.epochs.source import EpochSource
from dataloaderjob.trainer.resume.recording import recorder
from dataloaderjob.trainer.session.spec import EpochSpec
from dataloaderjob.trainer.session.stream import Stream
from dataloaderjob.trainer.session.taking import Taker
from dataloaderjob.trainer.session.tickets import as_keys, submit

_U64 = (1 << 64) - 1


class SampledIterator(ServiceIterator):
    """An iterator that requests one batch, with one ticket, for each list of keys that a sampler yields."""

    __slots__ = ("_exhausted", "_sampler_error")

    def ship(self, loader: EpochSource, spec: EpochSpec) -> None:
        made, store = self._packed(spec)
        number, epoch = loader.begin_session()
        self._bundle = replace(made, loader=number, epoch=epoch, workers=int(spec.num_workers))
        own = recorder(self._consumption)
        self._kept = NO_BUNDLE if own is None else own.keep(self._bundle, store)

    def start(self, *, again: bool = False) -> None:
        """Requests the first batches of an epoch. With `again`, calls iter() on the sampler a second time, as torch's
        loader does once it has workers. Some samplers compute their order in that call."""
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

    def _begin_late(self, before: Taker | AheadTaker) -> Taker | AheadTaker:
        """Draws again, because the epoch was set after iter(). No batch has been returned yet. Returns the taker of the
        new stream."""
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
        first, samples = ticket_codec.positions_of(ticket)
        return batches, first + samples, ticket_codec.ints_of(ticket)

    def _draw(self) -> None:
        """Advances the sampler until it is one window ahead of the batches taken."""
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
            except Exception as exc:  # raised when its turn comes, so that no batch already drawn is lost
                self._exhausted, self._sampler_error = True, exc
                break
            try:
                keys = given if type(given) is list and not self._bare else as_keys(given, bare=self._bare)
                self._ask_for(stream, keys)
            except Exception as exc:  # wrong keys count as an error of the sampler
                self._exhausted, self._sampler_error = True, exc
                break
            self._drawn, self._position = self._drawn + 1, self._position + len(keys)
            if stream.asked - stream.sent >= stream.together:
                self._client.flush(stream)
        taker = self._taker
        if type(taker) is AheadTaker:
            taker.order(self._drawn)

    def _ask_for(self, stream: Stream, keys: Any) -> None:
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
        # There must be no call below this line, so that no signal handler runs before the batch is returned.
        consumption.rolling, self._num_yielded = after, number + 1
        words[W_DIGEST] = (words[W_DIGEST] + after - before) & _U64
        return batch

    def _has_lost(self) -> bool:
        taker = self._taker
        return self._stream is not None and taker is not None and taker.taken != self._num_yielded

    def _finish(self) -> NoReturn:
        """Raises the sampler's error, if any, else StopIteration."""
        error = getattr(self, "_sampler_error", None)
        if error is not None:
            self._sampler_error = None
            raise error
        super()._finish()
