"""The iterator of an IterableDataset with `stage=`: slots read the samples, and any feeder makes batches from them.

There are two streams. The reader's stream delivers the samples that the slots have read, in torch's order. Each of its
batches is handed on unopened, as a ticket of the second stream, whose batches next() returns. So any feeder can replace
a batch lost in the second stream, and each slot reads a batch only once. A state counts the batches that were returned;
slots read ahead of it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, NoReturn

import numpy as np

from dataloaderjob.core import frames
from dataloaderjob.core.consumption import error_mark
from dataloaderjob.core.control import W_WAIT_NS
from dataloaderjob.core.errors import InputError, ServiceError
from dataloaderjob.making.fetcher import derive_seed
from dataloaderjob.trainer.epochs.ahead import AheadTaker
from dataloaderjob.trainer.epochs.slot_iterator import SlotIterator
from dataloaderjob.trainer.session import slot_places
from dataloaderjob.trainer.session.slot_places import SlotPlace
from dataloaderjob.trainer.session.stream import SlotEndedError, Stream
from dataloaderjob.trainer.session.taking import NOTHING, Taker, Unopened, now_ns

MOST_READ_NBYTES = 48 << 20
"""Most bytes that the samples of one batch may have: a ticket travels as a message of at most 64 MiB."""
MOST_WAITING_NBYTES = 512 << 20
"""Most bytes that may wait to be returned, in this process and in its sidecar, before reading pauses."""


class Read(NamedTuple):
    """A batch that a slot has read."""

    place: SlotPlace
    packed: bytes
    """The slot's ticket."""
    digest: int | None
    """Digest of the batch when it was read."""
    nbytes: int = 0
    error: Exception | None = None
    """Error in place of the batch; no feeder is asked for this batch."""
    mark: Any = None
    """Position of a state after this batch, as far as the reading side knows it."""


class HandsOn(SlotIterator):
    """Hands on the samples that slots have read, and returns the batches made from them. Subclasses define the
    reading."""

    __slots__ = ()
    _reader: Taker | None
    _line: deque[Read]
    """Batches that were read but not yet returned."""
    _read: int
    """Number of the slots' answers that were taken and counted; -1 while unknown."""
    _seed: int
    _waiting_nbytes: int

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._reader: Taker | None = None
        super().__init__(*arguments, **more)

    def start(self, *, again: bool = False) -> None:  # noqa: ARG002  no sampler is iterated
        before = self._reader
        try:
            self._start_both()
        finally:
            if before is not None:
                before.leave()

    def _start_both(self) -> None:
        """Opens both streams, and makes slots read."""
        raise NotImplementedError

    def _begin_line(self, rank: int) -> None:
        """Empties the line. The stage draws as it would in rank `rank`."""
        self._seed = derive_seed(self._epoch_seed, rank)
        self._line = deque()
        self._read = self._waiting_nbytes = 0

    def _leave(self) -> None:
        if self._reader is not None and self._stream is not None:
            self._reader.leave()
        super()._leave()

    # Reading

    def _ask_more(self) -> None:
        """Asks slots to read, up to one window ahead of the batches returned."""
        raise NotImplementedError

    def _is_left(self) -> bool:
        """Returns True if answers from slots are left to take, now or later."""
        raise NotImplementedError

    def _take_read(self, *, waits: bool = False) -> bool:
        """Takes the next answer from a slot. Returns False if none has arrived."""
        raise NotImplementedError

    def _gives(self, first: Read) -> None:
        """Notes that the batch is about to be returned: from now on a state is positioned after it."""
        raise NotImplementedError

    def _draw(self) -> None:
        """Makes slots read."""
        reader, read = self._reading, self._read
        # An error from here on ends the iterator: it would miss batches that were counted but not requested.
        self._read = -1
        try:
            self._ask_more()
            self._client.flush(reader.stream)
        except ServiceError:  # the next call requests the batches that were counted
            self._read = read
            raise
        self._read = read

    def _sent(self, *, is_all: bool) -> None:
        if is_all:
            self._client.flush(self._reading.stream)
        self._order()

    def _hand_on(self) -> None:
        """Hands on the batches that the slots have read."""
        while self._is_left() and (not self._line or self._waiting_nbytes < MOST_WAITING_NBYTES):
            if not self._take_read():
                break
        self._draw()
        self._order()

    def _order(self) -> None:
        """Sends the waiting tickets, and has the thread, if there is one, take their batches."""
        stream, taker = self._stream, self._taker
        assert stream is not None  # noqa: S101  not over yet
        self._client.flush(stream)
        if type(taker) is AheadTaker:
            taker.order(stream.asked)

    def _submit_read(
        self, place: SlotPlace, packed: bytes, body: np.ndarray[Any, Any], mark: Any = None
    ) -> None:
        """Asks any feeder to make the batch from the samples read."""
        stream: Stream | None = self._stream
        assert stream is not None  # noqa: S101  not over yet
        digest, nbytes = self._reading.digest, len(body)
        if nbytes > MOST_READ_NBYTES:
            mb, most = nbytes / 1e6, MOST_READ_NBYTES / 1e6
            error = InputError(
                f"batch {place.number} of slot {place.slot} has {mb:.1f} MB before its stage, but only {most:.0f} can "
                "be handed to another feeder: make batch_size smaller, or have the dataset give less (encoded bytes, "
                "names of files) and the stage do more"
            )
            self._line.append(Read(place, packed, digest, error=error, mark=mark))
            return
        samples = frames.ReadSamples(place.slot, self._size, body.data)
        read = frames.pack_read_samples(self._seed, place.number, samples, bare=self._bare)
        stream.pending[stream.asked] = frames.with_draws(read, self._draws) if self._draws else read
        stream.asked += 1
        self._line.append(Read(place, packed, digest, nbytes, mark=mark))
        self._waiting_nbytes += nbytes
        if stream.asked - stream.sent >= stream.together:
            self._client.flush(stream)

    def _await_read(self) -> None:
        """Waits for slots to read, and counts the time as trainer wait time."""
        began = now_ns()
        try:
            self._take_read(waits=True)
        finally:
            waited = now_ns() - began
            self._client.control.words[W_WAIT_NS] += waited
            if self._taker is not None:
                self._taker.passed(waited)

    # Giving

    def _next_data(self) -> Any:
        while True:
            taker = self._taker
            if taker is None or self._stream is None:
                self._finish()
            self._hand_on()
            if self._line:
                break
            if not self._is_left():
                self._end_epoch()
            self._await_read()
        if self._line[0].error is not None:
            self._reading.count_calls(1)
            self._give_error(self._line[0].error)
        try:
            batch = taker.take()
        except Exception as exc:
            if taker.taken != self._handled:
                self._give_error(exc)
            raise
        first = self._line[0]
        self._handled = -1  # an error from here on ends the iterator
        self._passes(first)
        self._give(first.packed, taker.digest)
        self._handled = taker.taken
        return batch

    def _give_error(self, error: Exception) -> NoReturn:
        """Raises the error that takes the place of a batch."""
        self._handled = -1
        if self._recording is not None:
            self._recording.ask(self._num_yielded, self._line[0].packed)
        self._passes(self._line[0])
        self._fail(self._num_yielded, error_mark(error))
        assert self._taker is not None  # noqa: S101  not over yet
        self._handled = self._taker.taken
        try:
            raise error
        finally:
            del error  # its traceback has this frame

    def _passes(self, first: Read) -> None:
        """Removes the first batch from the line, because it is about to be returned."""
        assert self._taker is not None  # noqa: S101  not over yet
        self._line.popleft()
        self._waiting_nbytes -= first.nbytes
        recent = self._taker.stream.recent
        recent[(self._taker.taken - 1) % len(recent)] = None  # the samples read are no longer needed
        self._gives(first)

    @property
    def _reading(self) -> Taker:
        assert self._reader is not None  # noqa: S101  since start()
        return self._reader

    def _has_lost(self) -> bool:
        return super()._has_lost() or (self._reader is not None and self._reader.taken != self._read)


