"""`pin_memory=True`: a thread takes the next batches and copies them into pinned memory, ahead of the trainer.

The thread takes all batches of its stream; the trainer gets them from it. The sampler stays with the trainer's
thread. A batch's place in the pool comes back once it is copied.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from typing import Any

import torch
from torch.utils.data import _utils

from dataloaderjob.core.errors import DeadlineExceeded
from dataloaderjob.trainer.stream import StreamLeftError
from dataloaderjob.trainer.taking import NOTHING, Taker, Timed

AHEAD = 2
"""Batches that lie pinned, or are being pinned, before the trainer asks for them."""
LAST_S = 2.0
"""Time for a thread to end at the exit of the process."""

_threads: weakref.WeakSet[PinningTaker] = weakref.WeakSet()

Result = tuple[int, Any, BaseException | None]
"""Batches taken so far; the batch, or why there is none."""


class PinningTaker(Timed):
    """A `Taker` whose batches are pinned, by a thread of its own."""

    __slots__ = ("__weakref__", "_ordered", "_orders", "_results", "_taker", "_thread", "_timeout_s")

    def __init__(self, taker: Taker, device: str | None, timeout_s: float) -> None:
        super().__init__(taker.client.control.words)
        self._taker = taker
        self._timeout_s = timeout_s
        self._ordered = 0
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        index = torch.accelerator.current_device_index()
        # It must not refer to this object, whose iterator would never be collected.
        self._thread = threading.Thread(
            target=_pin_all, args=(taker, device, index, self._orders, self._results),
            name="dlj-pin", daemon=True,
        )  # fmt: skip
        self._thread.start()
        _threads.add(self)

    def order(self, drawn: int) -> None:
        """Has the thread take what is due, of `drawn` batches that were asked for."""
        target = min(drawn, self.taken + AHEAD)
        while self._ordered < target:
            self._ordered += 1
            self._orders.put(True)

    def take_ready(self) -> bool:
        """Keeps the next batch if it is pinned."""
        self._taker.client.check()
        if self._results.empty():
            return False
        self._accept(self._results.get())
        return True

    def take_later(self) -> None:
        """Waits for the next batch, and keeps it."""
        try:
            result = self._results.get(timeout=self._timeout_s or None)
        except queue.Empty:
            raise DeadlineExceeded(
                f"DataLoader timed out after {self._timeout_s:g} seconds: batch {self.taken} is not ready "
                "(the loader's timeout)"
            ) from None
        self._accept(result)

    def _accept(self, result: Result) -> None:
        taken, batch, error = result
        if error is None:
            self.kept, self.taken = batch, taken
            return
        if taken == self.taken:  # it was not taken: the next call tries again
            self._ordered -= 1
        self.taken = taken
        raise error

    def leave(self) -> None:
        """The thread ends soon, and the stream with it. Safe in a finalizer."""
        self._taker.stream.left = True
        self._orders.put(False)
        self._taker.client.wake()

    def join(self) -> None:
        self._thread.join(LAST_S)


def _pin_all(
    taker: Taker,
    device: str | None,
    index: int,
    orders: queue.SimpleQueue[bool],
    results: queue.SimpleQueue[Result],
) -> None:
    is_set_up = False
    while orders.get():
        batch, error = None, None
        try:
            if not is_set_up:
                torch.set_num_threads(1)
                torch.accelerator.set_device_index(index)
                is_set_up = True
            if not taker.take_ready():
                taker.take_later()
            batch, taker.kept = taker.kept, NOTHING
            batch = _utils.pin_memory.pin_memory(batch, device)  # type: ignore[no-untyped-call]
        except StreamLeftError:
            break
        except BaseException as exc:
            batch, error = None, exc
        results.put((taker.taken, batch, error))
        del batch, error  # else the frame holds them until the next one comes
    taker.leave()
    with contextlib.suppress(Exception):  # the next call of another stream's meets it again
        taker.client.close_collected()


@atexit.register
def _end_all() -> None:
    """Daemon threads that run torch's code while the interpreter ends may abort the process."""
    live = list(_threads)
    for taker in live:
        taker.leave()
    for taker in live:
        taker.join()


def _forget_all() -> None:
    """Forgets all takers in a forked child, which has none of the threads."""
    _threads.clear()


os.register_at_fork(after_in_child=_forget_all)
