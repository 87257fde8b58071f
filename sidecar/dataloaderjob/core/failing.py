"""A failed ticket in one line, for those who look at a job from outside. Pure.

The trainer raises the whole of it (`codec.failures`, or one of our own errors); here are its feeder, a reason in one
word, and what it says.
"""

from __future__ import annotations

import json

FIELDS = ("feeder", "reason", "text")
MAX_TEXT = 400
MODULE_MISSING = "ModuleMissing"
USER_CODE = "UserCodeFailed"
UNKNOWN = "BatchFailed"


def pack(error: str, message: str) -> bytes:
    """The FAILED payload of one of our own errors, by the name of its class in `core.errors`."""
    return json.dumps({"service": error, "message": message}).encode()


def describe(payload: bytes) -> dict[str, str]:
    """`feeder` (empty where it is no single one's), `reason` (CamelCase) and `text` of a FAILED payload."""
    try:
        told = json.loads(payload)
        if "service" in told:
            return _line("", str(told["service"]), str(told["message"]))
        name = str(told["type"][1])
        feeder, text = str(told.get("feeder") or ""), f"{name}: {told['text']}"
        if told.get("key") is not None:
            text += f" (for index {told['key']})"
        elif told.get("phase"):
            text += f" (in {told['phase']})"
    except (ValueError, KeyError, TypeError, IndexError):
        return _line("", UNKNOWN, "a batch failed, and what its feeder says of it cannot be read")
    return _line(feeder, MODULE_MISSING if name == "ModuleNotFoundError" else USER_CODE, text)


def passed(failed: tuple[int, int], stream: int, awaited: int) -> bool:
    """Whether a trainer that awaits `awaited` of `stream` has taken a batch after the (stream, ticket) that failed, of
    the same iterator or a later one. To raise the failure counts as taking that ticket."""
    return (stream > failed[0] and awaited > 0) or (stream == failed[0] and awaited > failed[1] + 1)


def _line(feeder: str, reason: str, text: str) -> dict[str, str]:
    text = " ".join(text.split())
    return {
        "feeder": feeder,
        "reason": reason,
        "text": text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…",
    }
