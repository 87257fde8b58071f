"""Text that others wrote, and how it gets to the API server whatever is in it. Pure.

A body of server-side apply is read as YAML, JSON being a part of that but for its text: an escaped surrogate pair is
refused, as are some characters that come as they are, and an unusual end of a line becomes a space. So each character
goes as UTF-8 where YAML takes it, escaped otherwise, and comes back as it was. A lone surrogate is in neither.
"""

from __future__ import annotations

import json
import re
from typing import Any

UNKNOWN = "\ufffd"
"""Unicode's own sign for what cannot be shown."""
WITHHELD = "the API server refused the text of this condition: the operator's log has it"
"""The message of a condition instead of one for which a status was refused."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that YAML 1.1 does not take as they are; json itself escapes those below a space."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff]+")
_NOT_IN_REASONS = re.compile("[^A-Za-z0-9]+")


def body(value: Any) -> bytes:
    """Writes JSON that is YAML of the same meaning."""
    text = _SURROGATES.sub(UNKNOWN, json.dumps(value, ensure_ascii=False))
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def shown(text: str, most: int) -> str:
    """Makes a text fit for people, with `most` characters at most: what would move their cursor, or is no character, is
    replaced by a sign. A text that has been through it stays as it is."""
    return _CONTROLS.sub(UNKNOWN, text)[:most]


def cut(text: str, nbytes: int) -> str:
    """Cuts a text to so many bytes of UTF-8, and whole characters."""
    return text.encode(errors="replace")[:nbytes].decode(errors="ignore")


def reason(text: str, most: int = 128) -> str:
    """Makes a text one word, for a condition's reason."""
    return _NOT_IN_REASONS.sub("", text)[:most] or "Unknown"
