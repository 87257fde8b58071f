"""The supervisor's messages: who says what over its one port. JSON, after the handshake of `core.sockets`.

The role in the handshake says what a connection is for:

sidecar   s -> c  {"type": "feeders", "feeders": [{"name", "instance", "host", "port"}], "desired": n,
                   "notes": [...], "out_of_memory": [name]}  at once after the handshake and at every change
          c -> s  {"type": "metrics", "metrics": {counter: n}, "receivers": n, "failures": [failure]}   every second and
                   at a failure; kept, the last one for each sidecar. A failure, {"rank", "feeder", "reason", "text"},
                   is there until its trainer has taken a batch after it
          c -> s  {"type": "have", "digest", "nbytes"}  this sidecar can upload that blob
          s -> c  {"type": "want", "digest"}            upload it, over a connection of its own
          c -> s  {"type": "replace", "name", "instance", "reason"}   that feeder process hangs
feeder    c -> s  {"type": "ready", "host", "port", "instance", "pid", "node", "session"}
          s -> c  {"type": "drain"}                     no longer listed: say when nothing is owed to anybody
          c -> s  {"type": "drained"}
          c -> s  {"type": "trouble", "cause", "why"}   it serves, and something is wrong all the same
          c -> s  {"type": "ended", "cause", "why"}     the only message, of whoever started it: how its process ended
blob      c -> s  {"type": "blob", "digest", "nbytes"}, then the bytes;  s -> c  {"type": "stored"}
          c -> s  {"type": "get", "digest", "nbytes", "host", "port"}   a feeder, which hands the blob on there
          s -> c  {"type": "blob", "digest", "nbytes"}, then the bytes, or {"type": "gone"}: nobody has it now, or
                  {"type": "peer", "host", "port"}: a feeder that answers the same "get" with the blob
          c -> s  {"type": "stored"}, or "get" once more: that feeder does not have it
control   c -> s  {"type": "scale", "feeders": n} | {"type": "status", "brief": bool} | {"type": "stop"}
          s -> c  {"type": "ok"} | {"type": "error", "message"}
          s -> c  {"type": "status", "pid", "up_seconds", "desired", "ready", "notes": [...],
                   "feeders": [{"name", "state", "seconds", "cause", "why", "host", and of its process, once it has
                                reported, "instance", "port", "pid", "node", "session"}],
                   "sidecars": {name: {"metrics", "receivers"}}, "failures": [failure with its "sidecar"],
                   "ray": {"version", and by Ray's names what its GCS says is in force}}   "ray" is empty, and no
                   feeder placed, until Ray has answered. A failure outlives its sidecar, until any trainer takes
                   a batch: the next attempt of a job starts with the cause of the last one's end. A brief one has
                   only the feeders that say what is wrong, see `brief`

`ask` puts one of these questions to a supervisor; `Cause` is why a feeder is not there. The module also computes rates
from two readings of the counters, and shortens a failure to the line that a status shows: the trainer raises the whole
of it (`making.failures`, or one of our own errors).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dataloaderjob.core import sockets
from dataloaderjob.core.errors import RemoteProtocolError, ServiceError
from dataloaderjob.core.processes import signal_name

MAX_FEEDERS = 4096
"""The most that a supervisor keeps for one job."""
EXIT_RAY_LATE = 3
"""The supervisor's exit code where ray.init did not return."""
EXIT_RAY_LOST = 4
"""The supervisor's exit code where Ray, or the feeder host, was there and is gone, or refused it."""
EXITS_RAY = frozenset({EXIT_RAY_LATE, EXIT_RAY_LOST})
COUNTERS = (
    "next_calls", "nbytes", "wait_ns", "step_ns", "retries", "hedges", "late_copies", "failures",
    "feeders_lost", "copies", "stage_ns",
)  # fmt: skip
READ = (*COUNTERS, "used_nbytes", "pool_nbytes")
"""Metrics of a sidecar that make a job's rates."""
Readings = Mapping[str, Mapping[str, int]]
"""Metrics by sidecar."""
FIELDS = ("feeder", "reason", "text")
MAX_TEXT = 400
MODULE_MISSING = "ModuleMissing"
USER_CODE = "UserCodeFailed"
UNKNOWN = "BatchFailed"


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
    OUT_OF_MEMORY = "OutOfMemory"
    """Its process, or one of user code, was killed for want of memory; it may serve again by now."""


LASTING = frozenset({Cause.REGISTER_TIMEOUT, Cause.FAILS, Cause.REFUSED, Cause.OUT_OF_MEMORY})
"""Causes that starting once more does not take away."""


