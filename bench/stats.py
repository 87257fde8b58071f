"""Statistics of paired rounds. Pure: no clock, no files, no global random state.

A claim is about the median of per-round ratios. A ratio above 1 means that ours is better, for costs (lower is better)
and for rates alike. A floor or target holds only if the worse end of the bootstrap 95% interval still meets it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the ends of its bootstrap interval."""

    median: float
    low: float
    high: float


def median(values: Sequence[float]) -> float:
    """Returns the median. Raises ValueError if there are no values."""
    return percentile(values, 0.5)


def percentile(values: Sequence[float], q: float) -> float:
    """Interpolates linearly between the two nearest ranks, like numpy by default. `q` is in [0, 1]."""
    if not values:
        raise ValueError("a percentile needs at least one value, found none")
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"q must be in [0, 1], found {q}")
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def bootstrap(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Returns the median of `values` and its percentile bootstrap 95% interval. The result is deterministic."""
    rng = random.Random(seed)
    n = len(values)
    centre = median(values)
    medians = [median(rng.choices(values, k=n)) for _ in range(resamples)]
    tail = (1.0 - CONFIDENCE) / 2
    return Interval(centre, percentile(medians, tail), percentile(medians, 1.0 - tail))


def paired_ratios(
    ours: Mapping[int, float], peer: Mapping[int, float], *, lower_is_better: bool
) -> list[float]:
    """Returns one ratio for each round that both sides have, above 1 if ours is better.

    Raises ValueError if a figure is 0 or negative, because no cost or rate can be.
    """
    ratios = []
    for number in sorted(ours.keys() & peer.keys()):
        a, b = ours[number], peer[number]
        if a <= 0 or b <= 0:
            raise ValueError(f"round {number}: figures must be above 0, found ours {a} and peer {b}")
        ratios.append(b / a if lower_is_better else a / b)
    return ratios


def verdict(worst: float, *, floor: float | None, target: float | None, lower_is_better: bool) -> str | None:
    """Returns `target`, `floor` or `no`; None if nothing was promised. `worst` is the interval's worse end."""
    if floor is None and target is None:
        return None

    def holds(limit: float | None) -> bool:
        return limit is not None and (worst <= limit if lower_is_better else worst >= limit)

    if holds(target):
        return "target"
    return "floor" if holds(floor) else "no"


def abba(parties: Sequence[T], number: int) -> list[T]:
    """Returns the order of the cells in round `number`: A B C, then C B A, and so on. Drift then hits all alike."""
    return list(parties) if number % 2 == 0 else list(reversed(parties))
