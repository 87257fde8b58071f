"""The relay for `stage=`: it passes samples that slots have read to a feeder, which makes a batch of them.

The reader's stream delivers the samples that the slots have read. Each of its batches becomes, unopened, a ticket of a
second stream, whose batches next() returns. If the second stream loses a batch, any feeder can rebuild it, and no slot
reads its samples again. A state counts only the batches that were returned, although slots read ahead of them.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from dataloaderjob.core import ticket_codec
from dataloaderjob.core.errors import InputError
from dataloaderjob.trainer.epochs.ahead import AheadTaker
from dataloaderjob.trainer.epochs.plans import SlotAnswer
from dataloaderjob.trainer.epochs.reading import SlotBatches
from dataloaderjob.trainer.session.client import Client
from dataloaderjob.trainer.session.slot_places import SlotPlace
from dataloaderjob.trainer.session.taking import Taker

MOST_READ_NBYTES = 48 << 20
"""Maximum size of one batch's samples, in bytes. A ticket carries them, and a message has at most 64 MiB."""
MOST_WAITING_NBYTES = 512 << 20
"""Reading pauses while this number of bytes waits to be returned, in this process and in its sidecar."""


class Read(NamedTuple):
    """A batch that a slot has read and that has not been returned yet."""

    packed: bytes
    """The slot's ticket."""
    mark: Any
    """The position after this batch, for states."""
    nbytes: int = 0
    error: Exception | None = None
    """The error in place of the batch, if any. The batch is then not requested from a feeder."""


class Relay:
    """The second stream of an epoch."""

    __slots__ = ("_batches", "_client", "_draws", "_handled", "_waiting_nbytes", "line", "taker")

    def __init__(self, client: Client, taker: Taker | AheadTaker, batches: SlotBatches, draws: int) -> None:
        """`batches` has the stage's seed. `draws` is the draw number for generators that the dataset holds."""
        self._client, self.taker, self._batches, self._draws = client, taker, batches, draws
        self._waiting_nbytes = 0
        self.line: deque[Read] = deque()
        """Batches that were read but not yet returned."""
        self._handled = 0
        """Number of the second stream's batches that have left the line."""

    @property
    def has_lost(self) -> bool:
        """True if a batch was taken from the stream but is still in line."""
        return self.taker.taken != self._handled

    @property
    def has_room(self) -> bool:
        """True if more may be read."""
        return not self.line or self._waiting_nbytes < MOST_WAITING_NBYTES

    def hand_on(self, read: SlotAnswer, mark: Any) -> None:
        """Requests a batch of these samples from any feeder. If an error arrived in place of the samples, only adds the
        error to the line."""
        error = read.error or self._refusal(read.place, len(read.batch))
        if error is not None:
            self.line.append(Read(read.packed, mark, error=error))
            return
        stream, body = self.taker.stream, read.batch
        samples = ticket_codec.ReadSamples(read.place.slot, self._batches.size, body.data)
        packed = ticket_codec.pack_read_samples(
            self._batches.seed, read.place.number, samples, bare=self._batches.bare
        )
        stream.pending[stream.asked] = ticket_codec.with_draws(packed, self._draws) if self._draws else packed
        stream.asked += 1
        self.line.append(Read(read.packed, mark, len(body)))
        self._waiting_nbytes += len(body)
        if stream.asked - stream.sent >= stream.together:
            self._client.flush(stream)

    @staticmethod
    def _refusal(place: SlotPlace, nbytes: int) -> InputError | None:
        """Returns an error if a batch's samples are too large to be passed on."""
        if nbytes <= MOST_READ_NBYTES:
            return None
        mb, most = nbytes / 1e6, MOST_READ_NBYTES / 1e6
        return InputError(
            f"batch {place.number} of slot {place.slot} has {mb:.1f} MB before its stage, but at most {most:.0f} MB "
            "can be passed to another feeder: reduce batch_size, or let the dataset return less (encoded bytes, file "
            "names) and the stage do more"
        )

    def order(self) -> None:
        """Sends the waiting tickets. If a thread takes batches ahead of the trainer, also orders the thread to take
        their batches."""
        self._client.flush(self.taker.stream)
        if type(self.taker) is AheadTaker:
            self.taker.order(self.taker.stream.asked)

    def passes(self) -> None:
        """Removes the first batch from the line, because it is about to be returned."""
        self._waiting_nbytes -= self.line.popleft().nbytes
        recent = self.taker.stream.recent
        recent[(self.taker.taken - 1) % len(recent)] = None  # the samples read are no longer needed
        self._handled = self.taker.taken
