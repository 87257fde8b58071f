"""The parser of the status that a job's supervisor reports. It also converts the metrics for the job's status. Pure.
`observe.supervisor_poller` polls the supervisor."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping
from itertools import islice
from typing import Any

from dataloaderjob.api.status import LoaderStatus, RayStatus
from dataloaderjob.core import measures
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.supervision import READ, Rates, Readings, number, text, worst
from dataloaderjob.core.texts import clean
from dataloaderjob_operator.decide.observed import Cause, SupervisorStatus

LARGEST = 1 << 63
MAX_TEXT = 1000
MAX_SIDECARS = 1024
MAX_RANKS = 1_000_000
MAX_NAME = 253
MAX_CONTAINERS = 16_384
"""Maximum number of objects and lists in a status. A brief status of 1,024 sidecars contains 2,100 of them."""
MAX_VALUES = 65_536
_NAME_NBYTES = 8
_COUNTERS = struct.Struct(f"<{len(READ)}Q")
_REASON = re.compile(r"[A-Z][A-Za-z0-9]{1,62}\Z")
_NOTABLE: Mapping[str, float] = {
    "batches_per_second": 0.0,
    "gb_per_second": 0.0,
    "stall_percent": 1.0,
    "occupancy_percent": 10.0,
}
"""Minimum change of each metric that is worth a write. The change must also exceed NOTABLE_SHARE of the written value.
For a small percentage, even a change by half is noise."""
NOTABLE_SHARE = 0.05


def parse(message: Mapping[str, Any]) -> SupervisorStatus:
    """Parses a supervisor's status message. Raises RemoteProtocolError if it is invalid."""
    received = dict(message)
    if text(received, "type") != "status":
        raise RemoteProtocolError(f"expected a status, got {received['type']!r}")
    feeders = [item for item in _list(received, "feeders") if isinstance(item, Mapping)]
    hosts = {str(feeder.get("name")): _host(feeder) for feeder in feeders}
    return SupervisorStatus(
        desired=number(received, "desired", LARGEST),
        ready=number(received, "ready", LARGEST),
        ended=received.get("ended") is True,
        cause=_cause(feeders),
        failure=_failure(_list(received, "failures"), hosts),
        ray=_ray(received.get("ray")),
        sidecars=len(reports := _reports(received)),
        ranks=min(MAX_RANKS, sum(_whole(report.get("receivers")) for report in reports)),
        measures=measures.parse(received.get("measures")),
    )


def readings(message: Mapping[str, Any]) -> Readings:
    """Returns the counters of each sidecar in a status message."""
    sidecars = message.get("sidecars")
    found = {}
    for name, report in islice(sidecars.items(), MAX_SIDECARS) if isinstance(sidecars, Mapping) else ():
        metrics = report.get("metrics") if isinstance(report, Mapping) else None
        if isinstance(metrics, Mapping):
            found[str(name)[:MAX_NAME]] = {counter: _whole(metrics.get(counter)) for counter in READ}
    return found


def pack(found: Readings) -> bytes:
    """Packs the counters of sidecars. The packed counters of a thousand sidecars take 110 KB. As Python objects, they
    would take twenty times as much."""
    return b"".join(
        hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=_NAME_NBYTES).digest()
        + _COUNTERS.pack(*(counters[counter] for counter in READ))
        for name, counters in found.items()
    )


def unpack(packed: bytes) -> Readings:
    """Unpacks counters. The result maps a hash of each sidecar's name to its counters."""
    size = _NAME_NBYTES + _COUNTERS.size
    return {
        packed[at : at + _NAME_NBYTES].hex(): dict(
            zip(READ, _COUNTERS.unpack_from(packed, at + _NAME_NBYTES), strict=True)
        )
        for at in range(0, len(packed), size)
    }


def check_shape(data: bytes) -> None:
    """Raises RemoteProtocolError if a status would take far more memory as objects than as text."""
    lists, values = data.count(b"[") + data.count(b"{"), data.count(b",")
    if lists > MAX_CONTAINERS or values > MAX_VALUES:
        raise RemoteProtocolError(
            f"a status may have at most {MAX_CONTAINERS} objects and {MAX_VALUES} values, but this one has "
            f"{lists} and {values}"
        )


def loader_status(rates: Rates) -> LoaderStatus:
    """Converts rates to the job status's metrics, rounded to three digits."""
    return LoaderStatus(
        batches_per_second=digits(rates.batches_per_s),
        gb_per_second=digits(rates.nbytes_per_s / 1e9),
        stall_percent=digits(100 * (rates.stall or 0.0)),
        occupancy_percent=digits(100 * (rates.occupancy or 0.0)),
    )


def digits(value: float) -> str:
    """Formats a number with three significant digits, at most six decimal places, and no exponent."""
    plain = f"{float(f'{value:.3g}'):.6f}"
    return plain.rstrip("0").rstrip(".")


def notable(written: LoaderStatus, fresh: LoaderStatus) -> bool:
    """Returns True if fresh metrics differ from the written ones by more than noise."""
    return not any(getattr(written, name) for name in _NOTABLE) or any(
        _differs(_metric(getattr(written, name)), _metric(getattr(fresh, name)), floor)
        for name, floor in _NOTABLE.items()
    )


def _differs(old: float, new: float, floor: float) -> bool:
    if floor == 0.0 and (old == 0.0) != (new == 0.0):
        return True
    return abs(new - old) > max(floor, NOTABLE_SHARE * old)


def _metric(metric: str) -> float:
    try:
        return float(metric)
    except ValueError:
        return 0.0


def _cause(feeders: list[Mapping[str, Any]]) -> Cause | None:
    bad = worst(feeders)
    if bad is None:
        return None
    return Cause(_reason(bad.get("cause")), clean(f"{bad.get('name')}: {bad['why']}", MAX_TEXT), _host(bad))


def _failure(failures: list[Any], hosts: Mapping[str, str]) -> Cause | None:
    first = next((item for item in failures if isinstance(item, Mapping)), None)
    if first is None:
        return None
    feeder = str(first.get("feeder") or "")
    who = f"{first.get('sidecar')}, rank {first.get('rank')}, received from {feeder or 'the feeders'}"
    return Cause(
        _reason(first.get("reason")), clean(f"{who}: {first.get('text')}", MAX_TEXT), hosts.get(feeder, "")
    )


def _ray(received: Any) -> RayStatus:
    if not isinstance(received, Mapping):
        return RayStatus()
    return RayStatus(
        version=clean(str(received.get("version") or ""), 32),
        worker_register_timeout_seconds=_whole(received.get("worker_register_timeout_seconds")),
        health_check_period_ms=_whole(received.get("health_check_period_ms")),
        health_check_timeout_ms=_whole(received.get("health_check_timeout_ms")),
        health_check_failure_threshold=_whole(received.get("health_check_failure_threshold")),
    )


def _reports(received: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the reports of connected sidecars."""
    sidecars = received.get("sidecars")
    found = islice(sidecars.values(), MAX_SIDECARS) if isinstance(sidecars, Mapping) else ()
    return [report for report in found if isinstance(report, Mapping)]


def _list(received: Mapping[str, Any], name: str) -> list[Any]:
    found = received.get(name)
    return found if isinstance(found, list) else []


def _whole(found: Any) -> int:
    return found if type(found) is int and 0 <= found < LARGEST else 0


def _reason(found: Any) -> str:
    return found if isinstance(found, str) and _REASON.match(found) else "FeederFails"


def _host(feeder: Mapping[str, Any]) -> str:
    return clean(feeder.get("host") or "", MAX_NAME)
