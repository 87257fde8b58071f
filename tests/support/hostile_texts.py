"""Texts that a hostile container, feeder, sidecar or exception may write, and what no text that is shown may have."""

from __future__ import annotations

import re
import unicodedata

HOSTILE = {
    "colour": "\x1b[31mred\x1b[0m",
    "screen": "gone\x1b[2J\x1b[H\x1b[?25l",
    "eight-bit": "\x9b31mred\x9d0;title\x9c",
    "title": "\x1b]0;owned\x07text",
    "clipboard": "\x1b]52;c;cm0gLXJm\x1b\\text",
    "link": "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "cut-escape": "text\x1b[31",
    "forged-line": "fine\nERROR supervisor: all is lost\r\nINFO job [team/other]",
    "line-separators": "fine\u2028ERROR other\u2029x\x85y\x0bz\x0cw",
    "overwritten": "password: \rREADY   ",
    "backspaces": "evil\b\b\b\bgood",
    "nul": "a\0b",
    "reordered": "exe.\u202egpj\u202c \u2066x\u2069",
    "hidden": "pass\u200bword\ufeff\U000e0041",
    "surrogates": "\ud83d alone \udcff",
    "no-characters": "\ufffe\uffff\ufdd0",
    "long": "x" * 100_000,
    "wide": "\U0001f4a5" * 10_000,
    "label": 'x"} 1\nforged_metric{a="',
}
_BAD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\u200b\ufeff\ud800-\udfff]"
)


def unfit(text: str, most: int, *, lines: bool = False) -> list[str]:
    """What is wrong with a text that is shown; `lines`: it may have several."""
    found = sorted({f"U+{ord(c):04X} ({unicodedata.category(c)})" for c in _BAD.findall(text)})
    if not lines and set(text) & {"\n", "\t"}:
        found.append("several lines")
    if len(text) > most:
        found.append(f"{len(text)} characters")
    return found
