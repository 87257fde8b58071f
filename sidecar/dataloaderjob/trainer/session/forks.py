"""Support for a process that forks while it holds batches: the child's tensors keep their content.

Tensors of a batch are views of memory that the receiver refills once the batch has been released. A forked child has
its own views, but the receiver does not wait for their release. The child would therefore see another batch in them.
Before the parent continues, the child gets private memory with the same bytes at the same addresses. The parent ends
no lease until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from dataloaderjob.trainer.session.pool import LeaseTail, PoolPlace

COPY_TIMEOUT_S = 10.0
"""Maximum number of seconds to wait until the child has copied. A stopped child never does."""
_FIXED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip


@dataclass(slots=True)
class Fork:
    """One fork in progress in a thread of the parent."""

    tails: list[LeaseTail]
    places: list[PoolPlace]
    read: int
    write: int


_forks: dict[int, Fork] = {}
"""Forks in progress, by the identifier of the thread that forks."""


def before(tails: Iterable[LeaseTail]) -> None:
    """Postpones the end of all leases, if there are any."""
    holding = [tail for tail in tails if tail.leases]
    if not holding:
        return
    pipe = os.pipe2(os.O_CLOEXEC)
    for tail in holding:
        tail.hold()
    places = [place for tail in holding for place in tail.leases.copy().values()]
    _forks[threading.get_ident()] = Fork(holding, places, *pipe)


def after_in_parent() -> None:
    """Waits until the child has copied the batches. If the fork failed, no process has the pipe's other end, and the
    wait ends at once."""
    fork = _forks.pop(threading.get_ident(), None)
    if fork is None:
        return
    os.close(fork.write)
    poll = select.poll()
    poll.register(fork.read, select.POLLIN)
    poll.poll(COPY_TIMEOUT_S * 1000)
    os.close(fork.read)
    for tail in fork.tails:
        tail.release()


def after_in_child() -> None:
    """Replaces shared memory with private memory that has the same content."""
    fork = _forks.pop(threading.get_ident(), None)
    # Other threads of the parent may be forking, too. They wait until all copies of their pipes' ends are closed.
    for other in _forks.values():
        os.close(other.read)
        os.close(other.write)
    _forks.clear()
    if fork is None:
        return
    os.close(fork.read)
    try:
        for _, _, size, lease in fork.places:
            if (lent := lease()) is not None and size:
                _make_private(lent.ctypes.data, size)
        with contextlib.suppress(OSError):  # the parent no longer waits
            os.write(fork.write, b".")
    finally:
        os.close(fork.write)


def _make_private(address: int, nbytes: int) -> None:
    kept = bytes((ctypes.c_char * nbytes).from_address(address))
    if _libc.mmap(address, nbytes, _PROTECTION, _FIXED, -1, 0) != address:
        error = os.strerror(ctypes.get_errno())
        sys.stderr.write(f"dataloaderjob: a forked process shares batches with its parent: {error}\n")
        return
    ctypes.memmove(address, kept, nbytes)
