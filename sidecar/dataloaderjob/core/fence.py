"""Memory fences between processes, without C code of our own.

Two processes share counters and flags. A flag stored and a counter loaded afterwards may be seen the
other way round by the other side, also on x86; a wake-up is then lost.

A fence here releases and re-acquires a lock that nobody else wants. CPython's lock is a POSIX semaphore: a
read-modify-write with release order, then one with acquire order on the same word. On x86 each is a
LOCK-prefixed instruction; in ARM's memory model release followed by acquire orders all before against all
after. 0.3 µs.

membarrier(2), by which only the side about to sleep pays, was tried and dropped: its interrupts to the other
CPUs cost the sleeper 45 to 170 µs on a virtual machine (1.5 µs while the others are idle), more than the
whole hand-off of a batch.
"""

from __future__ import annotations

import platform
import threading

ACCESSES_IN_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether this CPU keeps loads in order, and stores in order (Intel SDM 3A, 8.2.2): only a store and a later load
need a fence."""
_allocate = threading.Lock


class Fence:
    """A full memory fence for the one thread that owns it. Not for finalizers, which may run inside it."""

    __slots__ = ("_acquire", "_release")

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._release = lock.release
        self._acquire = lock.acquire

    def full(self) -> None:
        """No load or store crosses this line in either direction."""
        try:  # noqa: SIM105  contextlib.suppress takes ten times as long
            self._release()
        except RuntimeError:
            pass  # a KeyboardInterrupt came between the two calls of an earlier fence, and left it released
        self._acquire()


def fence_anywhere() -> None:
    """The same with a lock of its own: for any thread, and for finalizers that interrupt another fence."""
    lock = _allocate()
    lock.acquire()
    if not ACCESSES_IN_ORDER:  # there one locked instruction is a fence
        lock.release()
        lock.acquire()
