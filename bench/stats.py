"""Statistics of paired rounds. Pure: no clock, no files, no global random state.

A claim is about the median of per-round ratios. `ratio` is how many times better ours is, so above 1 is a
win, for costs (lower is better) as for rates. A floor or target holds only if the worse end of the
bootstrap 95 % interval still meets it.
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
    """Raises ValueError when there are none."""
    return percentile(values, 0.5)


def percentile(values: Sequence[float], q: float) -> float:
    """Linear between the two nearest ranks, as numpy's default. q in [0, 1]."""
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
    """Median of `values` and its percentile bootstrap 95 % interval; the same for the same input."""
    rng = random.Random(seed)
    n = len(values)
    centre = median(values)
    medians = [median(rng.choices(values, k=n)) for _ in range(resamples)]
    tail = (1.0 - CONFIDENCE) / 2
    return Interval(centre, percentile(medians, tail), percentile(medians, 1.0 - tail))


def paired_ratios(
    ours: Mapping[int, float], peer: Mapping[int, float], *, lower_is_better: bool
) -> list[float]:
    """One ratio for each round that both sides have, above 1 where ours is better.

    A round in which a side is 0 or negative raises ValueError: no cost or rate is that small.
    """
    ratios = []
    for number in sorted(ours.keys() & peer.keys()):
        a, b = ours[number], peer[number]
        if a <= 0 or b <= 0:
            raise ValueError(f"round {number}: figures must be above 0, found ours {a} and peer {b}")
        ratios.append(b / a if lower_is_better else a / b)
    return ratios


def verdict(worst: float, *, floor: float | None, target: float | None, lower_is_better: bool) -> str | None:
    """`target`, `floor` or `no`; None where nothing was promised. `worst` is the interval's worse end."""
    if floor is None and target is None:
        return None

    def holds(limit: float | None) -> bool:
        return limit is not None and (worst <= limit if lower_is_better else worst >= limit)

    if holds(target):
        return "target"
    return "floor" if holds(floor) else "no"


def abba(parties: Sequence[T], number: int) -> list[T]:
    """Order of the cells in round `number`: A B C, then C B A, and so on, so that drift hits all alike."""
    return list(parties) if number % 2 == 0 else list(reversed(parties))
