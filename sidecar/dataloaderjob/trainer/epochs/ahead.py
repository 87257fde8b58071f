"""A thread that takes batches ahead of the trainer. It takes all batches of its stream and sends each one to its
destination, which is pinned memory or a device. The sampler runs in the trainer's thread."""

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

from dataloaderjob.core import errors, ticket_codec
from dataloaderjob.trainer.device.transfer import Transfer
from dataloaderjob.trainer.session.stream import RECENT, StreamLeftError
from dataloaderjob.trainer.session.taking import NOTHING, Taker, Timed

LAST_S = 30.0
"""Seconds that the threads have to finish when the process exits. A thread may be running the user's device_stage."""

_live: dict[threading.Thread, tuple[Taker, queue.SimpleQueue[bool]]] = {}
"""Running threads, with their takers and queues of orders. Includes the threads of iterators that no longer exist."""

Result = tuple[int, Any, int, BaseException | None]
"""(number of batches taken so far, the batch as returned by `send`, its digest, the error in place of the batch or
None)."""


class AheadTaker(Timed):
    """A `Taker` with its own thread that sends batches to their destination."""

    __slots__ = (
        "_ahead", "_arrivals", "_ordered", "_orders", "_results", "_taker", "_timeout_s", "_transfer", "leave",
        "stream",
    )  # fmt: skip

    def __init__(self, taker: Taker, transfer: Transfer, timeout_s: float, ahead: int) -> None:
        """`ahead` is the number of tickets whose batches are sent before the trainer asks for them."""
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
        """Wakes the trainer. The results themselves are in the deque."""
        self.stream.recent = [None] * (RECENT + ahead)
        self.leave = partial(_leave, taker, self._orders)
        """A function that ends the stream, and makes the thread end soon. It is safe to call in a finalizer."""
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
            torch.set_num_threads(threads)  # otherwise later threads would start with 1

    def order(self, drawn: int) -> None:
        """Makes the thread take up to `ahead` batches more than the trainer has taken. `drawn` is the number of batches
        requested so far."""
        target = min(drawn, self.taken + self._ahead)
        while self._ordered < target:
            self._ordered += 1
            self._orders.put(True)

    def take_ready(self) -> Any:
        """Returns the next batch if the thread has sent it, else `NOTHING`."""
        self._taker.client.check()
        return self._accept() if self._results else NOTHING

    def take_later(self) -> Any:
        """Waits for the next batch and returns it."""
        self.order(self.taken + 1)  # the last order may have produced an error instead of a batch
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
        """Returns the batch of the first result, or raises its error. The result stays in the deque until it counts as
        taken, because a signal handler may raise at any point."""
        with contextlib.suppress(queue.Empty):
            self._arrivals.get_nowait()
        taken, sent, digest, error = self._results[0]
        if error is not None and taken == self.taken:  # no batch was taken: the next call tries again
            self._ordered -= 1
        self.digest, self.taken = digest, taken
        self._results.popleft()
        if error is None:
            return self._transfer.accept(sent)
        try:
            raise error
        finally:
            del error  # its traceback contains this frame, and frames that hold the batch


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
        del batch, error, lent  # otherwise the frame would hold them until the next batch arrives
    with contextlib.suppress(Exception):  # if the device is lost, the trainer's calls fail, too
        transfer.end()
    taker.leave()
    with contextlib.suppress(Exception):  # the next call of another stream raises the error again
        taker.client.close_collected()
    del results, transfer, which  # everything they hold must be released before the process may end
    _live.pop(threading.current_thread(), None)


def _leave(taker: Taker, orders: queue.SimpleQueue[bool]) -> None:
    taker.stream.left = True
    orders.put(False)
    taker.client.wake()


def _which(taker: Taker) -> str:
    """Returns a description of the batch that was taken last."""
    number = taker.taken - 1
    recent = taker.stream.recent
    ticket = recent[number % len(recent)]
    if ticket is None:
        return f"batch {number}"
    packed = ticket if isinstance(ticket, bytes) else ticket_codec.pack_ticket_of_ints(*ticket)
    keys = ticket_codec.describe_keys(packed)
    return keys if keys.startswith("batch ") else f"batch {number}, {keys}"  # a slot numbers its own batches


def _next_order(orders: queue.SimpleQueue[bool], transfer: Transfer) -> bool:
    """Waits for the next order and returns it. Meanwhile, releases the source of each sent batch once its copies have
    completed."""
    with contextlib.suppress(Exception):  # if the device is lost, `send` raises the error again
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
            # After this, the threads no longer wait for a sidecar.
            taker.client.dead = taker.client.dead or "this process is exiting"
            _leave(taker, orders)
    deadline = time.monotonic() + LAST_S
    for thread in live:
        with contextlib.suppress(RuntimeError):  # the thread was not started
            thread.join(max(0.0, deadline - time.monotonic()))


os.register_at_fork(after_in_child=_live.clear)  # the threads do not exist in a forked child
