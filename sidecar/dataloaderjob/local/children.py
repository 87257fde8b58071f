"""Named child processes, and a single-threaded loop over file descriptors, timers and signals. The loop reports each
line of a child's output, and each child's end."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from dataloaderjob.core import processes
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.processes import Lines

Callback = Callable[[], object]
OnLine = Callable[[str, bool], None]
"""Called with a line without its line end, and with True if the line arrived on stderr."""


class Loop(processes.Loop):
    """A loop over file descriptors, timers and signals."""

    def __init__(self) -> None:
        super().__init__()
        self._timers: list[tuple[float, int, Callback]] = []
        self._numbers = itertools.count()
        self._signals: list[int] = []
        self._on_signal: Callable[[int], None] | None = None

    def later(self, delay_s: float, callback: Callback) -> None:
        """Calls `callback` once, after `delay_s` seconds."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), callback))

    def every(self, period_s: float, callback: Callback) -> None:
        """Calls `callback` every `period_s` seconds while the loop runs."""

        def again() -> None:
            callback()
            self.later(period_s, again)

        self.later(period_s, again)

    def signals(self, numbers: tuple[signal.Signals, ...], callback: Callable[[int], None]) -> None:
        """Passes these signals to `callback`, which the loop calls between other callbacks."""
        self._on_signal = callback
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._note)

    def run(self, until: Callable[[], bool]) -> None:
        """Runs the loop until `until()` is true, which is checked after every iteration."""
        while not until():
            self.turn(max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None)
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()

    def wake(self) -> None:
        """Makes `run` iterate once; safe from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"\0")

    def _note(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)

    def woken(self) -> None:
        super().woken()
        while self._signals and self._on_signal is not None:
            self._on_signal(self._signals.pop(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to start. It gets its own session, so that Ctrl-C in a terminal does not reach it twice."""

    name: str
    args: Sequence[str]
    env: Mapping[str, str]
    cwd: Path


WAIT_STEP_S = 0.05


class Started:
    """A child process that was started without Popen. It has the parts of Popen's interface that `Child` uses."""

    def __init__(self, pid: int, out: int, err: int) -> None:
        """`out` and `err`: read ends of the pipes from its stdout and stderr."""
        self.pid = pid
        self.stdout, self.stderr = open(out, "rb", buffering=0), open(err, "rb", buffering=0)  # noqa: SIM115  closed by Child
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code. Raises subprocess.TimeoutExpired."""
        if self._code is None:
            fd = os.pidfd_open(self.pid)
            try:
                if not select.select([fd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            finally:
                os.close(fd)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        """Kills the process and its group, unless the process has ended."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class Child:
    """A started command. Raises InputError or OSError if it cannot be started."""

    def __init__(
        self,
        command: Command,
        loop: Loop,
        *,
        on_line: OnLine,
        on_end: Callable[[Child], None],
        started: Started | None = None,
    ) -> None:
        """`started`: the process, if it has been started already."""
        self.name = command.name
        self.code: int | None = None
        """Exit code, negative for a signal; None while the process lives."""
        self._loop, self._on_end = loop, on_end
        self._process = started or _start(command)
        self.pid = self._process.pid
        self._pipes: dict[int, Lines] = {}
        for pipe, is_err in ((self._process.stdout, False), (self._process.stderr, True)):
            assert pipe is not None  # noqa: S101  both were requested
            self._pipe(pipe.fileno(), on_line, is_err=is_err)
        self._pidfd = os.pidfd_open(self.pid)
        loop.watch(self._pidfd, self._ended)

    def _pipe(self, fd: int, on_line: OnLine, *, is_err: bool) -> None:
        os.set_blocking(fd, False)
        self._pipes[fd] = Lines(lambda line: on_line(line, is_err))
        self._loop.watch(fd, lambda: self._read(fd))

    def _read(self, fd: int) -> bool:
        """Passes available output to the callback; returns False if there is none now."""
        if fd not in self._pipes:
            return False
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        lines = self._pipes[fd]
        if data:
            lines.feed(data)
            return True
        del self._pipes[fd]
        self._loop.unwatch(fd)
        lines.feed(b"", final=True)
        return False

    def _ended(self) -> None:
        self._loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        self.code = self._process.wait()
        self._drain()
        self._on_end(self)

    def _drain(self) -> None:
        """Reads the child's last output without waiting, because a process that the child left behind may hold the
        pipes open."""
        for fd in list(self._pipes):
            while self._read(fd):
                pass
            if fd in self._pipes:
                self._loop.unwatch(fd)
                self._pipes.pop(fd).feed(b"", final=True)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def signal(self, number: int) -> None:
        """Signals the process and its process group."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Waits for the child to end, passing its output to the callback. Returns False if the child does not end in
        time."""
        deadline = time.monotonic() + timeout_s
        while self.code is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            if select.select([self._pidfd], [], [], min(left_s, WAIT_STEP_S))[0]:
                return True
            for fd in list(self._pipes):
                while self._read(fd):
                    pass
        return True

    def end(self, grace_s: float) -> None:
        """Sends SIGTERM, then SIGKILL after `grace_s` seconds, and waits for the child to end. `on_end` is not
        called."""
        if self.code is not None:
            return
        self._loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        self.signal(signal.SIGTERM)
        try:
            code = self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            code = self._process.wait()
        self.code = code
        self._drain()


def check_words(name: str, args: Sequence[str], env: Mapping[str, str]) -> None:
    """Raises InputError for arguments or variables that cannot be passed to a process."""
    for what, text in [
        *((f"argument {number}", word) for number, word in enumerate(args)),
        *((f"environment variable {key!r}", key + value) for key, value in env.items()),
    ]:
        if "\0" in text:
            raise InputError(
                f"{what} of {name} contains the character NUL, which cannot be passed to a process: remove it"
            )


def _start(command: Command) -> subprocess.Popen[bytes]:
    check_words(command.name, command.args, command.env)
    return subprocess.Popen(
        list(command.args), env=dict(command.env), cwd=command.cwd, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def exit_code(code: int) -> int:
    """Returns the exit code as a shell reports it: 128 + n for signal n."""
    return 128 - code if code < 0 else code
