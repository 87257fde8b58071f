"""The messages between a supervisor and a provider in another process, over a Unix socket. Pure.

    supervisor -> provider   {"ask": "hello"}                                    the first request
                             {"ask": "found"} | {"ask": "memory"}
                             {"ask": "place", "index": n, "feeders": n, "key": hex}      the key of its name
                             {"ask": "kill", "index": n}
                             {"ask": "late", "indices": [n], "taken": n}
    provider -> supervisor   {"session": text, "in_force": {name: value}}        to "hello"
                             {"found": [n]}
                             {"late": [[n, cause, text, dead, host]], "more": bool}
                             {"memory": [[host, text]], "more": bool}
                             {"done": true}                                      to "place" and "kill"
                             {"error": text}                                     to any: a ServiceError

A message is a u32 length and JSON of at most MAX_NBYTES bytes. A long answer is split into parts. The supervisor holds
the job's key, and anyone who holds Ray's token may control the provider. Therefore, no message is a pickle, and the
type and size of each value are checked before use. A provider that lies about feeders can deprive the job of feeders,
but can do nothing worse.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.keys import NBYTES
from dataloaderjob.core.settings import RayTuning
from dataloaderjob.core.supervision import MAX_FEEDERS, Cause
from dataloaderjob.core.texts import clean
from dataloaderjob.providers.provider import Why

LENGTH = struct.Struct("<I")
MAX_NBYTES = 512 * 1024
"""Maximum size of a message. Parsed JSON takes up to 40 times the memory of its text."""
PART = 64
"""Maximum number of entries in one part of a long answer."""
MAX_TEXT = 1000
MAX_NAME = 253
MAX_HOSTS = 1024
"""Maximum number of nodes in an answer about memory."""
MAX_INDEX = (1 << 31) - 1
_KEY = re.compile(f"[0-9a-f]{{{2 * NBYTES}}}")
IN_FORCE = ("version", *RayTuning().config())
"""The settings of Ray that a status reports."""


class Hello(NamedTuple):
    """A provider's answer to the first request."""

    session: str
    in_force: dict[str, Any]


def pack(message: Mapping[str, Any]) -> bytes:
    """Encodes a message."""
    data = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    return LENGTH.pack(len(data)) + data


def length(head: bytes) -> int:
    """Returns the number of bytes that follow a message's head. Raises RemoteProtocolError."""
    (nbytes,) = LENGTH.unpack(head)
    if nbytes > MAX_NBYTES:
        raise RemoteProtocolError(f"a message may have at most {MAX_NBYTES} bytes, but has {nbytes}")
    return int(nbytes)


def parse(data: bytes) -> dict[str, Any]:
    """Parses a message. Raises RemoteProtocolError."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError("a message must be JSON") from exc
    if not isinstance(message, dict):
        raise RemoteProtocolError("a message must be a JSON object")
    return message


# Requests, as the provider's process reads them


def requested_index(request: Mapping[str, Any]) -> int:
    """Returns the feeder's number in a request. Raises RemoteProtocolError."""
    return _whole(request.get("index"), "index", MAX_INDEX)


def requested_feeders(request: Mapping[str, Any], field: str) -> int:
    """Returns a number of feeders from a request. `field`: the name of the request's field. Raises
    RemoteProtocolError."""
    return _whole(request.get(field), field, MAX_INDEX)


def requested_key(request: Mapping[str, Any]) -> str:
    """Returns the key of the requested feeder's name; empty if the supervisor has none. Raises RemoteProtocolError."""
    key = request.get("key", "")
    if not isinstance(key, str) or (key and not _KEY.fullmatch(key)):
        raise RemoteProtocolError(
            f"a feeder's key must have {2 * NBYTES} hexadecimal digits, but has another form"
        )
    return key


def requested_indices(request: Mapping[str, Any]) -> list[int]:
    """Returns the numbers of the feeders that a "late" request asks about. Raises RemoteProtocolError."""
    return _indices(request.get("indices"), "indices")


# Answers, as the provider's process writes them


def hello(session: str, in_force: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: in_force[name] for name in IN_FORCE if type(in_force.get(name)) in (int, str)}
    return {"session": clean(session, MAX_NAME), "in_force": shown}


def late_parts(whys: Sequence[Why]) -> Iterator[dict[str, Any]]:
    rows = [[w.feeder, w.cause.value, clean(w.text, MAX_TEXT), w.dead, clean(w.host, MAX_NAME)] for w in whys]
    return _parts("late", rows)


