"""The supervisor's messages over its single port, by the peer's role. The messages are JSON, and follow the handshake.

The role in the handshake states the purpose of a connection, and requires that role's key (`core.keys`):

sidecar   s -> c  {"type": "feeders", "feeders": [{"name", "instance", "host", "port", "link"}], "desired": n,
                   "notes": [...], "out_of_memory": [name]}  right after the handshake and at every change.
                   "link" is the wrapped key for connections to that process
          c -> s  {"type": "metrics", "metrics": {counter: n}, "receivers": n, "failures": [failure]}   every second and
                   at a failure; the last one of each sidecar is kept. A failure, {"rank", "feeder", "reason", "text"},
                   is reported until its trainer has taken a later batch
          c -> s  {"type": "have", "digest", "nbytes"}  this sidecar can upload that blob
          s -> c  {"type": "want", "digest"}            upload it, over a connection of role "upload"
          c -> s  {"type": "replace", "name", "instance", "reason"}   that feeder process hangs
feeder    c -> s  {"type": "ready", "host", "port", "instance", "pid", "node", "session", "link"}
          s -> c  {"type": "drain"}                     no longer listed: report once no work is left
          c -> s  {"type": "drained"}
          c -> s  {"type": "trouble", "cause", "why"}   it serves, but something is wrong
          c -> s  {"type": "costs", "costs": {sum: n}}  `core.costs`, every two seconds while batches are built
          c -> s  {"type": "ended", "cause", "why"}     the only message, from the feeder's starter: how it exited
upload    c -> s  {"type": "blob", "digest", "nbytes"}, then the bytes;  s -> c  {"type": "stored"}
blob      c -> s  {"type": "get", "digest", "nbytes", "host", "port"}   from a feeder, which will serve the blob there
          s -> c  {"type": "blob", "digest", "nbytes"}, then the bytes, or {"type": "gone"}: nobody has it now; or
                  {"type": "peer", "host", "port"}: a feeder that answers the same "get" with the blob
          c -> s  {"type": "stored"}, or "get" again, if that feeder does not have it
control   c -> s  {"type": "scale", "feeders": n} | {"type": "status", "brief": bool} | {"type": "stop" | "end"}
          s -> c  {"type": "ok"} | {"type": "error", "message"}
          s -> c  {"type": "status", "pid", "up_seconds", "desired", "ready", "notes": [...],
                   "feeders": [{"name", "state", "seconds", "cause", "why", "host", and once its process has reported,
                                "instance", "port", "pid", "node", "session"}],
                   "sidecars": {name: {"metrics", "receivers"}}, "failures": [failure with its "sidecar"],
                   "measures": {...}, `core.measures`, once there are enough batches,
                   "ended": bool, true once all feeders are gone after "end"; the supervisor keeps running,
                   "ray": {"version", and the settings that its GCS reports, by Ray's names}}   "ray" is empty, and
                   no feeder is placed, until Ray has answered. A failure outlives its sidecar until any trainer takes
                   a batch, so that the next attempt of a job shows why the last one ended. A brief status contains
                   only the feeders that show a problem (see `brief`)

The module also computes rates from two readings of the counters, and shortens a failure to one line for a status.
"""

from __future__ import annotations

import ipaddress
import json
import signal
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from dataloaderjob.core import errors, keys, sockets
from dataloaderjob.core.errors import DataLoaderJobError, RemoteProtocolError, ServiceError
from dataloaderjob.core.handshake import BY_NAME, BY_ROLE, connect
from dataloaderjob.core.processes import signal_name
from dataloaderjob.core.settings import FeederSettings, read_own_key
from dataloaderjob.core.sockets import MAX_MESSAGE_NBYTES, Connection
from dataloaderjob.core.texts import clean, clean_lines

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

    from dataloaderjob.core.credentials import Credentials

MAX_FEEDERS = 4096
"""Maximum number of feeders that a supervisor keeps for one job."""
MAX_REQUEST_NBYTES = 64 * 1024
"""Maximum size, in bytes, of a request or a report."""
MAX_OF_FEEDERS = 1024
"""Maximum number of connections with the feeders' key from one address. Each has a thread."""
EXIT_RAY_LATE = 3
"""The supervisor's exit code if ray.init did not return."""
EXIT_RAY_LOST = 4
"""The supervisor's exit code if Ray or the feeder host has disappeared, or has refused the supervisor."""
EXIT_LEASE_OVER = 5
"""A feeder's exit code if it had no supervisor for the duration of its lease."""
EXIT_RAY_REFUSED = 6
"""Exit code of a head's container if the existing Ray cluster has another version of Ray or Python."""
EXITS_RAY = frozenset({EXIT_RAY_LATE, EXIT_RAY_LOST})
COUNTERS = (
    "next_calls", "nbytes", "wait_ns", "step_ns", "retries", "hedges", "late_copies", "failures",
    "feeders_lost", "copies", "stage_ns", "receiver_cpu_ns",
)  # fmt: skip
READ = (*COUNTERS, "used_nbytes", "pool_nbytes")
"""A sidecar's metrics from which a job's rates are computed."""
OF_RANK = ("next_calls", "wait_ns", "step_ns", "nbytes", "ready")
"""Metrics that a sidecar reports for each of its ranks, in this order."""
Readings = Mapping[str, Mapping[str, int]]
"""Each sidecar's metrics, by the sidecar's name."""
FIELDS = ("feeder", "reason", "text")
MAX_TEXT = 400
MAX_NAME = 253
MODULE_MISSING = "ModuleMissing"
USER_CODE = "UserCodeFailed"
UNKNOWN = "BatchFailed"


