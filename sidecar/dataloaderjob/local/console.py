"""What a run shows: lines of several processes, each with its prefix, and one line of progress below them."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

CLEAR = "\r\x1b[K"


class Console:
    """On a terminal the progress line stays at the bottom, else it is a line like others."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self.live = self._err.isatty()
        self._progress = ""

    def line(self, who: str, text: str, is_err: bool) -> None:
        """`[who] text`, at once; without `who` the text alone."""
        stream = self._err if is_err else self._out
        self._write(stream, f"[{who}] {text}\n" if who else f"{text}\n")

    def say(self, text: str) -> None:
        """A line of the run itself, on stderr."""
        self._write(self._err, f"dataloaderjob: {text}\n")

    def progress(self, text: str) -> None:
        if not self.live:
            self.say(text)
            return
        width = shutil.get_terminal_size().columns
        self._progress = f"dataloaderjob: {text}"[: max(1, width - 1)]
        self._write(self._err, "")

    def clear(self) -> None:
        """Takes the progress line away."""
        if self._progress:
            self._progress = ""
            self._write(self._err, CLEAR)

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            if self._progress and self.live:
                self._err.write(CLEAR)
                self._err.flush()
            stream.write(text)
            stream.flush()
            if self._progress and self.live:
                self._err.write(self._progress)
                self._err.flush()
        except (BrokenPipeError, ValueError):  # the reader is gone; the run goes on
            return
