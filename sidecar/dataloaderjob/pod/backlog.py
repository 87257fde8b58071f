"""Lines between those who print them and a writer that may be slow. Bounded: the newest are left out, counted."""

from __future__ import annotations

import threading
from collections import deque

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