class Cause(StrEnum):
    """Causes that keep a feeder from being ready. They also serve as reasons in a job's condition."""

    STARTS = "FeederStarts"
    NO_ROOM = "NoRoom"
    REGISTER_TIMEOUT = "WorkerRegisterTimeout"
    """No worker process registers with its raylet in time."""
    FAILS = "FeederFails"
    """The feeder's process exits, or raises an error, before it reports."""
    LOST = "FeederLost"
    HANGS = "FeederHangs"
    REFUSED = "FeederRefused"
    """Ray does not accept the feeder."""
    OUT_OF_MEMORY = "OutOfMemory"
    """The feeder's process, or one that runs user code, was killed for lack of memory. The feeder may serve again by
    now."""


LASTING = frozenset({Cause.REGISTER_TIMEOUT, Cause.FAILS, Cause.REFUSED, Cause.OUT_OF_MEMORY})
"""Causes that a restart does not remove."""


def ask(
    host: str, port: int, job_key: bytes, *, job: str, message: dict[str, Any], timeout_s: float = 10.0,
    tls: Credentials | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Sends one request as a control client. `tls` contains the certificates of this process if the job uses TLS.

    Raises ServiceError if the supervisor refuses the request. Raises OSError and ProtocolError.
    """
    with connect(
        (host, port), keys.of_job(job_key), role="control", name="control", job=job, timeout_s=timeout_s,
        tls=tls,
    ) as sock:  # fmt: skip
        sock.settimeout(timeout_s)
        sockets.send_message(sock, message)
        answer = sockets.recv_message(sock)
    if answer.get("type") == "error":
        raise ServiceError(f"the supervisor refused {message.get('type')!r}: {answer.get('message')}")
    return answer


def connect_as_feeder(settings: FeederSettings, tls: Credentials | None) -> Connection:
    """Returns a connection on which a feeder, or its starter, reports to the supervisor. Raises InputError if the key
    cannot be read. Raises OSError and ProtocolError."""
    if settings.supervisor_host is None:
        raise ServiceError(f"{settings.name} has no supervisor to report to")
    return connect(
        (settings.supervisor_host, settings.supervisor_port), read_own_key(settings), role=keys.FEEDER_ROLE,
        name=settings.name, job=settings.job, versions=BY_NAME if settings.own_key else BY_ROLE, tls=tls,
    )  # fmt: skip


def worst(feeders: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns the feeder whose problem a status should report, or None if no feeder has one. Feeders that are not ready
    come first. Among equals, those with a lasting cause come first."""
    told = [f for f in feeders if f.get("why")]
    return min(told, key=lambda f: (f.get("state") == "ready", not _is_lasting(f.get("cause"))), default=None)


def _is_lasting(cause: object) -> bool:
    """Returns True for a cause in LASTING. A supervisor runs in the user's image, and may report anything."""
    return isinstance(cause, str) and cause in LASTING


def brief(status: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a status without the parts that an operator ignores: at most a few hundred KB, for any number of
    feeders."""
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
            name: {
                "metrics": {k: n for k, n in report["metrics"].items() if k in READ and n},
                **({"receivers": report["receivers"]} if report.get("receivers") else {}),
            }
            for name, report in status["sidecars"].items()
        },
    }


def name_of(index: int) -> str:
    return f"feeder-{index}"


def index_of(name: str) -> int | None:
    """Returns the number in a feeder's name, or None if `name` is not the name of a feeder."""
    head, _, tail = name.rpartition("-")
    return int(tail) if head == "feeder" and tail.isdecimal() and str(int(tail)) == tail else None


def ended_text(code: int, words: str, memory: str = "") -> str:
    """Describes the end of a feeder's process.

    `code` is the exit code as `subprocess` reports it, and `words` is the last line that the process printed. If the
    kernel killed the process for lack of memory, `memory` describes the memory that it could use.
    """
    if memory:
        return f"its process ran out of memory, and the kernel killed it; {memory}"
    if code < 0:
        how = f"was killed by {signal_name(-code)}"
        if -code == signal.SIGKILL and not words:
            words = "memory may have run out; check the kernel's log"
    else:
        how = f"ended with code {code}"
    return f"its process {how}: {clean(words, MAX_TEXT) or 'it printed nothing'}"


def text(message: dict[str, Any], field: str, most: int = MAX_MESSAGE_NBYTES) -> str:
    """Returns a text field of a peer's message, of at most `most` characters. Raises RemoteProtocolError."""
    value = message.get(field)
    if not isinstance(value, str):
        raise RemoteProtocolError(
            f"in a {message.get('type')!r} message, {field!r} must be a string, but is {value!r}"
        )
    if len(value) > most:
        raise RemoteProtocolError(
            f"in a {message.get('type')!r} message, {field!r} must have at most {most} characters, but has {len(value)}"
        )
    return value


def host_of(message: dict[str, Any], peer: str) -> str:
    """Returns the address at which a feeder reports that it serves. `peer` is the address from which it has connected.
    The two may differ, because a feeder may have several networks, or be behind NAT.

    Raises RemoteProtocolError if the text is not an IP address, or if the feeder cannot have this address.
    """
    host = text(message, "host", MAX_NAME)
    try:
        found, own = (_plain(ipaddress.ip_address(address)) for address in (host, peer))
    except ValueError as exc:
        raise RemoteProtocolError(f"a feeder's host must be an IP address, but is {host!r}") from exc
    misplaced = (found.is_loopback and not own.is_loopback) or (found.is_link_local and not own.is_link_local)
    if misplaced or found.is_unspecified or found.is_multicast:
        raise RemoteProtocolError(
            f"a feeder must report an address of its own that its peers can reach, but this one, which has connected "
            f"from {peer}, reports {host}"
        )
    return host


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Converts an IPv4 address that is written as an IPv6 address back to IPv4."""
    return getattr(address, "ipv4_mapped", None) or address


def number(message: dict[str, Any], field: str, limit: int) -> int:
    """Returns a whole number from 0 to `limit` from a peer's message. Raises RemoteProtocolError."""
    value = message.get(field)
    if type(value) is not int or not 0 <= value <= limit:
        raise RemoteProtocolError(
            f"in a {message.get('type')!r} message, {field!r} must be from 0 to {limit}, but is {value!r}"
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of the loader over a few seconds."""

    batches_per_s: float = 0.0
    nbytes_per_s: float = 0.0
    stall: float | None = None
    """Share of the trainers' time spent waiting in next(), or None while nobody iterates."""
    occupancy: float | None = None
    """Share of the pools in use, or None without pools."""
    stage_s: float | None = None
    """Time that a batch spends in the trainer's device_stage, or None without one."""


def occupancy(pools: Iterable[Mapping[str, Any]]) -> float | None:
    """Returns the share of these pools that is in use, or None without pools. An item may be the sum of several
    pools."""
    known = [(int(pool.get("used_nbytes", 0)), int(pool.get("pool_nbytes", 0))) for pool in pools]
    size = sum(size for _, size in known)
    return sum(used for used, _ in known) / size if size else None


def between(before: Readings, after: Readings, seconds: float) -> Rates:
    """Returns the rates of all sidecars together. A sidecar that is in only one of the readings is ignored, because the
    increase of its counters is unknown."""
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


MAX_FAILURE = 100_000
"""Maximum number of characters of a message that `pack_failure` packs. It fits in a frame."""


def pack_failure(error: str, message: str) -> bytes:
    """Returns the FAILED payload for one of our own errors, with the name of its class in `core.errors`."""
    return json.dumps({"service": error, "message": message[:MAX_FAILURE]}).encode()


MAX_MESSAGE = 16_000
"""Maximum number of characters of a message that `unpack_failure` returns."""
FEEDERS_ERRORS = ("ServiceError", "OutOfMemory", "InputError")
"""Our own errors that a feeder may report. Only a receiver may report the others."""


def unpack_failure(payload: bytes | memoryview, known: Container[str] | None = None) -> DataLoaderJobError:
    """Returns the error that `pack_failure` packed. Returns a ServiceError if its class is unknown, or not in `known`.
    Raises RemoteProtocolError for any other payload."""
    failure = sockets.parse_message(payload, "a failure of the service")
    name, message = failure.get("service"), failure.get("message")
    if not isinstance(name, str) or not isinstance(message, str):
        raise RemoteProtocolError("a failure of the service must have a class and a message, both strings")
    cls = errors.named(name) if known is None or name in known else ServiceError
    return cls(clean_lines(message, MAX_MESSAGE))


def describe_failure(payload: bytes) -> dict[str, str]:
    """Returns `feeder` (empty if no single feeder failed), `reason` (CamelCase) and `text` of a FAILED payload."""
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
    except (ValueError, LookupError, TypeError, RecursionError):
        return _line("", UNKNOWN, "a batch failed, and its feeder's report cannot be read")
    return _line(feeder, MODULE_MISSING if name == "ModuleNotFoundError" else USER_CODE, text)


def failure_passed(failed: tuple[int, int], stream: int, awaited: int) -> bool:
    """Returns True if a trainer has taken a batch after the failed one, from the same iterator or a later one. `failed`
    is (stream, ticket). The trainer now awaits ticket `awaited` of `stream`. Raising the failure counts as taking the
    failed ticket."""
    return (stream > failed[0] and awaited > 0) or (stream == failed[0] and awaited > failed[1] + 1)


def _line(feeder: str, reason: str, text: str) -> dict[str, str]:
    return {
        "feeder": clean(feeder, MAX_NAME),
        "reason": clean(reason, MAX_NAME),
        "text": clean(text, MAX_TEXT),
    }
