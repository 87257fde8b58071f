"""Bytes of a process's output to lines. Pure."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

MAX_LINE_CHARS = 64 * 1024
"""A longer line is shown in pieces."""
_ENDS = re.compile(r"\r\n|\n|\r")


class Lines:
    """Bytes of a pipe to lines. A carriage return ends a line: progress bars show as they move."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def feed(self, data: bytes, *, final: bool = False) -> None:
        text = self._rest + self._decode(data, final)
        held = ""
        if text.endswith("\r") and not final:  # its newline may come with the next bytes
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
