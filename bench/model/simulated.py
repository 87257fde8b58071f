"""Pipelines in virtual time: feeders, a link, receivers and trainers as queues. Pure.

The simulation shares no formula with `core/sizing.py`. It only has queues with service times, a window, and the rule
that trainers take batches in order. Its receivers cost other amounts than the model's constants.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dataloaderjob.core.sizing import WINDOW, Pipeline, rate, spread

BATCHES = 1200
"""Batches of all ranks in a run; the first fifth does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The truth about one pipeline. Times are in seconds."""

    name: str
    seed: int
    feeders: int
    ranks: int
    step_s: float
    make_s: float
    """Mean time to make a batch."""
    kind: str
    """Distribution of that time."""
    cpu_share: float
    nbytes: int
    link: float
    window: int | None
    """Batches under way for a rank; None: as many as the loader has by default."""
    slots: int | None
    receive_s_per_gb: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What an observer of a run sees."""

    rate: float
    step_s: float
    times: list[float]


def pipelines() -> Iterator[Simulated]:
    """Thirty pipelines, five of each kind."""
    kinds = ("even", "varied", "heavy tail", "narrow link", "slots", "many ranks")
    for seed in range(30):
        draw, kind = random.Random(seed), kinds[seed % len(kinds)]
        ranks = draw.choice((4, 8, 16)) if kind == "many ranks" else draw.choice((1, 1, 2))
        feeders = draw.randint(1, 8) * max(1, ranks // 4)
        step_s, nbytes = draw.uniform(0.02, 0.3), int(10 ** draw.uniform(4, 7.5))
        demand = ranks / step_s
        make_s = feeders / demand * draw.uniform(0.7, 4.0)
        slots = None
        if kind == "slots":
            ranks, slots = 1, draw.randint(feeders, 2 * feeders)
        link = 1e12
        if kind == "narrow link":
            link = min(demand, feeders / make_s) * draw.uniform(0.8, 1.6) * nbytes
        yield Simulated(
            name=f"{kind} {seed // len(kinds) + 1}", seed=seed, feeders=feeders, ranks=ranks, step_s=step_s,
            make_s=make_s, kind=kind, cpu_share=draw.uniform(0.1, 1.0), nbytes=nbytes, link=link,
            window=None, slots=slots, receive_s_per_gb=draw.uniform(0.2, 0.45),
        )  # fmt: skip


def duration(one: Simulated, draw: random.Random) -> float:
    """The time that one batch takes to make."""
    if one.kind == "heavy tail":
        return one.make_s * (draw.uniform(8, 12) if draw.random() < 0.05 else 10 / 19)
    if one.kind == "varied":
        return one.make_s * draw.lognormvariate(-0.125, 0.5)
    return one.make_s * draw.uniform(0.9, 1.1)


class _Run:
    """One run in virtual time."""

    def __init__(self, one: Simulated) -> None:
        self.one, self.draw = one, random.Random(one.seed + 1000)
        self._window = max(16, 2 * one.feeders) if one.window is None else one.window
        self.times: list[float] = []
        self.taken_at: list[float] = []
        self._events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self._order = 0
        self._idle = deque(range(one.feeders))
        self._issued, self._taken = [0] * one.ranks, [0] * one.ranks
        self._busy_slots: set[int] = set()
        self._arrived: list[set[int]] = [set() for _ in range(one.ranks)]
        self._waits = [True] * one.ranks
        self._link_free, self._receiver_free = 0.0, [0.0] * one.ranks
        self._turn = 0
        self._of_slot = list(range(one.slots or 0))
        """The next batch of each slot."""
        self._handlers = {"made": self._on_made, "arrived": self._on_arrived, "step": self._on_step}

    def run(self) -> Measured:
        self._hand_out(0.0)
        while len(self.taken_at) < BATCHES:
            now, _, what, about = heapq.heappop(self._events)
            self._handlers[what](now, *about)
        first = BATCHES // 5
        seconds = self.taken_at[-1] - self.taken_at[first]
        return Measured((BATCHES - 1 - first) / seconds, self.one.step_s, self.times)

    def _later(self, at: float, what: str, *about: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, what, about))

    def _next_ticket(self) -> tuple[int, int] | None:
        """The next ticket that may be made, of the ranks in turn. A slot makes one batch at a time, in order."""
        one = self.one
        for i in range(one.ranks):
            rank = (self._turn + i) % one.ranks
            if one.slots is None:
                if self._issued[rank] - self._taken[rank] < self._window:
                    self._turn = rank + 1
                    self._issued[rank] += 1
                    return rank, self._issued[rank] - 1
                continue
            for slot in range(one.slots):
                number = self._of_slot[slot]
                if slot not in self._busy_slots and number - self._taken[rank] < max(self._window, one.slots):
                    self._busy_slots.add(slot)
                    self._of_slot[slot] += one.slots
                    return rank, number
        return None

    def _hand_out(self, now: float) -> None:
        while self._idle and (ticket := self._next_ticket()) is not None:
            feeder, took = self._idle.popleft(), duration(self.one, self.draw)
            self.times.append(took)
            self._later(now + took, "made", feeder, *ticket)

    def _on_made(self, now: float, feeder: int, rank: int, number: int) -> None:
        one = self.one
        self._idle.append(feeder)
        if one.slots is not None:
            self._busy_slots.discard(number % one.slots)
        self._link_free = max(self._link_free, now) + one.nbytes / one.link
        received = (
            max(self._receiver_free[rank], self._link_free) + 1e-4 + one.receive_s_per_gb * one.nbytes / 1e9
        )
        self._receiver_free[rank] = received
        self._later(received, "arrived", rank, number)
        self._hand_out(now)

    def _take(self, now: float, rank: int) -> None:
        if self._waits[rank] and self._taken[rank] in self._arrived[rank]:
            self._arrived[rank].remove(self._taken[rank])
            self._waits[rank] = False
            self._taken[rank] += 1
            self.taken_at.append(now)
            self._later(now + self.one.step_s, "step", rank)
            self._hand_out(now)

    def _on_step(self, now: float, rank: int) -> None:
        self._waits[rank] = True
        self._take(now, rank)

    def _on_arrived(self, now: float, rank: int, number: int) -> None:
        self._arrived[rank].add(number)
        self._take(now, rank)


def measure(one: Simulated) -> Measured:
    return _Run(one).run()


def observed(one: Simulated, found: Measured) -> Pipeline:
    """The model's input, from what an observer sees with the present number of feeders."""
    mean = statistics.fmean(found.times)
    return Pipeline(
        period_s=one.ranks / found.rate, step_s=found.step_s, cpu_s=mean * one.cpu_share, wall_s=mean,
        nbytes=one.nbytes, spread=spread(found.times), longest_s=_longest(found.times), ranks=one.ranks,
        slots=one.slots, link=one.link,
    )  # fmt: skip


def _longest(times: list[float]) -> float:
    """The mean of the slowest batches of a window."""
    return statistics.fmean(max(times[at : at + WINDOW]) for at in range(0, len(times) - WINDOW + 1, WINDOW))


def row(one: Simulated) -> dict[str, object]:
    """Predicts the rate with twice the feeders, and simulates it."""
    now, then = measure(one), measure(replace(one, feeders=2 * one.feeders))
    predicted = rate(observed(one, now), 2 * one.feeders)
    return {
        "name": one.name, "feeders": one.feeders, "ranks": one.ranks, "rate": now.rate, "rate_twice": then.rate,
        "predicted": predicted, "error": abs(predicted / then.rate - 1),
    }  # fmt: skip
