"""Comparison of the facts that two processes state about themselves. Pure.

Batches are equal bytes only where Python, torch, numpy and the CPU's vector units agree; the trainer's
facts travel in the spec, a feeder states its own in the handshake (`dataloaderjob.fetch.facts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LABELS = {"python": "Python", "torch": "torch", "numpy": "numpy", "cpu": "CPU capability"}
"""Facts that must agree, with their names in messages. Any others are not compared."""
_REMEDIES = {
    "cpu": "run trainer and feeders on the same kind of CPU, "
    "or set ATEN_CPU_CAPABILITY=default in both, so that both compute alike",
}
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
    remedies = dict.fromkeys(_REMEDIES.get(name, _INSTALL) for name in differing)
    return f"trainer and feeder differ: {found}; {' and '.join(remedies)}"