def memory_parts(killed: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    rows = [[clean(host, MAX_NAME), clean(text, MAX_TEXT)] for host, text in killed.items()]
    return _parts("memory", rows[:MAX_HOSTS])


def error(text: str) -> dict[str, Any]:
    return {"error": clean(text, MAX_TEXT)}


def _parts(field: str, rows: list[Any]) -> Iterator[dict[str, Any]]:
    for start in range(0, max(len(rows), 1), PART):
        yield {field: rows[start : start + PART], "more": start + PART < len(rows)}


# Answers, as the supervisor reads them


def failure(answer: Mapping[str, Any]) -> str | None:
    """Returns the text of an answer that reports an error; None for any other. Raises RemoteProtocolError."""
    return _text(answer["error"], "error", MAX_TEXT) if "error" in answer else None


def read_hello(answer: Mapping[str, Any]) -> Hello:
    """Reads the answer to "hello". Raises RemoteProtocolError."""
    found = answer.get("in_force")
    if not isinstance(found, dict):
        raise _odd("in_force", "an object", found)
    in_force: dict[str, Any] = {}
    for name in IN_FORCE:
        if isinstance(value := found.get(name), str):
            in_force[name] = _text(value, name, MAX_NAME)
        elif value is not None:
            in_force[name] = _whole(value, name, 1 << 53)
    return Hello(_text(answer.get("session"), "session", MAX_NAME), in_force)


def read_found(answer: Mapping[str, Any]) -> list[int]:
    """Returns the numbers of feeders in the answer to "found". Raises RemoteProtocolError."""
    return sorted(set(_indices(answer.get("found"), "found")))


def read_done(answer: Mapping[str, Any]) -> None:
    """Checks that a request was carried out. Raises RemoteProtocolError."""
    if answer.get("done") is not True:
        raise _odd("done", "true", answer.get("done"))


class LateReader:
    """A reader that collects and checks the parts of an answer to "late"."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._awaited = set(indices)
        self.found: list[Why] = []

    def add(self, answer: Mapping[str, Any]) -> bool:
        """Adds a part. Returns True if more follow. Raises RemoteProtocolError."""
        rows, more = _rows(answer, "late", 5)
        for index, cause, text, dead, host in rows:
            number = _whole(index, "late: the feeder", MAX_INDEX)
            if number not in self._awaited:
                raise _odd("late", "a feeder that was asked for, at most once", number)
            self._awaited.remove(number)
            if type(dead) is not bool:
                raise _odd("late: dead", "true or false", dead)
            self.found.append(
                Why(
                    number,
                    _cause(cause),
                    _text(text, "late: text", MAX_TEXT),
                    dead,
                    _text(host, "late: host", MAX_NAME),
                )
            )
        return more


class MemoryReader:
    """A reader that collects and checks the parts of an answer to "memory"."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def add(self, answer: Mapping[str, Any]) -> bool:
        """Adds a part. Returns True if more follow. Raises RemoteProtocolError."""
        rows, more = _rows(answer, "memory", 2)
        before = len(self.found)
        for host, text in rows:
            self.found[_text(host, "memory: host", MAX_NAME)] = _text(text, "memory: text", MAX_TEXT)
        if len(self.found) > MAX_HOSTS or (more and len(self.found) == before):
            raise _odd("memory", f"at most {MAX_HOSTS} nodes, each once", len(self.found))
        return more


def _rows(answer: Mapping[str, Any], field: str, width: int) -> tuple[list[list[Any]], bool]:
    rows, more = answer.get(field), answer.get("more")
    if not isinstance(rows, list) or len(rows) > PART:
        raise _odd(field, f"a list of at most {PART} entries", rows)
    if any(not isinstance(row, list) or len(row) != width for row in rows):
        raise _odd(field, f"entries of {width} values", rows)
    if type(more) is not bool or (more and not rows):
        raise _odd("more", "true after a part with entries, or false", more)
    return rows, more


def _cause(value: Any) -> Cause:
    try:
        return Cause(value)
    except ValueError as exc:
        raise _odd("late: cause", "a known cause", value) from exc


def _indices(value: Any, field: str) -> list[int]:
    if not isinstance(value, list) or len(value) > MAX_FEEDERS:
        raise _odd(field, f"a list of at most {MAX_FEEDERS} numbers", value)
    return [_whole(index, field, MAX_INDEX) for index in value]


def _whole(value: Any, field: str, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise _odd(field, f"a whole number from 0 to {limit}", value)
    return value


def _text(value: Any, field: str, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise _odd(field, f"a string of at most {limit} characters", value)
    return clean(value, limit)


def _odd(field: str, needed: str, found: object) -> RemoteProtocolError:
    shown = (
        clean(repr(found)[:100], 100) if isinstance(found, str | int | float | None) else type(found).__name__
    )
    return RemoteProtocolError(f"{field} must be {needed}, but is {shown}")
