"""A command on a terminal of its own, and what a person would see there."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Self

_TOKEN = re.compile(r"\x1b\[(\d*)([AJ])|\x1b\[[\d;]*m|\r|\n|[^\x1b\r\n]+|\x1b")


class Screen:
    """Lines of a terminal that only knows what a table needs: CR, LF, up, erase below, colours. Nothing scrolls away,
    and a line that is too long stays one line."""

    def __init__(self) -> None:
        self.lines = [""]
        self.row = self.column = 0
        self._rest = ""

    def feed(self, text: str) -> None:
        text = self._rest + text
        cut = re.search(r"\x1b(\[[\d;]*)?\Z", text)  # the rest of it comes with the next bytes
        text, self._rest = (text, "") if cut is None else (text[: cut.start()], cut[0])
        for match in _TOKEN.finditer(text):
            token = match[0]
            assert token != "\x1b", f"an unknown sequence: {text[match.start() : match.start() + 12]!r}"
            if match[2] == "A":
                self.row = max(0, self.row - int(match[1] or 1))
            elif match[2] == "J":
                self.lines[self.row :] = [self.lines[self.row][: self.column]]
            elif token == "\r":
                self.column = 0
            elif token == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif not token.startswith("\x1b"):
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + token + line[self.column + len(token) :]
                self.column += len(token)


class OnTerminal:
    """`python -m dataloaderjob.local.cli WORDS`, with a terminal of 100 columns for all that it reads and writes."""

    def __init__(self, *words: str, env: dict[str, str] | None = None, lines: int = 30) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 100, 0, 0))
        self._theirs = theirs
        self.settings = termios.tcgetattr(theirs)
        self.raw = ""
        self.screen = Screen()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dataloaderjob.local.cli", *words],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
            env={**inherited, "TERM": "xterm-256color", **(env or {})},
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                self.end(30)
            self.process.kill()
            self.process.wait()
        if self._ours >= 0:
            os.close(self._ours)
        os.close(self._theirs)

    @property
    def text(self) -> str:
        """What is on the screen now."""
        return "\n".join(self.screen.lines)

    def until(self, seen: Callable[[str], object], timeout_s: float = 90.0) -> str:
        """Waits until `seen` holds of the screen."""
        deadline = time.monotonic() + timeout_s
        while not seen(self.text):
            assert time.monotonic() < deadline, f"it did not come in {timeout_s} s:\n{self.text}"
            ended = self.process.poll() is not None
            assert self._read() or not ended or seen(self.text), f"the end came before:\n{self.text}"
        return self.text

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def hang_up(self) -> None:
        """Closes the window."""
        os.close(self._ours)
        self._ours = -1

    def end(self, timeout_s: float = 60.0) -> int:
        """The exit code, when all that was written has been read."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it did not end in {timeout_s} s:\n{self.text}"
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def is_sane(self) -> bool:
        """Whether the terminal is as it was, with the cursor where a shell's prompt belongs."""
        return termios.tcgetattr(self._theirs) == self.settings and self.screen.column == 0

    def _read(self) -> bool:
        if self._ours < 0:
            time.sleep(0.1)
            return False
        if not select.select([self._ours], [], [], 0.1)[0]:
            return False
        text = self._decoder.decode(os.read(self._ours, 1 << 16))
        self.raw += text
        self.screen.feed(text)
        return True
