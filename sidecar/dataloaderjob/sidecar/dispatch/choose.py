"""Which feeder makes a batch. Another policy is another `choose`.

Whether a feeder's versions fit a trainer's code is decided once for each pair: batches are equal bytes only where
Python, torch, numpy and the CPU's vector units agree; the trainer's facts travel in the bundle, a feeder states its
own in the handshake (`dataloaderjob.shipping.facts`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from dataloaderjob.core.blobs import SLOTS
from dataloaderjob.core.frames import TICKET_DEPTH
from dataloaderjob.sidecar.dispatch.streams import FeederState, Stream

DEPTH_QUICK = 6
QUICK_S = 0.005
MISFIT_GRACE_S = 10.0
"""While other feeders are listed and not connected yet, tickets wait so long for one that fits."""
COMPARED = 4
"""Feeders whose load is compared: with the best of a few the load is nearly as even as with the best of all."""
GOLDEN = 0.6180339887498949
"""Multiples of the golden ratio, without their whole parts, lie evenly for any number of them."""
LABELS = {"python": "Python", "torch": "torch", "numpy": "numpy"}
"""Facts that must agree, with their names in messages. Any others are not compared."""
_INSTALL = "make the feeder image from the trainer's image plus dataloaderjob[feeder]"


def depth(stream: Stream) -> int:
    """Tickets out at one feeder: two hide the round trip; batches made in a few ms need more.

    Not more than needed: what lies at a slow feeder holds up all that comes after it.
    """
    typical = stream.pace.typical
    return DEPTH_QUICK if typical is not None and typical < QUICK_S else TICKET_DEPTH


def fits(feeder: FeederState, stream: Stream) -> bool:
    """Checks whether nothing is known that keeps this feeder from making the stream's batches."""
    return stream.bundle not in feeder.refused and stream.bundle not in feeder.not_loaded


class Ranks:
    """Feeders that take tickets, by how many they have: the least busy is found whatever the number of feeders.

    Of feeders that have as many, the one that has had as many for the longest comes first. A feeder takes tickets until
    it has `depth` of them, then again when it is down to half, so that several go in one system call.
    """

    def __init__(self) -> None:
        # A dict from whose front entries go is slow to find the first of the others.
        self._levels = [OrderedDict[str, FeederState]() for _ in range(max(DEPTH_QUICK, TICKET_DEPTH))]

    def place(self, feeder: FeederState) -> None:
        """Files a feeder anew, after anything about it has changed."""
        instance = feeder.endpoint.instance
        if feeder.level is not None:
            del self._levels[feeder.level][instance]
        out = feeder.chosen
        takes = feeder.up and not feeder.draining and feeder.suspect_since is None and feeder.filling
        feeder.level = out if takes and out < len(self._levels) else None
        if feeder.level is not None:
            self._levels[out][instance] = feeder

    def choose(self, stream: Stream) -> FeederState | None:
        """The least busy feeder that may take one more ticket of `stream`, None if all are full.

        Busy is what we have out there first, then, of a few, what the feeder last said that all its sidecars have.
        """
        for level in self._levels[: depth(stream)]:
            if level and (found := self._least_loaded(level, stream)) is not None:
                return found
        return None

    def idle(self, stream: Stream, *, without: Iterable[FeederState]) -> FeederState | None:
        """A feeder with nothing to do for us but slots, for a hedge."""
        skip = list(without)
        return next((f for f in self._levels[0].values() if fits(f, stream) and f not in skip), None)

    def _least_loaded(self, level: Mapping[str, FeederState], stream: Stream) -> FeederState | None:
        best, left = None, COMPARED
        for feeder in level.values():
            if fits(feeder, stream):
                if best is None or feeder.load < best.load:
                    best = feeder
                left -= 1
                if not left:
                    break
        return best


def first_place(rank: int, feeders: int) -> int:
    """Where in the list of feeders a trainer process begins: processes spread over them, however many there are."""
    return int(rank * GOLDEN % 1.0 * feeders)


def mismatch(trainer: Mapping[str, Any], feeder: Mapping[str, Any]) -> str | None:
    """Returns what differs and what to do, or None when every stated fact of the trainer agrees."""
    if trainer.get(SLOTS) and not feeder.get(SLOTS):
        return "its release makes no batches of an IterableDataset: make its image of the trainer's release"
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

    def refusal(self, stream: Stream, feeders: Iterable[FeederState], now: float) -> str | None:
        """Why no feeder can serve this stream; None while one can, none is connected, or one may still come up: in a
        rolling update the first that is there may be of another image."""
        if not self._any_refused:
            return None
        listed = [feeder for feeder in feeders if not feeder.draining]
        up = [feeder for feeder in listed if feeder.up]
        if not up or not all(stream.bundle in feeder.refused for feeder in up):
            stream.refused_since = None
            return None
        if stream.refused_since is None:
            stream.refused_since = now
        if len(up) < len(listed) and now - stream.refused_since < MISFIT_GRACE_S:
            return None
        reasons = "; ".join(sorted({feeder.refused[stream.bundle] for feeder in up})[:3])
        return f"no feeder can run this trainer's code: {reasons}"
