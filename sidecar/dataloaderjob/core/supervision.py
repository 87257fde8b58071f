"""The supervisor's messages: who says what over its one port. JSON, after the handshake of `core.auth`.

The role in the handshake says what a connection is for:

sidecar   s -> c  {"type": "feeders", "feeders": [{"name", "instance", "host", "port"}], "desired": n,
                   "notes": [...]}  at once after the handshake and at every change
          c -> s  {"type": "metrics", "metrics": {counter: n}, "receivers": n, "failures": [failure]}   every second and
                   at a failure; kept, the last one for each sidecar. A failure, {"rank", "feeder", "reason", "text"},
                   is there until its trainer has taken a batch after it
          c -> s  {"type": "have", "digest", "nbytes"}  this sidecar can upload that blob
          s -> c  {"type": "want", "digest"}            upload it, over a connection of its own
          c -> s  {"type": "replace", "name", "instance", "reason"}   that feeder process hangs
feeder    c -> s  {"type": "ready", "host", "port", "instance", "pid", "node", "session"}
          s -> c  {"type": "drain"}                     no longer listed: say when nothing is owed to anybody
          c -> s  {"type": "drained"}
blob      c -> s  {"type": "blob", "digest", "nbytes"}, then the bytes;  s -> c  {"type": "stored"}
          c -> s  {"type": "get", "digest", "nbytes"}
          s -> c  {"type": "blob", "digest", "nbytes"}, then the bytes, or {"type": "gone"}: nobody has it now
control   c -> s  {"type": "scale", "feeders": n} | {"type": "status"} | {"type": "stop"}
          s -> c  {"type": "ok"} | {"type": "error", "message"}
          s -> c  {"type": "status", "pid", "up_seconds", "desired", "ready", "notes": [...],
                   "feeders": [{"name", "state", "seconds", "cause", "why", "host", and of its process, once it has
                                reported, "instance", "port", "pid", "node", "session"}],
                   "sidecars": {name: {"metrics", "receivers"}}, "failures": [failure with its "sidecar"],
                   "ray": {"version", and by Ray's names what its GCS says is in force}}   "ray" is empty, and no
                   feeder placed, until Ray has answered. A failure outlives its sidecar, until any trainer takes
                   a batch: the next attempt of a job starts with the cause of the last one's end
"""

from __future__ import annotations

import signal
import socket
from enum import StrEnum
from typing import Any

from dataloaderjob.core import sockets
from dataloaderjob.core.errors import RemoteProtocolError, ServiceError

MAX_FEEDERS = 4096
"""That a supervisor keeps of one job."""


class Cause(StrEnum):
    """What keeps a feeder from being ready; the reason of a job's condition, too."""

    STARTS = "FeederStarts"
    NO_ROOM = "NoRoom"
    REGISTER_TIMEOUT = "WorkerRegisterTimeout"
    """No worker process registers with its raylet in time."""
    FAILS = "FeederFails"
    """Its process ends, or raises, before it reports."""
    LOST = "FeederLost"
    HANGS = "FeederHangs"
    REFUSED = "FeederRefused"
    """Ray does not take it."""


LASTING = frozenset({Cause.REGISTER_TIMEOUT, Cause.FAILS, Cause.REFUSED})
"""Causes that starting once more does not take away."""
EXIT_RAY_LATE = 3
"""Of the supervisor: ray.init did not return."""
EXIT_RAY_LOST = 4
"""Of the supervisor: Ray, or the feeder host, was there and is gone, or refused it."""
EXITS_RAY = frozenset({EXIT_RAY_LATE, EXIT_RAY_LOST})


def ask(
    host: str, port: int, key: bytes, *, job: str, message: dict[str, Any], timeout_s: float = 10.0
) -> dict[str, Any]:
    """One request of a control client. Raises OSError, ProtocolError, and ServiceError when it is refused."""
    with socket.create_connection((host, port), timeout=timeout_s) as sock:
        sockets.greet(sock, key, role="control", name="control", job=job)
        sock.settimeout(timeout_s)
        sockets.send_message(sock, message)
        answer = sockets.recv_message(sock)
    if answer.get("type") == "error":
        raise ServiceError(f"the supervisor refused {message.get('type')!r}: {answer.get('message')}")
    return answer


def name_of(index: int) -> str:
    return f"feeder-{index}"


def index_of(name: str) -> int | None:
    """The number in a feeder's name, None if it is not one."""
    head, _, tail = name.rpartition("-")
    return int(tail) if head == "feeder" and tail.isdecimal() and str(int(tail)) == tail else None


def ended_text(code: int, words: str) -> str:
    """How a feeder's process ended. `code`: as `subprocess` gives it; `words`: its last ones."""
    if code < 0:
        try:
            how = f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            how = f"was killed by signal {-code}"
        if -code == signal.SIGKILL and not words:
            words = "memory may have run out, the kernel's log says so"
    else:
        how = f"ended with code {code}"
    return f"its process {how}: {words or 'it said nothing'}"


def text(message: dict[str, Any], field: str) -> str:
    """A text field of a peer's message. Raises RemoteProtocolError."""
    value = message.get(field)
    if not isinstance(value, str):
        raise RemoteProtocolError(
            f"a {message.get('type')!r} message needs the text {field!r}, found {value!r}"
        )
    return value


def number(message: dict[str, Any], field: str, limit: int) -> int:
    """A whole number from 0 to `limit` of a peer's message. Raises RemoteProtocolError."""
    value = message.get(field)
    if type(value) is not int or not 0 <= value <= limit:
        raise RemoteProtocolError(
            f"a {message.get('type')!r} message needs {field!r} from 0 to {limit}, found {value!r}"
        )
    return value
