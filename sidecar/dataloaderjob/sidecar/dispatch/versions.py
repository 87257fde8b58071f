"""Decides which feeder's versions fit which trainer's code, once for each pair. Pure.

Batches are equal bytes only where Python, torch, numpy and the CPU's vector units agree; the trainer's
facts travel in the bundle, a feeder states its own in the handshake (`dataloaderjob.codec.facts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dataloaderjob.sidecar.dispatch.streams import FeederState, Stream

LABELS = {"python": "Python", "torch": "torch", "numpy": "numpy"}
"""Facts that must agree, with their names in messages. Any others are not compared."""
_INSTALL = "make the feeder image from the trainer's image plus dataloaderjob[feeder]"


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
