"""Taking the batches of one stream out of the pool, in order.

While leases exceed their limit, batches are copied, and a warning is issued once.
"""

from __future__ import annotations

import sys
import time
import types
import warnings
from typing import Any

import numpy as np

from dataloaderjob.batches.decoding import Body, Decoder, Memory
from dataloaderjob.core import digests, errors, frames, ipc, supervision
from dataloaderjob.core.control import (
    FAILED,
    THERE,
    W_COPIES,
    W_LEASED_NBYTES,
    W_NEXT_CALLS,
    W_READY_CALLS,
    W_STEP_NS,
    W_WAIT_NS,
    W_WANT,
)
from dataloaderjob.making import failures
from dataloaderjob.trainer.session.client import Client
from dataloaderjob.trainer.session.pool import Bytes, Pool
from dataloaderjob.trainer.session.service import say_once
from dataloaderjob.trainer.session.stream import SlotEndedError, SlotGoesOnError, Stream

_U64 = (1 << 64) - 1
MIN_NBYTES = 16 * 1024
"""Smaller batches are cheaper to copy than to warn about."""
_US = "dataloaderjob"
_warned = False
CLAIMED = (
    "a loader in this process uses device=, or did, so a device reads the pool directly; batches of "
    "loaders without device= are copied out of the pool from now on"
)
NOTHING: Any = object()
now_ns = time.perf_counter_ns
METRICS_EVERY = 16
PATIENCE_MS = 50
MODERATION_MS = 2
WAKE_AFTER = 8
WAKE_WITHIN_NS = 1_000_000
"""If several batches, up to WAKE_AFTER, are expected within this time, a waiting trainer wakes once for all of them."""


class Timed:
    """Base class of takers. `take()` reports its times to the sidecar; subclasses define how the next batch arrives."""

    __slots__ = ("_returned_ns", "_words", "digest", "taken")
    stream: Stream

    def __init__(self, words: Any, first: int) -> None:
        self._words = words
        self._returned_ns = 0
        self.taken = first
        """Number of batches taken, including those that failed."""
        self.digest = 0
        """The digest of the batch that was taken last."""

    def take(self) -> Any:
        """Waits for the next batch, and counts it as taken. Raises the batch's error, which counts as taking it."""
        words = self._words
        began = now_ns()
        if self._returned_ns:
            words[W_STEP_NS] += began - self._returned_ns
        try:
            batch = self.take_ready()
            if batch is not NOTHING:
                words[W_READY_CALLS] += 1
                self._returned_ns = began
                return batch
            batch = self.take_later()
        except Exception:
            self._returned_ns = now = now_ns()
            words[W_WAIT_NS] += now - began
            raise
        self._returned_ns = now = now_ns()
        words[W_WAIT_NS] += now - began
        return batch

    def passed(self, waited_ns: int) -> None:
        """Excludes `waited_ns` from the current step's time. The trainer has waited this long since the last batch."""
        if self._returned_ns:
            self._returned_ns += waited_ns

    def take_ready(self) -> Any:
        """Returns the next batch, or `NOTHING` while it is not ready."""
        raise NotImplementedError

    def take_later(self) -> Any:
        """Waits for the next batch."""
        raise NotImplementedError


class Unopened:
    """A stand-in for a decoder: it passes bodies on undecoded."""

    digest = 0

    def plan(self, memory: Memory, at: int, nbytes: int) -> Unopened:
        self.digest = digests.of_body(memoryview(memory)[at : at + nbytes])
        return self

    def batch(self, body: Body) -> Body:
        """Returns the body. Its place in the pool stays lent while anything refers to the body."""
        return body

    decode = batch


