"""Batches that a thread takes ahead of the trainer. The thread takes all batches of its stream and sends each to its
destination, pinned memory or a device. The sampler stays in the trainer's thread."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dataloaderjob.core import errors, frames
from dataloaderjob.trainer.device.transfer import Transfer
from dataloaderjob.trainer.session.stream import RECENT, StreamLeftError
from dataloaderjob.trainer.session.taking import NOTHING, Taker, Timed

LAST_S = 30.0
"""Seconds that threads have to finish when the process exits. A thread may be inside the user's device_stage."""

_live: dict[threading.Thread, tuple[Taker, queue.SimpleQueue[bool]]] = {}
"""Running threads and the takers that they use, including threads whose iterator is gone."""

Result = tuple[int, Any, int, BaseException | None]
"""Number of batches taken so far, the sent batch, its digest, and the error if there is no batch."""


class AheadTaker(Timed):
    """A `Taker` with its own thread that sends batches to their destination."""

    __slots__ = (
        "_ahead", "_arrivals", "_ordered", "_orders", "_results", "_taker", "_timeout_s", "_transfer", "leave",
        "stream",
    )  # fmt: skip

    def __init__(self, taker: Taker, transfer: Transfer, timeout_s: float, ahead: int) -> None:
        """`ahead` is the number of tickets whose batches, if any, are sent before the trainer asks for them."""
        super().__init__(taker.client.control.words, taker.taken)
        self._ahead = ahead
        self._taker = taker
        self._transfer = transfer
        self.stream = taker.stream
        self._timeout_s = timeout_s
        self._ordered = taker.taken
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: deque[Result] = deque()
        self._arrivals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Wakes the trainer; the deque holds the results."""
        self.stream.recent = [None] * (RECENT + ahead)
        self.leave = partial(_leave, taker, self._orders)
        """Makes the thread end soon, together with the stream. Safe in a finalizer."""
        threads, is_single = torch.get_num_threads(), threading.Event()
        # The thread must not refer to this object, or the iterator would never be garbage-collected.
        thread = threading.Thread(
            target=_send_all, name="dlj-ahead", daemon=True,
            args=(taker, transfer, self._orders, self._results, self._arrivals, is_single.set),
        )  # fmt: skip
        _live[thread] = taker, self._orders
        try:
            thread.start()
            is_single.wait()
        except BaseException:
            self.leave()
            if thread.ident is None:
                del _live[thread]
            raise
        finally:
            torch.set_num_threads(threads)  # else this thread's count would apply to all later threads

    def order(self, drawn: int) -> None:
        """Makes the thread take the batches that are due among the `drawn` batches requested so far."""
        target = min(drawn, self.taken + self._ahead)
        while self._ordered < target:
            self._ordered += 1
            self._orders.put(True)

    def take_ready(self) -> Any:
        """Returns the next batch if it was sent, else `NOTHING`."""
        self._taker.client.check()
        return self._accept() if self._results else NOTHING

    def take_later(self) -> Any:
        """Waits for the next batch."""
        self.order(self.taken + 1)  # the last order may have brought an error, and no batch
        while not self._results:
            try:
                self._arrivals.get(timeout=self._timeout_s or None)
            except queue.Empty:
                raise errors.DeadlineExceeded(
                    f"DataLoader timed out after {self._timeout_s:g} seconds: batch {self.taken} is not ready "
                    "(the loader's timeout)"
                ) from None
        return self._accept()

    def _accept(self) -> Any:
        """Returns the first result. It is removed only once it counts as taken: a signal handler may raise anywhere,
        and a lost result must be noticed."""
        with contextlib.suppress(queue.Empty):
            self._arrivals.get_nowait()
        taken, sent, digest, error = self._results[0]
        if error is not None and taken == self.taken:  # it was not taken: the next call tries again
            self._ordered -= 1
        self.digest, self.taken = digest, taken
        self._results.popleft()
        if error is None:
            return self._transfer.accept(sent)
        try:
            raise error
        finally:
            del error  # its traceback has this frame, and frames that hold the batch


def _send_all(
    taker: Taker, transfer: Transfer, orders: queue.SimpleQueue[bool], results: deque[Result],
    arrivals: queue.SimpleQueue[bool], is_single: Callable[[], None],
) -> None:  # fmt: skip
    torch.get_num_threads()  # a thread's first query sets its thread count to the process's
    torch.set_num_threads(1)
    is_single()
    is_set_up, which = False, partial(_which, taker)
    while True:
        batch, error, lent = None, None, None
        try:
            if not _next_order(orders, transfer) or taker.stream.left:
                break
            if not is_set_up:
                transfer.begin()
                is_set_up = True
            batch = taker.take_ready()
            if batch is NOTHING:
                batch = taker.take_later()
            lent, taker.lent = taker.lent, None
            batch = transfer.send(batch, taker.digest, which, lent)
        except StreamLeftError:
            break
        except BaseException as exc:
            batch, error = None, exc
        results.append((taker.taken, batch, taker.digest, error))
        arrivals.put(True)
        del batch, error, lent  # else the frame holds them until the next batch arrives
    with contextlib.suppress(Exception):  # the device is lost: the trainer's calls fail, too
        transfer.end()
    taker.leave()
    with contextlib.suppress(Exception):  # another stream's next call raises it again
        taker.client.close_collected()
    del results, transfer, which  # everything they hold must be released before the process may end
    _live.pop(threading.current_thread(), None)


def _leave(taker: Taker, orders: queue.SimpleQueue[bool]) -> None:
    taker.stream.left = True
    orders.put(False)
    taker.client.wake()


def _which(taker: Taker) -> str:
    """Describes the batch that was taken last."""
    number = taker.taken - 1
    recent = taker.stream.recent
    ticket = recent[number % len(recent)]
    if ticket is None:
        return f"batch {number}"
    packed = ticket if isinstance(ticket, bytes) else frames.pack_ticket_of_ints(*ticket)
    keys = frames.describe_keys(packed)
    return (
        keys if keys.startswith("batch ") else f"batch {number}, {keys}"
    )  # batches of a slot have numbers of their own


def _next_order(orders: queue.SimpleQueue[bool], transfer: Transfer) -> bool:
    """Waits for the next order. In the meantime, releases each sent batch as soon as it has arrived."""
    with contextlib.suppress(Exception):  # the device is lost: `send` raises it again
        while (look_again_s := transfer.let_go()) is not None:
            with contextlib.suppress(queue.Empty):
                return orders.get(timeout=look_again_s)
    return orders.get()


@atexit.register
def _end_all() -> None:
    """Ends the threads. A daemon thread that runs torch's code while the interpreter shuts down may abort the
    process."""
    live = dict(_live)
    for taker, orders in live.values():
        with contextlib.suppress(Exception):
            taker.client.dead = taker.client.dead or "this process is exiting"  # no longer wait for a sidecar
            _leave(taker, orders)
    deadline = time.monotonic() + LAST_S
    for thread in live:
        with contextlib.suppress(RuntimeError):  # it was not started
            thread.join(max(0.0, deadline - time.monotonic()))


os.register_at_fork(after_in_child=_live.clear)  # a child has none of the threads
