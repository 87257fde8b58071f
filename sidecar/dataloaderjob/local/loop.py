"""One thread's loop over descriptors, timers and signals. Nothing in it knows what it serves."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import time
from collections.abc import Callable
from types import FrameType

Callback = Callable[[], None]


class Loop:
    """Callbacks run one after another in the thread that calls `run`."""

    def __init__(self) -> None:
        self._select = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callback]] = []
        self._numbers = itertools.count()
        self._signals: list[int] = []
        self._on_signal: Callable[[int], None] | None = None
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.watch(self._wake_r, self._woken)

    def watch(self, fd: int, callback: Callback) -> None:
        """Calls `callback` whenever `fd` is readable."""
        self._select.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._select.unregister(fd)

    def later(self, delay_s: float, callback: Callback) -> None:
        """Calls `callback` once."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), callback))

    def every(self, period_s: float, callback: Callback) -> None:
        """Calls `callback` again and again, for as long as the loop lives."""

        def again() -> None:
            callback()
            self.later(period_s, again)

        self.later(period_s, again)

    def signals(self, numbers: tuple[signal.Signals, ...], callback: Callable[[int], None]) -> None:
        """Hands these signals to `callback`, in the loop instead of at any moment."""
        self._on_signal = callback
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._note)

    def run(self, until: Callable[[], bool]) -> None:
        """Serves until `until()` is true, which is asked after every turn."""
        while not until():
            now = time.monotonic()
            timeout = max(0.0, self._timers[0][0] - now) if self._timers else None
            for key, _ in self._select.select(timeout):
                if self._select.get_map().get(key.fd) is key:  # not taken off by a callback of this turn
                    key.data()
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()

    def wake(self) -> None:
        """Makes `run` turn once; from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"\0")

    def _note(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 512)
        while self._signals and self._on_signal is not None:
            self._on_signal(self._signals.pop(0))
