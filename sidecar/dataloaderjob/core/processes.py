"""Parent and child processes: steps after a fork, the lines of a child's output, and the back-off before a retry."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import logging
import os
import re
import resource
import select
import selectors
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
MAX_LINE_CHARS = 64 * 1024
"""Maximum length of a line. A longer one is shown in pieces."""
SEE_OUTPUT = "its own output gives the reason"
"""End of a line that points to another process's output, which may appear before or after that line."""
_ENDS = re.compile(r"\r\n|\n|\r")
MAX_CRASHES = 6
"""Number of crashes within CRASH_WINDOW_S above which the next attempt is expected to fail as well."""
CRASH_WINDOW_S = 120.0


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent exits, because this process would then have no peer. `parent`
    is the pid of the process that forked it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parents have exited, so that it can find and kill them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def allow_all_files() -> None:
    """Raises this process's file descriptor limit to the maximum. Must not be called in processes that run user
    code."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def call_itself(name: str) -> None:
    """Sets the name of this process in `ps -o comm` and `top`, up to 15 characters. The default is the parent's
    name."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15])


def default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def close_all_but(keep: set[int]) -> None:
    """Closes all file descriptors except `keep` and the standard ones."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)


def hold_standard_descriptors() -> None:
    """Opens any closed file descriptor from 0 to 2 on the null device. Otherwise, a socket or memfd could get one of
    these numbers, and would receive printed output."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            if (opened := os.open(os.devnull, os.O_RDWR)) != fd:  # another thread was faster
                os.close(opened)


def end_as(main: Callable[[], int | None]) -> NoReturn:
    """Runs a forked process's `main`, then exits with the code that it returns, or 1 if it raises. The child never
    returns to the parent's code."""
    code = 1
    try:
        code = main() or 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(
            Exception
        ):  # the output no longer has a reader, or user code has replaced the stream
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def lead_group(pid: int) -> None:
    """Makes a child, or this process if `pid` is 0, the leader of a new process group. The leader's own children will
    belong to the group. Parent and child both call this function, so that the group exists whichever of them runs
    first."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, 0)


def end_group(pid: int) -> int:
    """Reaps a child that led a process group and has exited, and kills the remaining processes of the group. Returns
    the child's exit code."""
    # This comes before the child is reaped. Until then, no other process can have its pid.
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def alive(pidfd: int) -> bool:
    """Returns True unless the process has exited."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)


def start_time(pid: int) -> str:
    """Returns the start time of a live process, as counted by the kernel. It distinguishes the process from a later one
    with the same pid. Returns an empty string if the process does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def lives(path: Path) -> bool:
    """Returns True if the process whose pid and start time this file contains is alive."""
    try:
        pid, started = path.read_text().split()
    except (FileNotFoundError, ValueError):
        return False
    return start_time(int(pid)) == started


@contextlib.contextmanager
def standard_error() -> Iterator[int | None]:
    """Yields a duplicate of this process's standard error descriptor, or None if it is closed."""
    try:
        fd = os.dup(2)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


class Loop:
    """An event loop that waits for file descriptors, and runs their callbacks one at a time in the thread that calls
    `turn`."""

    def __init__(self) -> None:
        self._select = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.watch(self._wake_r, self.woken)

    def watch(self, end: socket.socket | int, callback: Callable[[], object]) -> None:
        """Calls `callback` whenever `end` is readable."""
        self._select.register(end, selectors.EVENT_READ, callback)

    def unwatch(self, end: socket.socket | int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._select.unregister(end)

    def turn(self, timeout_s: float | None = None) -> None:
        """Runs the callbacks of all ready file descriptors. Waits if none is ready."""
        for key, _ in self._select.select(timeout_s):
            if self._select.get_map().get(key.fd) is key:  # not removed by a callback of this turn
                key.data()

    def woken(self) -> None:
        """Handles a byte from the pipe, such as one written by a signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)


class ReapingLoop(Loop):
    """The event loop of a parent, which waits for file descriptors and for its children. `run` returns once `over` is
    set."""

    def __init__(self) -> None:
        super().__init__()
        self.over = False
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        while not self.over:
            self.turn()

    def woken(self) -> None:
        """Handles a signal: a child may have exited."""
        super().woken()
        with contextlib.suppress(ChildProcessError):
            self.reap()

    def reap(self) -> None:
        """Reaps the children that have exited. Raises ChildProcessError if there are none."""
        raise NotImplementedError


class Lines:
    """A splitter of a pipe's bytes into lines. A carriage return also ends a line, so that progress bars show their
    progress."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def feed(self, data: bytes, *, final: bool = False) -> None:
        text = self._rest + self._decode(data, final)
        held = ""
        if text.endswith("\r") and not final:  # its newline may arrive with the next bytes
            text, held = text[:-1], "\r"
        *lines, rest = _ENDS.split(text)
        while len(rest) > MAX_LINE_CHARS:
            lines.append(rest[:MAX_LINE_CHARS])
            rest = rest[MAX_LINE_CHARS:]
        if final and rest:
            lines.append(rest)
            rest = ""
        self._rest = rest + held
        for line in lines:
            self._take(line)


def last_word(before: str, line: str) -> str:
    """Returns the last message of a process. This is `line`, unless it is blank or only points to other output. In that
    case, it is the earlier message `before`."""
    line = line.strip()
    return before if not line or (before and line.endswith(SEE_OUTPUT)) else line


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that begin at `first_s` and double with each failure, up to `last_s`."""

    first_s: float
    last_s: float

    def wait_s(self, failures: int) -> float:
        """Returns the seconds to wait after `failures` consecutive failures. `failures` is at least 1."""
        return min(self.last_s, self.first_s * 2.0 ** min(failures - 1, 30))

    def spread_s(self, failures: int) -> float:
        """Returns a random wait between half of `wait_s` and all of it. So processes that lost the same peer do not all
        reconnect at once."""
        return self.wait_s(failures) * (0.5 + os.urandom(1)[0] / 510)


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as SIGKILL, or "signal 99" if this Python has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_RESTART = Backoff(0.5, 8.0)


class Crashes:
    """The recent crashes of one process and of its replacements."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def add(self, now: float) -> int:
        """Adds a crash. Returns the number of crashes in the window, including this one."""
        self._times.append(now)
        while self._times[0] <= now - CRASH_WINDOW_S:
            self._times.popleft()
        return len(self._times)


def restart_wait_s(crashes: int) -> float:
    """Returns the wait before a restart, in seconds. After a single crash, it is 0."""
    return 0.0 if crashes == 1 else _RESTART.wait_s(crashes - 1)


def exit_now(code: int) -> NoReturn:
    """Exits without running exit handlers, because Ray's handlers wait for a head that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def leave_on_signals() -> None:
    """Makes SIGTERM and Ctrl-C end only this process. Its feeders are left to the next supervisor."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: exit_now(0))


def discard_output(descriptor: int) -> None:
    """Redirects a file descriptor to /dev/null, including output that a stream has buffered. Otherwise, the
    interpreter's final flush would fail, and the exit code would be 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
