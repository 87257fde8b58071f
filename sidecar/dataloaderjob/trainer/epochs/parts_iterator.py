"""The iterator for `parts=`: several feeders make parts of each batch, and this process merges them.

A part is a ticket like any other. It contains some of a batch's keys at their place in the epoch, so its samples have
the same seeds as in the whole batch. If user code fails in a part, or parts cannot be merged, one feeder is asked for
the whole batch. Its answer, even an error, is the answer that a loader without parts would get.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from dataloaderjob.batches.digest import batch_digest
from dataloaderjob.core import frames
from dataloaderjob.core.consumption import error_mark
from dataloaderjob.core.control import MOST_AHEAD
from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.core.records import RowKind
from dataloaderjob.making.fetcher import identity_of, pickle_keys
from dataloaderjob.trainer.epochs.merging import NotMergedError, merged
from dataloaderjob.trainer.epochs.service_iterator import ServiceIterator
from dataloaderjob.trainer.session import service
from dataloaderjob.trainer.session.iterated import Iterated
from dataloaderjob.trainer.session.pool import Bytes
from dataloaderjob.trainer.session.stream import Stream
from dataloaderjob.trainer.session.taking import Taker, now_ns
from dataloaderjob.trainer.session.tickets import described, submit


class _Asked(NamedTuple):
    """A requested batch."""

    keys: Sequence[Any]
    position: int
    counts: tuple[int, ...]
    """Number of samples in each of its parts."""


class PartsIterator(ServiceIterator):
    """Batches that several feeders make, a part each."""

    __slots__ = ("_asked", "_hand", "_handled", "_last", "_lent", "_most_parts", "_transfer")

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._last: _Asked | None = None
        """The last batch returned."""
        self._hand: list[Any] = []
        """Parts of the next batch, or the errors that arrived in their place."""
        super().__init__(*arguments, **more)

    def ship(self, loader: Iterated) -> None:
        self._most_parts = int(loader.parts or 1)
        self._window = max(1, min(self._window, MOST_AHEAD // self._most_parts))
        super().ship(loader)

    def _open(self, first: int, window: int | None = None) -> Stream:  # noqa: ARG002  its tickets are not numbered as batches are
        taker = self._open_taker(0, self._window * self._most_parts)
        self._end_transfer()
        self._transfer = self._new_transfer()
        self._asked: deque[_Asked] = deque()
        self._hand, self._last = [], None
        self._lent: Bytes | None = None
        """Place of the next batch, if it consists of one part."""
        self._handled = 0
        """Number of tickets used by the batches returned so far."""
        return taker.stream

    def _ask_for(self, stream: Stream, keys: Any) -> None:
        samples, position = len(keys), self._position
        parts = max(1, min(self._most_parts, samples))
        ends = list(pairwise(samples * part // parts for part in range(parts + 1)))
        # They may be the sampler's own object, which it fills again.
        keys = keys.clone() if isinstance(keys, torch.Tensor) else copy.copy(keys)
        if not isinstance(keys, np.ndarray | torch.Tensor | tuple):
            keys = list(keys)
        for at, end in ends:
            submit(
                stream,
                self._epoch_seed,
                position + at,
                stream.asked,
                keys[at:end],
                bare=False,
                batch=self._drawn,
                draws=self._draws,
            )
        self._asked.append(_Asked(keys, position, tuple(end - at for at, end in ends)))
        if self._recording is not None:
            packed = frames.pack_ticket(self._epoch_seed, position, keys, pickle_keys=pickle_keys)
            self._recording.ask(self._drawn, frames.with_draws(packed, self._draws))

    def _returned(self) -> tuple[int, int, Any]:
        last = self._last
        if last is None or self._num_yielded == self._first:
            return self._first, self._epoch.first_samples, None
        return self._num_yielded, last.position + len(last.keys), last.keys

    def _next_data(self) -> Any:
        taker = self._taker
        if type(taker) is not Taker or self._stream is None:
            self._finish()
        if self._last is None and self._epoch.late():
            self._begin_late(taker)
            taker = self._taker
            assert type(taker) is Taker  # noqa: S101  it was reopened
        if not self._asked:
            self._end_epoch()
        asked, number = self._asked[0], self._num_yielded
        taker.take_into(self._hand, len(asked.counts))
        error = None
        try:
            batch, digest = self._whole(taker, asked, number)
            batch = self._moved(batch, digest, asked, number)
        except _FailedError as failed:
            error = failed.cause
        if error is not None:
            handled = self._passes(taker)
            self._count(number, error_mark(error), RowKind.FAILED)
            self._last, self._handled = asked, handled
            self._advance(number + 1)
            try:
                raise error
            finally:
                del error  # its traceback has this frame
        handled = self._passes(taker)
        self._advance(number + 1)
        self._count(number, digest)
        # No call from here on, so that no signal handler runs before the batch is given.
        self._last, self._handled = asked, handled
        return batch

    def _whole(self, taker: Taker, asked: _Asked, number: int) -> tuple[Any, int]:
        """Returns the batch and its digest. Raises _FailedError with the error that is raised in its place."""
        error = next((part for part in self._hand if isinstance(part, Exception)), None)
        if error is not None and (len(self._hand) == 1 or isinstance(error, DataLoaderJobError)):
            raise _FailedError(error)  # the whole batch would end another process, or take just as long
        if error is None:
            try:
                batch = self._hand[0] if len(self._hand) == 1 else merged(self._hand, asked.counts)
            except NotMergedError as exc:
                if exc.is_final:
                    self._most_parts = 1
                    service.say_once(
                        f"batches cannot be put together from parts ({exc}): one feeder makes each, as without parts="
                    )
            else:
                ticket = frames.Ticket(self._epoch_seed, asked.position, False, asked.keys)
                identity = identity_of(number, ticket)
                self._lent, taker.lent = taker.lent, None
                return batch, batch_digest(batch, identity, allow_pickle=self._pickle_allowed)
        began = now_ns()
        try:
            return self._made_whole(asked, number)
        finally:
            taker.passed(now_ns() - began)

    def _made_whole(self, asked: _Asked, number: int) -> tuple[Any, int]:
        """Returns the batch and its digest, made by one feeder. Raises _FailedError."""
        taker = self._new_taker(number, 1)
        try:
            place = self._epoch_seed, asked.position, number
            submit(taker.stream, *place, asked.keys, bare=False, draws=self._draws)
            self._client.flush(taker.stream)
            batch = taker.take()
        except Exception as exc:
            if not taker.came(exc):
                raise
            raise _FailedError(exc.with_traceback(None)) from None
        finally:
            taker.count_calls(number - taker.taken)
            taker.leave()
            self._client.close_collected()
        self._lent, taker.lent = taker.lent, None
        return batch, taker.digest

    def _moved(self, batch: Any, digest: int, asked: _Asked, number: int) -> Any:
        lent, self._lent = self._lent, None
        if self._transfer is None:
            return batch
        try:
            sent = self._transfer.send(batch, digest, lambda: described(number, asked.keys), lent)
            return self._transfer.accept(sent)
        except Exception as exc:
            raise _FailedError(exc) from None

    def _passes(self, taker: Taker) -> int:
        """Notes that the batch, or its error, is about to be returned. Anything raised in the meantime ends the
        iterator. Returns the number of tickets handled once it is returned."""
        self._handled = -1
        self._asked.popleft()
        self._hand = []
        return taker.taken

    def _has_lost(self) -> bool:
        taker = self._taker
        return (
            self._stream is not None and taker is not None and taker.taken != self._handled + len(self._hand)
        )

    def _leave(self) -> None:
        self._hand = []
        with contextlib.suppress(Exception):  # the device is lost, or this is a forked child, which has none
            self._end_transfer()
        super()._leave()

    def _end_transfer(self) -> None:
        if (transfer := getattr(self, "_transfer", None)) is not None:
            transfer.end()


class _FailedError(Exception):
    """Internal: wraps the error that is raised in place of a batch."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause
