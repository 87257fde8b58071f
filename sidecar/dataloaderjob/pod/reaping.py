"""PID 1 of a pod: it hands signals on and reaps what is left to it; the real main process is its child.

Ray's processes lose their parents all the time, and reaping them in the process that has children of its own would take
the exit codes of those away. How each of them ended the main process hears through a pipe.
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
"""PID 1 tells of an end within milliseconds, where it does at all."""
_END = struct.Struct("<ii")
"""Pid, and exit code as `subprocess` gives it."""


class Ends:
    """How processes ended that PID 1 has reaped."""

    def __init__(self) -> None:
        self._reader: int | None = None
        self._codes: dict[int, int] = {}

    def listen(self, reader: int) -> None:
        self._reader = reader

    def code(self, pid: int) -> int | None:
        """The exit code of a process that has just ended; None where nobody tells."""
        deadline = time.monotonic() + TOLD_S
        while pid not in self._codes and self._reader is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._reader], [], [], left_s)[0]:
                break
            with contextlib.suppress(BlockingIOError):  # PID 1 has taken them, of a full pipe
                for one, code in _END.iter_unpack(os.read(self._reader, 512 * _END.size)):
                    self._codes[one] = code
        return self._codes.get(pid)


ENDS = Ends()
"""What this process hears."""


def how_ended(pid: int | None) -> str:
    """How a process that this one did not start ended, as far as that is known."""
    code = None if pid is None else ENDS.code(pid)
    if code is None:
        return "ended"
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def reap(main: Callable[[], int]) -> int:
    """Runs `main` in a child and reaps everything that ends meanwhile; returns as that child ends. Call it before any
    thread."""
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
    """Takes every zombie, and tells through the pipe; the exit code of `main` if that is one of them."""
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
    """Where nobody has read for long, the oldest go."""
    with contextlib.suppress(OSError):
        try:
            os.write(writer, end)
        except BlockingIOError:
            os.read(reader, 512 * _END.size)
            os.write(writer, end)
