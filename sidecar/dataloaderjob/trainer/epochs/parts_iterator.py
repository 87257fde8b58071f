"""The iterator for `parts=`: several feeders make parts of each batch, and this process merges them.

Each part has its own ticket. `parts_plan` makes the decisions.
"""

from __future__ import annotations

import contextlib
from typing import Any

from dataloaderjob.batches.digest import batch_digest
from dataloaderjob.core import ticket_codec
from dataloaderjob.core.consumption import error_mark
from dataloaderjob.core.records import RowKind
from dataloaderjob.making.fetcher import identity_of, pickle_keys
from dataloaderjob.trainer.epochs.parts_plan import PartedBatch, PartsPlan, VerdictKind
from dataloaderjob.trainer.epochs.sampled_iterator import SampledIterator
from dataloaderjob.trainer.epochs.source import EpochSource
from dataloaderjob.trainer.session import service
from dataloaderjob.trainer.session.pool import Bytes
from dataloaderjob.trainer.session.spec import EpochSpec
from dataloaderjob.trainer.session.stream import Stream
from dataloaderjob.trainer.session.taking import Taker, now_ns
from dataloaderjob.trainer.session.tickets import described, submit


class PartsIterator(SampledIterator):
    """The iterator over batches that several feeders make in parts."""

    __slots__ = ("_hand", "_lent", "_plan", "_transfer")

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._plan = PartsPlan(1)
        self._hand: list[Any] = []
        """Parts of the next batch, or the errors that arrived in their place."""
        super().__init__(*arguments, **more)

    def ship(self, loader: EpochSource, spec: EpochSpec) -> None:
        self._plan = PartsPlan(int(spec.parts or 1))
        self._window = self._plan.window(self._window)
        super().ship(loader, spec)

    def _open(self, first: int, window: int | None = None) -> Stream:  # noqa: ARG002  its tickets are not numbered as batches are
        taker = self._open_taker(0, self._window * self._plan.most)
        self._end_transfer()
        self._transfer = self._new_transfer()
        self._plan, self._hand = PartsPlan(self._plan.most), []
        self._lent: Bytes | None = None
        """The next batch's bytes in the pool, if the batch consists of one part."""
        return taker.stream

    def _ask_for(self, stream: Stream, keys: Any) -> None:
        batch = self._plan.split(keys, self._position)
        for position, part in batch.parts():
            submit(
                stream,
                self._epoch_seed,
                position,
                stream.asked,
                part,
                bare=False,
                batch=self._drawn,
                draws=self._draws,
            )
        self._plan.asks(batch)
        if self._recording is not None:
            packed = ticket_codec.pack_ticket(
                self._epoch_seed, batch.position, batch.keys, pickle_keys=pickle_keys
            )
            self._recording.ask(self._drawn, ticket_codec.with_draws(packed, self._draws))

    def _returned(self) -> tuple[int, int, Any]:
        last = self._plan.last
        if last is None or self._num_yielded == self._first:
            return self._first, self._epoch.first_samples, None
        return self._num_yielded, last.position + len(last.keys), last.keys

    def _next_data(self) -> Any:
        taker = self._taker
        if type(taker) is not Taker or self._stream is None:
            self._finish()
        if self._plan.last is None and self._epoch.late():
            self._begin_late(taker)
            taker = self._taker
            assert type(taker) is Taker  # noqa: S101  it was reopened
        plan, number = self._plan, self._num_yielded
        asked = plan.next
        if asked is None:
            self._end_epoch()
        taker.take_into(self._hand, len(asked.counts))
        error = None
        try:
            batch, digest = self._whole(taker, asked, number)
            batch = self._moved(batch, digest, asked, number)
        except _FailedError as failed:
            error = failed.cause
        # An exception below this line ends the iterator.
        plan.passes()
        self._hand = []
        handled = taker.taken
        if error is not None:
            self._count(number, error_mark(error), RowKind.FAILED)
            plan.last, plan.handled = asked, handled
            self._advance(number + 1)
            try:
                raise error
            finally:
                del error  # its traceback contains this frame
        self._advance(number + 1)
        self._count(number, digest)
        # There must be no call below this line, so that no signal handler runs before the batch is returned.
        plan.last, plan.handled = asked, handled
        return batch

    def _whole(self, taker: Taker, asked: PartedBatch, number: int) -> tuple[Any, int]:
        """Returns the batch and its digest. Raises _FailedError with the error to raise in place of the batch."""
        verdict = self._plan.judge(self._hand)
        if verdict.note:
            service.say_once(verdict.note)
        if verdict.error is not None:
            raise _FailedError(verdict.error)
        if verdict.kind is VerdictKind.GIVE:
            ticket = ticket_codec.Ticket(self._epoch_seed, asked.position, False, asked.keys)
            identity = identity_of(number, ticket)
            self._lent, taker.lent = taker.lent, None
            return verdict.batch, batch_digest(verdict.batch, identity, allow_pickle=self._pickle_allowed)
        began = now_ns()
        try:
            return self._made_whole(asked, number)
        finally:
            taker.passed(now_ns() - began)

    def _made_whole(self, asked: PartedBatch, number: int) -> tuple[Any, int]:
        """Requests the whole batch from one feeder. Returns the batch and its digest, or raises _FailedError."""
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

    def _moved(self, batch: Any, digest: int, asked: PartedBatch, number: int) -> Any:
        lent, self._lent = self._lent, None
        if self._transfer is None:
            return batch
        try:
            sent = self._transfer.send(batch, digest, lambda: described(number, asked.keys), lent)
            return self._transfer.accept(sent)
        except Exception as exc:
            raise _FailedError(exc) from None

    def _has_lost(self) -> bool:
        taker = self._taker
        return (
            self._stream is not None
            and taker is not None
            and taker.taken != self._plan.handled + len(self._hand)
        )

    def _leave(self) -> None:
        self._hand = []
        with contextlib.suppress(Exception):  # the device is lost, or a forked child has none
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
