"""PID 1 of a pod's container: it forwards signals and reaps orphans. The real main process is its child.

Ray's processes often lose their parents. If the main process reaped them, it would also take the exit codes of its own
children. PID 1 therefore reaps them, and reports each end to the main process through a pipe.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time
from collections.abc import Callable

from dataloaderjob.core.processes import end_as, signal_name

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TOLD_S = 1.0
"""Maximum wait in seconds for PID 1's report that a process ended. If the report comes at all, it comes within
milliseconds."""
_END = struct.Struct("<ii")
"""Pid and exit code. The exit code has the form that `subprocess` uses."""


class Ends:
    """The exit codes of processes that PID 1 has reaped."""

    def __init__(self) -> None:
        self._reader: int | None = None
        self._codes: dict[int, int] = {}

    def listen(self, reader: int) -> None:
        self._reader = reader

    def code(self, pid: int) -> int | None:
        """Returns the exit code of a process that has just ended; None if PID 1 does not report it."""
        deadline = time.monotonic() + TOLD_S
        while pid not in self._codes and self._reader is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._reader], [], [], left_s)[0]:
                break
            with contextlib.suppress(BlockingIOError):  # the pipe was full, and PID 1 has emptied it
                for one, code in _END.iter_unpack(os.read(self._reader, 512 * _END.size)):
                    self._codes[one] = code
        return self._codes.get(pid)


ENDS = Ends()
"""The ends reported to this process."""


def how_ended(pid: int | None) -> str:
    """Describes the end of a process that is not this process's child, as far as known."""
    code = None if pid is None else ENDS.code(pid)
    if code is None:
        return "ended"
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def reap(main: Callable[[], int]) -> int:
    """Runs `main` in a child, and reaps every process that ends meanwhile. Returns the child's exit code. Call it
    before any thread is started."""
    awaited = {*SIGNALS, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        ENDS.listen(reader)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        end_as(main)
    while True:
        number = signal.sigwait(awaited)
        if number == signal.SIGCHLD:
            code = _reap_all(pid, reader, writer)
            if code is not None:
                return code
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _reap_all(main: int, reader: int, writer: int) -> int | None:
    """Reaps every zombie, and reports all but `main` through the pipe. Returns the exit code of `main` if it is one of
    them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            if ended[0] == main:
                found = code if code >= 0 else 128 - code
            else:
                _tell(reader, writer, _END.pack(ended[0], code))
    return found


def _tell(reader: int, writer: int, end: bytes) -> None:
    """Writes to the pipe. If the pipe is full because nobody has read it for a long time, drops the oldest reports."""
    with contextlib.suppress(OSError):
        try:
            os.write(writer, end)
        except BlockingIOError:
            os.read(reader, 512 * _END.size)
            os.write(writer, end)
