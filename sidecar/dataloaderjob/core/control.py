"""The control memfd that a trainer process and its receiver share. No other module touches it.

    words    WORDS u64   wake flags and metrics, see the constants
    index    ROWS x WINDOW u64   one word for each ticket in flight, set once it is ready
    entries  LEASES x 40 B   where a ready batch lies
    ended    LEASES bytes   1 = the trainer's lease has ended

To publish ticket k of stream s, the receiver writes the ticket's entry, issues a fence, and then writes a single word:
index[s % ROWS][k % WINDOW] = (k + 1) << 32 | (s & 0xFFFF) << 16 | lease.

The word identifies the stream and the ticket, so a word that an earlier stream left in the row is not mistaken for it.
The low 16 bits of stream numbers repeat, so a row is also cleared when a stream opens. A memoryview cast to "Q" stores
or loads a word in one 8-byte copy. `struct` would copy byte by byte.

The receiver treats this memory as untrusted input. While it is running, it reads only flags and metrics. When it adopts
a trainer, it checks every entry.

Fences. Two processes share counters and flags. If one side stores a flag and then loads a counter, the other side may
see the two in reverse order, even on x86. A wake-up is then lost.

`Fence` releases and reacquires a lock that no other thread uses. CPython's lock is a POSIX semaphore, or from 3.14 on a
single byte. Releasing and reacquiring it is a read-modify-write with release ordering, followed by one with acquire
ordering on the same word. On x86, each is a LOCK-prefixed instruction. In ARM's memory model, a release followed by an
acquire orders everything before the pair against everything after it. A fence takes 0.3 µs.

With membarrier(2), only the side that is about to sleep would pay. On a virtual machine, that side paid 45 to 170 µs,
or 1.5 µs while the other CPUs were idle.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import mmap
import os
import platform
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

ACCESSES_IN_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")
"""True if this CPU preserves the order of loads and the order of stores (Intel SDM 3A, 8.2.2). Then only a store
followed by a load needs a fence."""


class Fence:
    """A full memory fence for the one thread that owns it. Finalizers must not use it, because they may interrupt
    it."""

    __slots__ = ("_acquire", "_release")

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._release = lock.release
        self._acquire = lock.acquire

    def full(self) -> None:
        """Keeps any load or store from crossing this call in either direction."""
        try:  # noqa: SIM105  contextlib.suppress takes ten times as long
            self._release()
        except RuntimeError:
            pass  # a KeyboardInterrupt arrived between the two calls of an earlier fence and left the lock released
        self._acquire()


def fence_anywhere(allocate: Callable[[], Any] = threading.Lock) -> None:
    """Issues a fence with a new lock. Any thread may call this, and so may finalizers. A finalizer may interrupt
    another fence, or run after the interpreter has cleared this module's names."""
    lock = allocate()
    lock.acquire()
    if not ACCESSES_IN_ORDER:  # on x86, the one locked instruction above is a fence
        lock.release()
        lock.acquire()


PAGE = 4096
"""Size of a page in bytes. Extents of the pool are whole pages."""
MAGIC = 0x444C4A_0002
WORDS = 512
ROWS = 64
WINDOW = 1024
MOST_AHEAD = WINDOW - 24
"""Maximum number of tickets that a trainer may be ahead in one stream."""
LEASES = 0xFFFE
FAILED = 0xFFFF
"""Value in place of a lease: the ticket failed, and the error has arrived or will arrive over the socket."""
THERE = 0xFFFE
"""Value in place of a lease: the ticket asked whether its batch exists, and the batch exists."""