class StagedIterator(HandsOn):
    """Batches of this rank's own slots."""

    __slots__ = ("_line", "_read", "_reader", "_seed", "_waiting_nbytes")

    def _start_both(self) -> None:
        stream = self._open(0)
        reader = self._reader = self._new_taker(0, self._window, Unopened())
        self._begin_places(reader.stream)
        self._places.hands_on()
        rank = slot_places.shares().get("RANK", "0")
        self._begin_line(int(rank) if rank.isdecimal() else 0)
        self._draw()
        self._epoch.settle()
        self._client.flush(stream)

    def _ask_more(self) -> None:
        reader = self._reading
        self._ask_slots(reader.stream, reader.taken - len(self._line) + self._window)

    def _is_left(self) -> bool:
        return self._reading.taken < self._drawn

    def _gives(self, first: Read) -> None:
        self._places.took(first.place, first.digest)

    def _take_read(self, *, waits: bool = False) -> bool:
        """Takes the next answer from a slot. Returns False if none has arrived."""
        reader, places = self._reading, self._places
        number, error = reader.taken, None
        body: Any = None
        try:
            body = reader.take_later() if waits else reader.take_ready()
        except SlotEndedError as end:
            place, _ = self._placed.pop(number)
            places.ended(place, end.batches)
            self._read = reader.taken
            return True
        except Exception as exc:
            if reader.taken == number or (self._placed[number][0].is_probe and isinstance(exc, ServiceError)):
                raise
            error = exc.with_traceback(None)
        if body is NOTHING:
            return False
        reader.count_calls(-1)
        place, packed = self._placed.pop(number)
        places.had(place)
        if place.is_probe:
            places.took(place, None if error is not None else reader.digest)
            if error is None:
                self._compare(place, reader.digest)
        elif error is not None:
            self._line.append(Read(place, packed, None, error=error))
        else:
            self._submit_read(place, packed, body)
        self._read = reader.taken
        return True
