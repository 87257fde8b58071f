"""Sanitizing of untrusted text, such as the output of user code, before it is shown in a status, a log or a terminal.

`clean` returns one line, and `clean_lines` keeps line breaks and tabs. Both return valid UTF-8 of bounded length,
without control characters, terminal escape sequences, or characters that reorder or hide others. Clean text is returned
unchanged.
"""

from __future__ import annotations

import re

UNKNOWN = "\ufffd"
"""Unicode's replacement character."""
MAX_CHARS = 4000
"""The default limit, for lines of a log."""
_SPARE = 8
"""Multiple of the limit beyond which text is ignored."""
_ESCAPES = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]?"  # control sequences: colors, cursor, erasing
    "|(?:\x1b\\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)?"  # commands: titles, links, the clipboard
    "|\x1b[ -/]*[0-~]?"
)
_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls other than tab and newline
    "\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
    "\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff"  # surrogates, and code points that are not characters
)
_UNFIT = re.compile(f"[{_HIDDEN}]+")
_LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")


def clean(text: object, most: int = MAX_CHARS) -> str:
    """Returns the text as one line of at most `most` characters."""
    found = _ESCAPES.sub("", str(text)[: _SPARE * most])
    return _cut(_UNFIT.sub(UNKNOWN, " ".join(found.split())), most)


def clean_lines(text: object, most: int = MAX_CHARS) -> str:
    """Returns the text as lines, of at most `most` characters in all."""
    found = _ESCAPES.sub("", str(text)[: _SPARE * most])
    return _cut(_UNFIT.sub(UNKNOWN, _LINE_ENDS.sub("\n", found)), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…" if most else ""