_ENTRY = struct.Struct("<QQQQQ")
_unpack_entry: Callable[[memoryview, int], Any] = _ENTRY.unpack_from
ENTRY_NBYTES = _ENTRY.size
_INDEX_AT = WORDS * 8
_ENTRIES_AT = _INDEX_AT + ROWS * WINDOW * 8
_ENDED_AT = _ENTRIES_AT + LEASES * ENTRY_NBYTES
NBYTES = -(-(_ENDED_AT + LEASES) // PAGE) * PAGE

# Words, each group on cache lines of its own. T: stored by the trainer, R: by the receiver.
W_MAGIC = 0
W_ASLEEP = 8  # T: wake me by eventfd when W_PUBLISHED reaches this; 0: awake
W_WANT = 16  # R: wake me by eventfd when a lease ends
W_PUBLISHED = 17  # R: number of publications
W_FEEDERS = 18  # R: feeders connected
W_TOLD = 19  # R: packets sent over the socket
W_NEXT_CALLS = 24  # T: batches taken
W_WAIT_NS = 25  # T: time spent waiting in next()
W_COPIES = 26  # T: batches served as copies, because leases were at their limit
W_LEASED_NBYTES = 27  # T: bytes under lease
W_STREAMS = 28  # T: live iterators
W_STEP_NS = 29  # T: time between the end of one next() and the start of the following one
W_READY_CALLS = 30  # T: calls of next() that found their batch ready
W_DIGEST = 31  # T: sum of the rolling digests of all loaders (`core.consumption`), modulo 2**64
W_STAGE_NS = 32  # T: time in the device_stage
W_IDLE = 33  # R: 1 once there have been no live iterators and no leases for a while
W_REGISTERED = 34  # T: 1 once a device may read the pool's memory directly
W_CUDA = 35  # T: 1 once the trainer has initialized CUDA
W_METRICS = 64  # R: the receiver's values of `sidecar.metrics.METRICS`, in that order

_EMPTY_ROW = memoryview(bytes(8 * WINDOW)).cast("Q")

Entry = tuple[int, int, int, int, int]
"""Location of a ready batch: stream, ticket, region, offset and size in bytes. It is a plain tuple, because one is read
for every batch."""


class Control:
    """One side's view of the control memfd. Each thread of a side needs a `twin` of its own."""

    __slots__ = ("_entries", "_fence", "_index", "_map", "_published", "_told", "ended", "words")

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, NBYTES)
        view = memoryview(self._map)
        self.words = view[: WORDS * 8].cast("Q")
        self._index = view[_INDEX_AT:_ENTRIES_AT].cast("Q")
        self._entries = view[_ENTRIES_AT:_ENDED_AT]
        self.ended = view[_ENDED_AT : _ENDED_AT + LEASES]
        # Counted in this process, because the shared words are untrusted input.
        self._published = self.words[W_PUBLISHED] & 0xFFFF_FFFF_FFFF
        self._told = self.words[W_TOLD] & 0xFFFF_FFFF_FFFF
        self._fence = Fence()

    def twin(self) -> Control:
        """Returns a view of the same memory, for use from another thread."""
        other = copy.copy(self)
        other._fence = Fence()  # noqa: SLF001  this class
        return other

    @staticmethod
    def create() -> int:
        """Returns a new control memfd, sealed against resizing."""
        fd = os.memfd_create("dlj-control", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, NBYTES)
        seal(fd)
        with mmap.mmap(fd, 4096) as page:
            memoryview(page).cast("Q")[W_MAGIC] = MAGIC
        return fd

    @property
    def valid(self) -> bool:
        return bool(self.words[W_MAGIC] == MAGIC)

    # Receiver's side

    def publish(self, lease: int, stream: int, ticket: int, region: int, offset: int, nbytes: int) -> bool:
        """Makes a batch visible to the trainer. Returns True if the trainer is asleep and must now be woken by the
        eventfd."""
        _ENTRY.pack_into(self._entries, lease * ENTRY_NBYTES, stream, ticket, region, offset, nbytes)
        return self.publish_word(lease, stream, ticket)

    def publish_word(self, lease: int, stream: int, ticket: int) -> bool:
        """Performs the second half of `publish`. When it is called alone, `lease` is `FAILED` or `THERE`."""
        self._fence.full()
        self._index[(stream % ROWS) * WINDOW + ticket % WINDOW] = (
            ((ticket + 1) & 0xFFFFFFFF) << 32 | (stream & 0xFFFF) << 16 | lease
        )
        if not ACCESSES_IN_ORDER:
            self._fence.full()
        self._published += 1
        self.words[W_PUBLISHED] = self._published
        self._fence.full()
        asleep: int = self.words[W_ASLEEP]
        return asleep != 0 and self._published >= asleep

    def unpublish(self, stream: int, ticket: int) -> None:
        """Clears a ticket's word. The caller has not published an earlier ticket, so the trainer cannot be reading this
        word."""
        self._index[(stream % ROWS) * WINDOW + ticket % WINDOW] = 0
        self._fence.full()

    def told(self) -> None:
        """Counts a packet that was sent over the socket, continuing a previous receiver's count."""
        self._told += 1
        self.words[W_TOLD] = self._told

    def ended_leases(self, highest: int) -> Iterator[int]:
        """Yields the leases up to `highest` that the trainer has ended, each lease once."""
        at = _ENDED_AT
        stop = _ENDED_AT + highest + 1
        while (at := self._map.find(b"\x01", at, stop)) >= 0:
            lease = at - _ENDED_AT
            self.ended[lease] = 0
            yield lease

    def want(self, flag: bool) -> None:
        """Sets whether the end of a lease wakes the receiver. After passing True, check `ended_leases` again."""
        self.words[W_WANT] = flag
        if flag:
            self._fence.full()

    def reset(self, leases: set[int]) -> None:
        """Forgets everything published, and all ended leases except `leases`. This is the first step of an adoption."""
        self.forget()
        for lease in range(LEASES):
            if self.ended[lease] and lease not in leases:
                self.ended[lease] = 0
        self._fence.full()

    # Trainer's side

    def clear_row(self, stream: int) -> None:
        """Clears a row for a new stream. Rows are reused, and a word contains only 16 bits of its stream's number."""
        at = (stream % ROWS) * WINDOW
        self._index[at : at + WINDOW] = _EMPTY_ROW

    def ready(self, stream: int, ticket: int) -> int | None:
        """Returns the lease of a ready ticket, or `FAILED` or `THERE`. Returns None while the ticket is not ready."""
        word: int = self._index[(stream % ROWS) * WINDOW + ticket % WINDOW]
        if word >> 16 != (((ticket + 1) & 0xFFFFFFFF) << 16 | (stream & 0xFFFF)):
            return None
        if not ACCESSES_IN_ORDER:
            self._fence.full()
        return word & 0xFFFF

    def find(self, stream: int, ticket: int) -> tuple[int, Entry | None] | None:
        """Returns (lease, location of the batch) for a ready ticket. The location is None if the lease is `FAILED` or
        `THERE`. Returns None while the ticket is not ready.

        This method combines `ready` and `entry`, because each function call is expensive when caches are cold.
        """
        word: int = self._index[(stream % ROWS) * WINDOW + ticket % WINDOW]
        if word >> 16 != (((ticket + 1) & 0xFFFFFFFF) << 16 | (stream & 0xFFFF)):
            return None
        if not ACCESSES_IN_ORDER:
            self._fence.full()
        lease = word & 0xFFFF
        return lease, (None if lease >= LEASES else _unpack_entry(self._entries, lease * ENTRY_NBYTES))

    def entry(self, lease: int) -> Entry:
        found: Entry = _unpack_entry(self._entries, lease * ENTRY_NBYTES)
        return found

    def sleep(self, stream: int, ticket: int, after: int = 1) -> bool:
        """Announces that the trainer is about to sleep until `after` more tickets are published. If `after` is 0, the
        next publication wakes it, even if several of its threads sleep.

        Returns False if the given ticket is ready after all.
        """
        words = self.words
        words[W_ASLEEP] = words[W_PUBLISHED] + after if after else 1
        self._fence.full()
        return self.ready(stream, ticket) is None

    def awake(self) -> None:
        self.words[W_ASLEEP] = 0

    def forget(self) -> None:
        """Hides everything published, so that a dead receiver's words are never mistaken for a new one's."""
        self._index[:] = memoryview(bytes(self._index.nbytes)).cast("Q")
        self._fence.full()

    def close(self) -> None:
        """Releases this side's views. The mapping itself is removed with the last of them."""
        for view in (self.words, self._index, self._entries, self.ended):
            view.release()


_F_SEAL_FUTURE_WRITE = 0x10
"""A seal from linux/fcntl.h (Linux 5.1 or later): existing writable mappings remain, and all other writes are
refused."""


def seal(fd: int, *, is_written_here: bool = False) -> None:
    """Seals a memfd against resizing, so that no process can truncate the memory that another one has mapped (SIGBUS).
    With `is_written_here`, this process continues to write to the memfd, and processes that receive it can only read
    it."""
    if is_written_here:
        with contextlib.suppress(OSError):  # older kernels do not know this seal
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def sealed(fd: int) -> bool:
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed == needed
    except OSError:
        return False
