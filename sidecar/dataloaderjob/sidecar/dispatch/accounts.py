"""Settings and counters of one ring's dispatcher. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """What the manifest fixes for one ring."""

    limit_nbytes: int
    """Shared memory that this ring may take, everything counted."""
    ring_nbytes: int | None = None
    """Size of the ring; None: (window + reserve) times the first batch."""
    batch_deadline_s: float = 300.0
    progress_after_s: float = 30.0
    checksum: bool = False


@dataclass(slots=True)
class Counters:
    """Since the receiver started."""

    batches: int = 0
    nbytes: int = 0
    asks: int = 0
    reasks: int = 0
    hedges: int = 0
    late_copies: int = 0
    failures: int = 0
    feeders_lost: int = 0