class Taker(Timed):
    """A taker of one stream's batches, for one thread at a time."""

    __slots__ = (
        "_control", "_decoder", "_failure", "_hands_out", "_keeps", "_pool", "_timeout_s", "_wake_after", "_window",
        "_woken", "client", "lent", "stream",
    )  # fmt: skip

    def __init__(
        self,
        client: Client,
        manifest: str,
        window: int,
        decoder: Decoder | Unopened,
        timeout_s: float,
        first: int = 0,
        *,
        sends: bool = False,
    ) -> None:
        """`first` is the number of the first batch. With `sends`, batches go to a device, and the user gets no view of
        them."""
        super().__init__(client.control.words, first)
        is_opened = not isinstance(decoder, Unopened)
        self._hands_out, self._keeps = is_opened and not sends, is_opened and sends
        self.lent: Bytes | None = None
        """The batch that was taken last, as bytes of the pool. They must be held until a device has read them."""
        self.client = client
        self._control = client.control.twin()
        self._pool = client.pool
        self._decoder = decoder
        self._window = window
        self._timeout_s = timeout_s
        self._woken = first, 0
        """(number, time) of the last batch that was waited for."""
        self._wake_after = 1
        self._failure = 0
        """The `id` of the last error that arrived in place of a batch. The error itself would keep this object
        alive."""
        self.stream = client.open(manifest, window, first)

    def set_timeout(self, timeout_s: float) -> None:
        """Sets the timeout. With 0, the job's deadline for a batch applies."""
        self._timeout_s = timeout_s

    def take_later(self) -> Any:
        """Sleeps until the next batch is ready.

        If batches arrive every few hundred µs, the trainer wakes once for several of them. A wake-up costs more than
        taking a batch, and further batches are taken with warm caches.
        """
        client, control, stream, number, after = self.client, self._control, self.stream, self.taken, 1
        began = now_ns()
        if self._wake_after > 1 and control.ready(stream.id, number + 1) is None:
            after = max(1, min(self._wake_after, stream.sent - number))
        if self._words[W_WANT]:  # the pool is full: the receiver must know which batch is waited for
            client.flush(stream, waiting=True)
        # Most batches arrive soon. Until then, held-back tickets are not sent, and the wait is not reported.
        woken = client.sleep(stream, number, control, PATIENCE_MS if after == 1 else MODERATION_MS, after)
        batch = self.take_ready()
        if batch is NOTHING:
            if woken or after > 1:  # an earlier event woke it, or batches are missing
                client.sleep(stream, number, control, PATIENCE_MS)
            while (batch := self.take_ready()) is NOTHING:
                client.wait(stream, number, control, self._timeout_s)
        now = now_ns()
        if now - began < 4 * WAKE_WITHIN_NS:
            self._pace_wakes(number, now)
        else:
            self._wake_after = 1
        return batch

    def _pace_wakes(self, number: int, now: int) -> None:
        """Decides how many batches must arrive before the next wake-up. Batch `number` was waited for until `now`."""
        before, then = self._woken
        self._woken = number, now
        count, elapsed = number - before, now - then
        if 2 * elapsed > WAKE_WITHIN_NS * count:
            self._wake_after = 1
        else:
            self._wake_after = max(1, min(WAKE_AFTER, self._window // 3, WAKE_WITHIN_NS * count // elapsed))

    def take_ready(self) -> Any:
        """Returns the next batch, counted as taken, or `NOTHING`. Raises the batch's error, which counts as taking
        it."""
        client, stream, number = self.client, self.stream, self.taken
        with client.lock:  # another thread may be reporting to a new sidecar
            if client.dead is not None:
                client.check()
            found = self._control.find(stream.id, number)
            if found is None:
                return NOTHING
            lease, entry = found
            if lease == FAILED:
                if number not in stream.failures:
                    return NOTHING  # the data that it needs arrives over the socket
            elif entry is not None and entry[2] not in self._pool.regions:
                return NOTHING
            words, pool = self._words, self._pool
            # From here on, the batch counts as taken in any case: its place is given back.
            self.taken = stream.awaited = number + 1
            try:
                stream.recent[number % len(stream.recent)] = stream.pending.pop(number, None)
                if entry is None:
                    failed = SlotGoesOnError() if lease == THERE else failure_of(stream.failures.pop(number))
                    self._failure = id(failed)
                    words[W_NEXT_CALLS] += not isinstance(failed, (SlotEndedError, SlotGoesOnError))
                    try:
                        raise failed
                    finally:
                        del failed  # its traceback has this frame
                words[W_NEXT_CALLS] += 1
                region = pool.regions[entry[2]]
                plan = self._decoder.plan(region.map, entry[3], entry[4])
                self.digest = self._decoder.digest
                lent = pool.lend(lease, region, entry, is_out=self._hands_out)
            except BaseException:
                if entry is not None:
                    pool.give_back(lease)
                raise
            if number % METRICS_EVERY == 0:
                words[W_LEASED_NBYTES] = pool.leased_nbytes
            is_devices = self._hands_out and region.map.is_claimed
            if is_devices or (len(pool.leases) > pool.surely and pool.over_limit):
                pool.copies += 1
                words[W_COPIES], words[W_LEASED_NBYTES] = pool.copies, pool.leased_nbytes
                if is_devices:
                    say_once(CLAIMED, "claimed")
                else:
                    warn_once(pool)
                return self._decoder.decode(np.array(lent))
            if self._keeps:
                self.lent = lent
            return plan.batch(lent)

    def take_into(self, hand: list[Any], count: int) -> None:
        """Appends the missing parts of a batch of `count` parts to `hand`. For a failed part, appends its error.

        The parts are counted and timed as one batch. Errors that did not arrive in place of a part are raised, as by
        `take`. After an exception such as a signal handler's, `taken` may count more parts than `hand` has.
        """
        words, began, waited = self._words, now_ns(), False
        if self._returned_ns:
            words[W_STEP_NS] += began - self._returned_ns
        try:
            while len(hand) < count:
                self._failure = 0
                try:
                    part = self.take_ready()
                    if part is NOTHING:
                        waited = True
                        part = self.take_later()
                except Exception as exc:
                    if not self.came(exc):
                        raise
                    part = exc.with_traceback(None)  # its frames would keep this object alive
                hand.append(part)
        finally:
            self._returned_ns = now = now_ns()
            words[W_WAIT_NS] += (now - began) * waited
        words[W_READY_CALLS] += not waited
        self.count_calls(1 - count)

    def came(self, error: Exception) -> bool:
        """Returns True if this is the last error that arrived in place of a batch, rather than one raised in this
        process."""
        return id(error) == self._failure

    def count_calls(self, more: int) -> None:
        """Corrects the number of next() calls. Every ticket taken counts as one."""
        with self.client.lock:  # a thread that pins updates it, too
            self._words[W_NEXT_CALLS] += more

    def leave(self) -> None:
        """Leaves the stream. The client's next call reports this to the receiver."""
        self.client.closed_streams.append((self.stream.id, self.stream.awaited))


def failure_of(packet: ipc.Packet) -> Exception:
    """Returns the exception for a ticket without a batch. The receiver sets the message's type, but a feeder chooses
    the payload of FAILED. Only the type may therefore report that a slot has ended or that the service failed."""
    try:
        if packet.type == ipc.Type.ENDED:
            return SlotEndedError(frames.unpack_end(packet.payload, _U64))
        if packet.type == ipc.Type.GIVEN_UP:
            return supervision.unpack_failure(packet.payload)
        return failures.unpack_failure(packet.payload)
    except errors.RemoteProtocolError as exc:
        return exc


def warn_once(pool: Pool) -> None:
    """Warns about the number of bytes held. The warning refers to the user's line that took the batch."""
    global _warned
    held = len(pool.leases)
    if _warned or (held > 1 and pool.leased_nbytes < held * MIN_NBYTES):
        return
    _warned = True
    mb = pool.leased_nbytes / 1e6
    if held > 1:
        why = f"this process still holds {held} batches ({mb:.1f} MB of the pool)"
        remedy = (
            "Release batches that are no longer needed (in lists, histories, autograd graphs), clone those "
            "that you keep, or, in a job, raise spec.loader.memoryPerProcess"
        )
    else:
        why = f"the shared memory of this sidecar has no room for a pool of batches of {mb:.1f} MB"
        remedy = "Raise spec.loader.memoryPerProcess"
    warnings.warn(f"{why}; further batches are copied out of the pool. {remedy}", stacklevel=_users_level())


def _users_level() -> int:
    """Returns the stack level of the user's line that called next(), as `warnings` counts it from our caller."""
    level = 0
    above: types.FrameType | None = sys._getframe(1)  # noqa: SLF001  warnings has no other way before 3.12
    while above is not None and str(above.f_globals.get("__name__")).partition(".")[0] == _US:
        level, above = level + 1, above.f_back
    return level + 1
