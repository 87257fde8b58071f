"""The events between two consecutive statuses of a supervisor. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dataloaderjob.core.supervision import Cause
from dataloaderjob.local.reporting.series import (
    FAILED,
    LOST,
    MAX_WHAT,
    MEMORY,
    REPLACED,
    SCALED,
    STARTED,
    TROUBLE,
    Event,
)

Status = Mapping[str, Any]
_TROUBLES = frozenset(Cause) - {Cause.STARTS, Cause.LOST}
"""Causes that are reported as events of their own."""


def found(at: float, before: Status, after: Status) -> Iterator[Event]:
    """Yields the events between two statuses of a supervisor. A status is empty if the supervisor did not answer."""
    if not after:
        return
    old = {str(feeder["name"]): feeder for feeder in before.get("feeders", ())}
    new = {str(feeder["name"]): feeder for feeder in after.get("feeders", ())}
    for name, feeder in new.items():
        yield from _of_feeder(at, name, old.get(name), feeder)
    if before:
        yield from (Event(at, name, LOST, "is no longer wanted") for name in old if name not in new)
    was, now = before.get("desired"), after.get("desired")
    if was is not None and now is not None and was != now:
        yield Event(at, "supervisor", SCALED, f"the target changed from {was} to {now} feeders")
    known = [_failure(one) for one in before.get("failures", ())]
    for failure in after.get("failures", ()):
        who, text = _failure(failure)
        if (who, text) not in known:
            yield Event(at, who, FAILED, text)


def _of_feeder(at: float, name: str, old: Status | None, new: Status) -> Iterator[Event]:
    was, is_ready = (old or {}).get("instance"), new.get("state") == "ready"
    why = _short(new.get("why"))
    if new.get("cause") == Cause.OUT_OF_MEMORY:
        if (old or {}).get("cause") != Cause.OUT_OF_MEMORY:
            yield Event(at, name, MEMORY, why)
    elif old is not None and old.get("state") == "ready" and not is_ready:
        yield Event(at, name, LOST, why or f"is {new.get('state')}")
    elif why and why != _short((old or {}).get("why")) and new.get("cause") in _TROUBLES:
        yield Event(at, name, TROUBLE, why)
    if not is_ready:
        return
    if was is not None and new.get("instance") != was:
        took = "another process" if old is None else _process(old, new)
        yield Event(at, name, REPLACED, f"serves again: {took}")
    elif old is None or old.get("state") != "ready":
        yield Event(at, name, STARTED, f"serves (pid {new.get('pid')})")


def _process(old: Status, new: Status) -> str:
    return f"pid {new.get('pid')} replaces pid {old.get('pid')}"


def _failure(found_: Status) -> tuple[str, str]:
    feeder = str(found_.get("feeder") or "")
    where = f" in {feeder}" if feeder else ""
    return f"rank {found_.get('rank')}", _short(f"{found_.get('reason')}{where}: {found_.get('text')}")


def _short(text: Any) -> str:
    words = " ".join(str(text or "").split())
    return words if len(words) <= MAX_WHAT else f"{words[:MAX_WHAT]}…"