def ask(
    host: str, port: int, key: bytes, *, job: str, message: dict[str, Any], timeout_s: float = 10.0
) -> dict[str, Any]:
    """One request of a control client. Raises OSError, ProtocolError, and ServiceError when it is refused."""
    with sockets.connect(
        (host, port), key, role="control", name="control", job=job, timeout_s=timeout_s
    ) as sock:
        sock.settimeout(timeout_s)
        sockets.send_message(sock, message)
        answer = sockets.recv_message(sock)
    if answer.get("type") == "error":
        raise ServiceError(f"the supervisor refused {message.get('type')!r}: {answer.get('message')}")
    return answer


def worst(feeders: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The feeder of a status whose cause is to be told: the first with a lasting one, of those that are not ready if
    there are any."""
    told = [f for f in feeders if f.get("why")]
    return min(told, key=lambda f: (f.get("state") == "ready", f.get("cause") not in LASTING), default=None)


def brief(status: Mapping[str, Any]) -> dict[str, Any]:
    """A status without what an operator does not read: some hundred KB at most, of any number of feeders."""
    failures = list(status["failures"])[:1]
    told = {failure.get("feeder") for failure in failures}
    bad = worst(status["feeders"])
    if bad is not None:
        told.add(bad["name"])
    return {
        **status,
        "feeders": [feeder for feeder in status["feeders"] if feeder["name"] in told],
        "notes": [],
        "failures": failures,
        "sidecars": {
            name: {"metrics": {k: n for k, n in report["metrics"].items() if k in READ and n}}
            for name, report in status["sidecars"].items()
        },
    }


def name_of(index: int) -> str:
    return f"feeder-{index}"


def index_of(name: str) -> int | None:
    """The number in a feeder's name, None if it is not one."""
    head, _, tail = name.rpartition("-")
    return int(tail) if head == "feeder" and tail.isdecimal() and str(int(tail)) == tail else None


def ended_text(code: int, words: str, memory: str = "") -> str:
    """How a feeder's process ended. `code`: as `subprocess` gives it; `words`: its last ones; `memory`: what there was
    of it, where the kernel killed the process for want of it."""
    if memory:
        return f"its process ran out of memory, and the kernel killed it; {memory}"
    if code < 0:
        how = f"was killed by {signal_name(-code)}"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The loader over some seconds."""

    batches_per_s: float = 0.0
    nbytes_per_s: float = 0.0
    stall: float | None = None
    """Share of the trainers' time that was spent waiting in next(); None while nobody iterates."""
    occupancy: float | None = None
    """Share of the pools in use; None without pools."""
    stage_s: float | None = None
    """Time of a batch in the trainer's device_stage; None without one."""


def occupancy(pools: Iterable[Mapping[str, Any]]) -> float | None:
    """Share of all these pools, or sums of pools, that is in use."""
    known = [(int(pool.get("used_nbytes", 0)), int(pool.get("pool_nbytes", 0))) for pool in pools]
    size = sum(size for _, size in known)
    return sum(used for used, _ in known) / size if size else None


def between(before: Readings, after: Readings, seconds: float) -> Rates:
    """Rates of all sidecars together. One that only one reading knows has come or gone meanwhile, and counts from its
    next reading on: how much of its counters is of these seconds nobody knows."""
    both = [name for name in after if name in before]
    rise = {
        counter: sum(max(0, after[n].get(counter, 0) - before[n].get(counter, 0)) for n in both)
        for counter in COUNTERS
    }
    seconds, worked = max(seconds, 1e-9), rise["wait_ns"] + rise["step_ns"]
    return Rates(
        batches_per_s=rise["next_calls"] / seconds,
        nbytes_per_s=rise["nbytes"] / seconds,
        stall=rise["wait_ns"] / worked if worked else None,
        occupancy=occupancy(after.values()),
        stage_s=rise["stage_ns"] / 1e9 / max(rise["next_calls"], 1) if rise["stage_ns"] else None,
    )


def pack_failure(error: str, message: str) -> bytes:
    """The FAILED payload of one of our own errors, by the name of its class in `core.errors`."""
    return json.dumps({"service": error, "message": message}).encode()


def describe_failure(payload: bytes) -> dict[str, str]:
    """`feeder` (empty where it is no single one's), `reason` (CamelCase) and `text` of a FAILED payload."""
    try:
        failure = json.loads(payload)
        if "service" in failure:
            return _line("", str(failure["service"]), str(failure["message"]))
        name = str(failure["type"][1])
        feeder, text = str(failure.get("feeder") or ""), f"{name}: {failure['text']}"
        if failure.get("key") is not None:
            text += f" (for index {failure['key']})"
        elif failure.get("phase"):
            text += f" (in {failure['phase']})"
    except (ValueError, KeyError, TypeError, IndexError):
        return _line("", UNKNOWN, "a batch failed, and what its feeder says of it cannot be read")
    return _line(feeder, MODULE_MISSING if name == "ModuleNotFoundError" else USER_CODE, text)


def failure_passed(failed: tuple[int, int], stream: int, awaited: int) -> bool:
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
