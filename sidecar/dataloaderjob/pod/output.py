"""Shows what feeders of this pod print, as lines `[feeder-3] ...` of this process's own output.

Feeders hand over the reading ends of their pipes (`providers.ray.actor`). One thread always reads them, another
writes: when nobody reads this process's output, the newest lines are left out and counted, and user code does not
wait.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from dataloaderjob.core.processes import Lines
from dataloaderjob.core.supervision import index_of

MAX_NBYTES = 8 * 1024 * 1024


class Backlog:
    """`put` never waits; `take` is for one writer."""

    def __init__(self, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._lines: deque[tuple[int, bytes]] = deque()
        self._nbytes = 0
        self._lost = 0
        self._ended = False
        self._changed = threading.Condition()

    def put(self, fd: int, line: bytes) -> None:
        """`fd`: where it shall be written."""
        with self._changed:
            if self._nbytes + len(line) > self._max_nbytes:
                self._lost += 1
                return
            self._own_up()
            self._lines.append((fd, line))
            self._nbytes += len(line)
            self._changed.notify()

    def end(self) -> None:
        """No more lines come."""
        with self._changed:
            self._own_up()
            self._ended = True
            self._changed.notify()

    def _own_up(self) -> None:
        if self._lost:
            note = f"[pod] {self._lost} lines were left out: they came faster than this output is read\n"
            self._lines.append((2, note.encode()))
            self._lost = 0

    def take(self) -> list[tuple[int, bytes]] | None:
        """All lines there are, as soon as there are some; None at the end."""
        with self._changed:
            while not self._lines and not self._ended:
                self._changed.wait()
            if not self._lines:
                return None
            found = list(self._lines)
            self._lines.clear()
            self._nbytes = 0
            return found


log = logging.getLogger(__name__)

READ_NBYTES = 1 << 16
MAX_NAME_NBYTES = 64
CLOSE_TIMEOUT_S = 1.0
EXIT_BROKEN = 71
_RAYS = (":actor_name:", ":job_id:", ":task_name:")
"""What Ray puts among the lines of workers for its own reader of their files."""


class Output:
    """Takes output over from feeders until `close`."""

    def __init__(self, path: Path) -> None:
        """Binds the socket `path`. Raises OSError."""
        self._backlog = Backlog()
        self._poll = selectors.DefaultSelector()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._door.bind(str(path))
        self._door.setblocking(False)
        self._poll.register(self._door, selectors.EVENT_READ, self._welcome)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(self._wake_r, selectors.EVENT_READ, lambda: None)
        self._closing = False
        self._threads = [
            threading.Thread(target=_guarded, args=(body,), name=name, daemon=True)
            for body, name in ((self._read_forever, "dlj-read"), (self._write_forever, "dlj-write"))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Shows what is there, once the feeders have ended; what nobody reads is given up after a second."""
        self._closing = True
        os.write(self._wake_w, b"\0")
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    # The reading thread

    def _read_forever(self) -> None:
        while not self._closing:
            for key, _ in self._poll.select():
                key.data()
        more = True
        while more:  # the last words of those that have ended
            ready = [key for key, _ in self._poll.select(0) if key.fd != self._wake_r]
            more = sum(bool(key.data()) for key in ready) > 0
        for key in list(self._poll.get_map().values()):
            if isinstance(key.data, _Pipe):
                key.data.end()
        self._backlog.end()

    def _welcome(self) -> bool:
        """One feeder's name and pipes. Returns whether there was one."""
        try:
            name, fds, _, _ = socket.recv_fds(self._door, MAX_NAME_NBYTES, 2)
        except BlockingIOError:
            return False
        text = name.decode(errors="replace")
        if len(fds) != 2 or index_of(text) is None:
            log.warning(
                "output of %r with %d pipes is refused, a feeder's name and 2 are needed", text, len(fds)
            )
            for fd in fds:
                os.close(fd)
            return True
        for fd, to in zip(fds, (1, 2), strict=True):
            pipe = _Pipe(fd, f"[{text}] ", to, self._backlog, self._poll)
            self._poll.register(fd, selectors.EVENT_READ, pipe)
        return True

    # The writing thread

    def _write_forever(self) -> None:
        while (lines := self._backlog.take()) is not None:
            for fd, line in lines:
                _write(fd, line)


class _Pipe:
    """One of a feeder's two. Called when it is readable; returns whether there was something."""

    def __init__(self, fd: int, prefix: str, to: int, backlog: Backlog, poll: selectors.BaseSelector) -> None:
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)
        self._fd, self._poll = fd, poll
        self._prefix, self._to, self._backlog = prefix, to, backlog
        self._lines = Lines(self._show)

    def __call__(self) -> bool:
        try:
            data = os.read(self._fd, READ_NBYTES)
        except BlockingIOError:
            return False
        if data:
            self._lines.feed(data)
        else:
            self.end()
        return bool(data)

    def _show(self, line: str) -> None:
        if not line.startswith(_RAYS):
            self._backlog.put(self._to, f"{self._prefix}{line}\n".encode())

    def end(self) -> None:
        self._lines.feed(b"", final=True)
        self._poll.unregister(self._fd)
        os.close(self._fd)


def _write(fd: int, line: bytes) -> None:
    """One that cannot be written, for its reader is gone, is nobody's loss."""
    view = memoryview(line)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as exc:
        log.debug("a line could not be written: %s", exc)


def _guarded(body: Callable[[], None]) -> None:
    """Pipes that nobody reads any more would stop user code: better a fresh container."""
    try:
        body()
    except BaseException:
        log.exception("the pod's process cannot show the output of feeders any more")
        os._exit(EXIT_BROKEN)
