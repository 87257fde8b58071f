"""Warns, once for a process, when leases reach their limit and batches are copied from then on."""

from __future__ import annotations

import sys
import types
import warnings

from dataloaderjob.trainer.pool import Ring

MIN_NBYTES = 16 * 1024
"""To copy smaller batches costs less than to read about it."""
_US = "dataloaderjob"
_warned = False


def warn_once(ring: Ring) -> None:
    """Says how much is held, at the line that took a batch."""
    global _warned
    held = len(ring.leases)
    if _warned or (held > 1 and ring.leased_nbytes < held * MIN_NBYTES):
        return
    _warned = True
    mb = ring.leased_nbytes / 1e6
    if held > 1:
        why = f"this process still holds {held} batches ({mb:.1f} MB of the ring)"
        remedy = (
            "Let go of batches that are not needed (in lists, histories, autograd graphs), clone what is kept, "
            "or, in a job, raise spec.sidecar.sharedMemory"
        )
    else:
        why = f"the shared memory of this sidecar has no room for a ring of batches of {mb:.1f} MB"
        remedy = "Raise spec.sidecar.sharedMemory"
    warnings.warn(f"{why}; further batches are copied out of the ring. {remedy}", stacklevel=_users_level())


def _users_level() -> int:
    """warnings' stack level, for our caller, of the line of the user's that called next()."""
    level = 0
    above: types.FrameType | None = sys._getframe(1)  # noqa: SLF001  warnings knows no other way before 3.12
    while above is not None and str(above.f_globals.get("__name__")).partition(".")[0] == _US:
        level, above = level + 1, above.f_back
    return level + 1
