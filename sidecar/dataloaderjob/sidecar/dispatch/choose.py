"""The choice of the feeder that makes a batch (`Ranks.choose`).

A feeder's versions are compared with the trainer's. Batches are identical byte for byte only if Python, torch, numpy
and the CPU's vector units agree.
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
"""Time for which tickets wait for a suitable feeder while some listed feeders are not connected yet."""
COMPARED = 4
"""Number of feeders whose loads are compared. Choosing the best of a few balances the load nearly as well as choosing
the best of all."""
GOLDEN = 0.6180339887498949
"""The fractional part of the golden ratio. The fractional parts of its first n multiples are evenly spread, for any
n."""
LABELS = {"python": "Python", "torch": "torch", "numpy": "numpy"}
"""Facts that must agree, with their names in messages."""
_INSTALL = "build the feeder image from the trainer's image plus dataloaderjob[feeder]"


def depth(stream: Stream) -> int:
    """Returns the number of tickets to keep at one feeder. Two hide the round trip, but batches made in a few ms need
    more.

    The number is no higher than needed, because a ticket at a slow feeder delays everything after it.
    """
    typical = stream.pace.typical
    return DEPTH_QUICK if typical is not None and typical < QUICK_S else TICKET_DEPTH


def fits(feeder: FeederState, stream: Stream) -> bool:
    """Returns True unless this feeder is known to be unable to make the stream's batches."""
    return stream.bundle not in feeder.refused and stream.bundle not in feeder.not_loaded


class Ranks:
    """Feeders that take tickets, grouped by their number of tickets, so that the least busy one is found quickly.

    Within a group, the feeder that has been in it longest comes first. A feeder takes tickets until it has `depth` of
    them, and again once at most half of them are left. Thus, several tickets are sent in one system call.
    """

    def __init__(self) -> None:
        # A plain dict is slow to find its first entry once its front entries have been removed.
        self._levels = [OrderedDict[str, FeederState]() for _ in range(max(DEPTH_QUICK, TICKET_DEPTH))]

    def place(self, feeder: FeederState) -> None:
        """Updates a feeder's place after anything about it has changed."""
        instance = feeder.endpoint.instance
        if feeder.level is not None:
            del self._levels[feeder.level][instance]
        out = feeder.chosen
        takes = feeder.up and not feeder.draining and feeder.suspect_since is None and feeder.filling
        feeder.level = out if takes and out < len(self._levels) else None
        if feeder.level is not None:
            self._levels[out][instance] = feeder

    def choose(self, stream: Stream) -> FeederState | None:
        """Returns the least busy feeder that may take one more ticket of `stream`; None if all are full.

        Feeders are compared by the number of this receiver's tickets. A few feeders with equal numbers are then
        compared by the load that they last reported, which includes the tickets of all sidecars.
        """
        for level in self._levels[: depth(stream)]:
            if level and (found := self._least_loaded(level, stream)) is not None:
                return found
        return None

    def idle(self, stream: Stream, *, without: Iterable[FeederState]) -> FeederState | None:
        """Returns a feeder for a hedge, or None. Such a feeder makes nothing for this receiver except slots."""
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
    """Returns the index in the list of feeders at which a rank begins. The indices of any number of ranks are spread
    evenly."""
    return int(rank * GOLDEN % 1.0 * feeders)


def mismatch(trainer: Mapping[str, Any], feeder: Mapping[str, Any]) -> str | None:
    """Describes the facts that must agree but differ, with a remedy. Returns None if all of them agree."""
    if trainer.get(SLOTS) and not feeder.get(SLOTS):
        return "its release cannot make batches of an IterableDataset: build its image from the trainer's release"
    differing = [name for name in LABELS if name in trainer and trainer[name] != feeder.get(name)]
    if not differing:
        return None
    found = ", ".join(
        f"the trainer has {LABELS[name]} {trainer[name]}, but the feeder has {feeder.get(name, 'none')}"
        for name in differing
    )
    return f"trainer and feeder differ: {found}; {_INSTALL}"


def caution(trainer: Mapping[str, Any], feeder: Mapping[str, Any]) -> str | None:
    """Describes a difference in the CPUs' vector units, which does not keep the feeder from working. Returns None if
    there is none.

    GPU nodes and CPU nodes often differ in this. Most datasets are unaffected, but floating-point sums may differ.
    """
    if "cpu" not in trainer or trainer["cpu"] == feeder.get("cpu"):
        return None
    return (
        f"the feeder's CPU capability is {feeder.get('cpu', 'unknown')}, but the trainer's is {trainer['cpu']}, so "
        "floating-point sums may differ in the last bit: if bytes must be equal, set "
        "ATEN_CPU_CAPABILITY=default in both"
    )


class VersionChecks:
    """The results of comparing feeders' facts with trainers' facts."""

    def __init__(self) -> None:
        self._any_refused = False
        self._cautions: set[str] = set()

    def compare(self, stream: Stream, feeder: FeederState) -> str | None:
        """Records a mismatch in `feeder.refused`. Returns a caution for the user, once for each difference."""
        if reason := mismatch(stream.facts, feeder.facts):
            feeder.refused[stream.bundle] = f"{feeder.endpoint.name}: {reason}"
            self._any_refused = True
        elif (reason := caution(stream.facts, feeder.facts)) and reason not in self._cautions:
            self._cautions.add(reason)
            return f"{feeder.endpoint.name}: {reason}"
        return None

    def refusal(self, stream: Stream, feeders: Iterable[FeederState], now: float) -> str | None:
        """Returns the reason why no feeder can serve this stream. Returns None if a feeder can serve it, or may still
        connect: in a rolling update, the first feeder to connect may run another image."""
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
