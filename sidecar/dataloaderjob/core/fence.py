"""Memory fences between processes, without C code of our own.

Two processes share counters and flags. A flag stored and a counter loaded afterwards may be seen the
other way round by the other side, also on x86; a wake-up is then lost. Two tools prevent that:

`Fence.full()` releases and re-acquires a lock that it always holds. CPython's lock is a POSIX semaphore:
a read-modify-write with release order, then one with acquire order on the same word. On x86 each is a
LOCK-prefixed instruction; in ARM's memory model release followed by acquire orders all before against
all after. 0.1 µs. A Fence belongs to one thread, and a finalizer must not call it: it could run inside it.

`expedite()` is membarrier(2), by the side that is about to sleep: the kernel runs a full fence on every
CPU where a registered process runs. Then the other side needs none, so finalizers are safe too. Where a
sandbox forbids it, the poll's timeout (100 ms) bounds what can be lost.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable

_SYSCALL = {"x86_64": 324, "aarch64": 283}
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2


class Fence:
    """A full memory fence for the one thread that owns it."""

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
            pass  # a KeyboardInterrupt came between the two calls of an earlier fence
        self._acquire()


def _membarrier() -> Callable[[], None] | None:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        return None
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except OSError:
        return None
    if syscall(number, _REGISTER_GLOBAL_EXPEDITED, 0) != 0:
        return None

    def barrier() -> None:
        syscall(number, _GLOBAL_EXPEDITED, 0)

    return barrier


class Expedite:
    """`expedite()` of this process; registers it on first use, and again in a forked child."""

    def __init__(self) -> None:
        self._barrier = _membarrier()

    @property
    def available(self) -> bool:
        return self._barrier is not None

    def __call__(self) -> None:
        if self._barrier is not None:
            self._barrier()
