"""Which feeder makes a batch. Another policy is another `choose`.

Whether a feeder's versions fit a trainer's code is decided once for each pair: batches are equal bytes only where
Python, torch, numpy and the CPU's vector units agree; the trainer's facts travel in the bundle, a feeder states its
own in the handshake (`dataloaderjob.codec.facts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dataloaderjob.core.frames import TICKET_DEPTH
from dataloaderjob.sidecar.dispatch.streams import FeederState, Stream

DEPTH_QUICK = 6
QUICK_S = 0.005
LABELS = {"python": "Python", "torch": "torch", "numpy": "numpy"}
"""Facts that must agree, with their names in messages. Any others are not compared."""
_INSTALL = "make the feeder image from the trainer's image plus dataloaderjob[feeder]"


def depth(stream: Stream) -> int:
    """Tickets out at one feeder: two hide the round trip; batches made in a few ms need more.

    Not more than needed: what lies at a slow feeder holds up all that comes after it.
    """
    typical = stream.pace.typical
    return DEPTH_QUICK if typical is not None and typical < QUICK_S else TICKET_DEPTH


def eligible(feeder: FeederState, stream: Stream) -> bool:
    fit = stream.bundle not in feeder.refused and stream.bundle not in feeder.not_loaded
    return feeder.up and not feeder.draining and feeder.suspect_since is None and fit


def choose(
    feeders: Iterable[FeederState], stream: Stream, *, without: Iterable[FeederState] = ()
) -> FeederState | None:
    """The least busy feeder that may take one more ticket of `stream`, None if all are full.

    Busy is what we have out there first, then what the feeder last said that all its sidecars have. A
    feeder is filled up when it is down to half, so that several tickets go in one system call.
    """
    best: FeederState | None = None
    limit = depth(stream)
    skip = list(without)
    for feeder in feeders:
        out = len(feeder.attempts)
        if out >= limit:
            feeder.filling = False
        elif out <= limit // 2:
            feeder.filling = True
        if not feeder.filling or not eligible(feeder, stream) or feeder in skip:
            continue
        if best is None or (len(feeder.attempts), feeder.load) < (len(best.attempts), best.load):
            best = feeder
    return best


def idle(
    feeders: Iterable[FeederState], stream: Stream, *, without: Iterable[FeederState]
) -> FeederState | None:
    """A feeder with nothing to do for us, for a hedge."""
    skip = list(without)
    for feeder in feeders:
        if not feeder.attempts and eligible(feeder, stream) and feeder not in skip:
            return feeder
    return None


def mismatch(trainer: Mapping[str, Any], feeder: Mapping[str, Any]) -> str | None:
    """Returns what differs and what to do, or None when every stated fact of the trainer agrees."""
    differing = [name for name in LABELS if name in trainer and trainer[name] != feeder.get(name)]
    if not differing:
        return None
    found = ", ".join(
        f"{LABELS[name]} {trainer[name]} is needed, the feeder has {feeder.get(name, 'none')}"
        for name in differing
    )
    return f"trainer and feeder differ: {found}; {_INSTALL}"


def caution(trainer: Mapping[str, Any], feeder: Mapping[str, Any]) -> str | None:
    """A difference that is told but does not keep a feeder from working: its CPU's vector units.

    GPU nodes and CPU nodes often differ so. Most datasets do not notice; sums in floating point may.
    """
    if "cpu" not in trainer or trainer["cpu"] == feeder.get("cpu"):
        return None
    return (
        f"CPU capability {feeder.get('cpu', 'unknown')} here, {trainer['cpu']} in the trainer: floating-point sums "
        "may differ in the last bit; set ATEN_CPU_CAPABILITY=default in both where bytes must not"
    )


class Versions:
    """What was found so far."""

    def __init__(self) -> None:
        self._any_refused = False
        self._cautions: set[str] = set()

    def compare(self, stream: Stream, feeder: FeederState) -> str | None:
        """Marks what does not fit in `feeder.refused`. Returns what people should hear, once for each difference."""
        if reason := mismatch(stream.facts, feeder.facts):
            feeder.refused[stream.bundle] = f"{feeder.endpoint.name}: {reason}"
            self._any_refused = True
        elif (reason := caution(stream.facts, feeder.facts)) and reason not in self._cautions:
            self._cautions.add(reason)
            return f"{feeder.endpoint.name}: {reason}"
        return None

    def refusal(self, stream: Stream, feeders: Iterable[FeederState]) -> str | None:
        """Why no feeder can serve this stream; None while one can, or none is connected."""
        if not self._any_refused:
            return None
        up = [feeder for feeder in feeders if feeder.up and not feeder.draining]
        if not up or not all(stream.bundle in feeder.refused for feeder in up):
            return None
        reasons = "; ".join(sorted({feeder.refused[stream.bundle] for feeder in up})[:3])
        return f"no feeder can run this trainer's code: {reasons}"
