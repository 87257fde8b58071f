"""The iterator whose batches are made in parts, by several feeders, and put together in this process (`parts=`).

A part is a ticket like any other, of some of a batch's keys at their place in the epoch, so that its samples have the
seeds that they have in the whole. Where user code fails in a part, or parts cannot be put together, one feeder is asked
for the whole batch: what it answers, be it an error, is what there would be without parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import _utils

from dataloaderjob.codec.digest import batch_digest
from dataloaderjob.codec.fetcher import identity_of, pickle_keys
from dataloaderjob.core import frames
from dataloaderjob.core.consumption import FOLD, error_mark
from dataloaderjob.core.control import MOST_AHEAD, W_DIGEST, W_NEXT_CALLS
from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.trainer import service
from dataloaderjob.trainer.iterators import ServiceIterator
from dataloaderjob.trainer.merging import NotMergedError, merged
from dataloaderjob.trainer.recording import Recording, recorder
from dataloaderjob.trainer.stream import Stream
from dataloaderjob.trainer.tickets import submit

_U64 = (1 << 64) - 1


class _Asked(NamedTuple):
    """A batch that was asked for."""

    keys: Sequence[Any]
    position: int
    counts: tuple[int, ...]
    """Samples in each of its parts."""


class PartsIterator(ServiceIterator):
    """Batches of which several feeders make a part each."""

    __slots__ = ("_asked", "_hand", "_handled", "_last", "_most_parts")

    def ship(self, loader: Any, begin_session: Any, slow: Callable[[float], None]) -> None:
        self._most_parts = int(loader.parts)
        self._window = max(1, min(self._window, MOST_AHEAD // self._most_parts))
        super().ship(loader, begin_session, slow)

    def _open(self, first: int) -> Stream:  # noqa: ARG002  its tickets are not numbered as batches are
        taker = self._taker = self._new_taker(0, self._window * self._most_parts)
        self._stream = taker.stream
        own = recorder(self._consumption)
        self._recording = None if own is None else Recording(own, self._consumption, self._kept)
        self._asked: deque[_Asked] = deque()
        self._hand: list[Any] = []
        """Parts of the next batch, or the errors that came in their place."""
        self._handled = 0
        """Tickets of the batches that were given."""
        self._last: _Asked | None = None
        return taker.stream

    def _ask_for(self, stream: Stream, keys: Sequence[Any]) -> None:
        samples, position = len(keys), self._position
        parts = max(1, min(self._most_parts, samples))
        ends = list(pairwise(samples * part // parts for part in range(parts + 1)))
        if not isinstance(keys, np.ndarray | torch.Tensor | tuple):
            keys = list(keys)  # it may be the sampler's own
        for at, end in ends:
            submit(stream, self._epoch_seed, position + at, stream.asked, keys[at:end], bare=False)
        self._asked.append(_Asked(keys, position, tuple(end - at for at, end in ends)))
        if self._recording is not None:
            packed = frames.pack_ticket(self._epoch_seed, position, keys, pickle_keys=pickle_keys)
            self._recording.ask(self._drawn, packed)

    def _returned(self) -> tuple[int, int, Any]:
        last = self._last
        if last is None:
            return self._first, self._epoch.first_samples, None
        return self._num_yielded, last.position + len(last.keys), last.keys

    def _next_data(self) -> Any:
        taker = self._taker
        if taker is None or self._stream is None:
            self._finish()
        if self._last is None and not self._hand and self._epoch.late():
            taker = self._begin_late(taker)
        if not self._asked:
            self._end_epoch()
        asked, number = self._asked[0], self._num_yielded
        self._take_parts(taker, asked)
        try:
            batch, digest = self._whole(asked, number)
            batch = self._pinned(batch)
        except _FailedError as failed:
            self._passes(asked, taker.taken)
            self._fail(number, error_mark(failed.cause))
            self._advance(number + 1)
            raise failed.cause from failed.cause.__cause__
        handled, self._handled = taker.taken, -1  # an error from here on ends the iterator
        self._passes(asked, -1)
        self._advance(number + 1)
        consumption, words = self._consumption, self._words
        before = consumption.rolling
        after = (before * FOLD + digest) & _U64
        if self._recording is not None:
            self._recording.give(number, digest, after)
        # No call from here on, so that no signal's handler runs before the batch is given.
        consumption.rolling, self._num_yielded, self._handled = after, number + 1, handled
        words[W_DIGEST] = (words[W_DIGEST] + after - before) & _U64
        return batch

    def _take_parts(self, taker: Any, asked: _Asked) -> None:
        hand = self._hand
        while len(hand) < len(asked.counts):
            number = taker.taken
            try:
                hand.append(taker.take())
            except Exception as exc:
                if taker.taken == number:
                    raise
                hand.append(exc)
            if len(hand) > 1:
                self._client.control.words[W_NEXT_CALLS] -= 1

    def _whole(self, asked: _Asked, number: int) -> tuple[Any, int]:
        """The batch and its digest. Raises _FailedError from what is raised in its place."""
        errors = [part for part in self._hand if isinstance(part, Exception)]
        for error in errors:
            if isinstance(error, DataLoaderJobError):  # the whole would end another process, or take as long
                raise _FailedError(error) from error
        if not errors:
            try:
                batch = merged(self._hand, asked.counts)
            except NotMergedError as exc:
                self._most_parts = 1
                service.say_once(
                    f"batches cannot be put together of parts ({exc}): one feeder makes each, as without parts="
                )
            else:
                ticket = frames.Ticket(self._epoch_seed, asked.position, False, asked.keys)
                identity = identity_of(number, ticket)
                return batch, batch_digest(batch, identity, allow_pickle=self._pickle_allowed)
        taker = self._new_taker(number, 1)
        try:
            submit(taker.stream, self._epoch_seed, asked.position, number, asked.keys, bare=False)
            self._client.flush(taker.stream)
            batch = taker.take()
        except Exception as exc:
            if taker.taken == number:
                raise
            raise _FailedError(exc) from exc
        finally:
            self._client.control.words[W_NEXT_CALLS] -= taker.taken - number
            taker.leave()
            self._client.close_collected()
        return batch, taker.digest

    def _pinned(self, batch: Any) -> Any:
        if not self._pin_memory:
            return batch
        try:
            return _utils.pin_memory.pin_memory(batch, self._pin_memory_device)  # type: ignore[no-untyped-call]
        except Exception as exc:
            raise _FailedError(exc) from exc

    def _passes(self, asked: _Asked, handled: int) -> None:
        """The batch, or its error, is about to be given."""
        self._asked.popleft()
        self._hand, self._last, self._handled = [], asked, handled

    def _has_lost(self) -> bool:
        taker = self._taker
        return (
            self._stream is not None and taker is not None and taker.taken != self._handled + len(self._hand)
        )


class _FailedError(Exception):
    """Internal: what is raised in place of a batch."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause
