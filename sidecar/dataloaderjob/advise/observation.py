"""The observation of one loader: its phases, the times of its next() calls, and their averages. This module is pure:
clock readings are arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import median

SKIPPED = 3
"""Number of steps at the start that do not count. During them, code is compiled, allocators grow and workers start."""
LEAST = 5
"""Minimum number of steps in a phase. Once the phase's time is up, this number suffices."""
OBSERVE_S, REPLAY_S = 30.0, 15.0
"""Maximum duration of each phase in seconds. A phase lasts longer until it has LEAST steps."""
REPLAYED = 20
"""Number of steps in the replay."""
SHORT = 10
"""Minimum number of steps to observe in a loader with short epochs."""
PAUSE = 5.0
"""A step that takes more than this many times the median is a pause, such as a checkpoint or an evaluation. It does not
count."""


class WatchPhase(Enum):
    OBSERVING = auto()
    """The script gets its own batches."""
    REPLAYING = auto()
    """The script gets its last batches again, without delay, so that a step without waiting can be measured."""
    DONE = auto()


@dataclass(slots=True)
class Steps:
    """Times of one phase's steps, in seconds."""

    waits: list[float] = field(default_factory=list)
    thinks: list[float] = field(default_factory=list)
    """Times from the return of next() to the next call of next()."""

    @property
    def count(self) -> int:
        return len(self.thinks)

    def step_s(self) -> float:
        """Returns the median duration of a step without the wait for its batch, in seconds."""
        return median(self.thinks)

    def period_s(self, *, is_queued: bool = False) -> float:
        """Returns the time from one batch to the next in seconds, without pauses. It uses the mean of the waits rather
        than their median, because they come in bursts.

        With `is_queued`, it also uses the mean of the steps. The loop then queues its work on a device, and waits for
        the device only in some steps.
        """
        longest = PAUSE * median(self.thinks)
        kept = [
            (wait, think) for wait, think in zip(self.waits, self.thinks, strict=True) if think <= longest
        ]
        waits = sum(wait for wait, _ in kept) / len(kept)
        return waits + (sum(think for _, think in kept) / len(kept) if is_queued else self.step_s())


def steps_of(wanted: int, batches: int | None) -> int:
    """Returns the number of steps to observe: at most `wanted`, and few enough to end within the first epoch, because
    the script may have no second one. `batches`: the number of batches of an epoch; None if unknown."""
    if batches is None:
        return wanted
    return min(wanted, max(SHORT, batches - SKIPPED - 1))


class Observation:
    """The observation of one loader. The caller reports each call and each return of next()."""

    def __init__(self, steps: int, now: float) -> None:
        self.phase = WatchPhase.OBSERVING
        self.observed, self.replayed = Steps(), Steps()
        self._wanted, self._began, self._skipped = steps, now, 0
        self._called = self._returned = 0.0
        self._is_open = False
        """True if next() has returned a batch and the step with that batch has not ended."""
        self._wait = self._elsewhere = 0.0

    def called(self, now: float, *, is_first: bool) -> None:
        """Records that the script calls next(). `is_first` is true for the first call on an iterator, which does not
        end a step."""
        self._called = now
        if self._is_open and not is_first:
            self._count(self._wait + self._elsewhere, now - self._returned - self._elsewhere)
            self._advance(now)
        self._is_open = False

    def returned(self, now: float) -> None:
        """Records that next() returns a batch."""
        self._wait, self._returned, self._is_open = now - self._called, now, True
        self._elsewhere = 0.0

    def waited_elsewhere(self, seconds: float) -> None:
        """Records that the step waited for another loader's batch, as in a loop over zip(one_loader,
        another_loader)."""
        self._elsewhere += seconds

    def finish(self) -> None:
        """Ends the observation early. The steps observed so far are used."""
        self.phase = WatchPhase.DONE

    def _count(self, wait_s: float, think_s: float) -> None:
        if self.phase is WatchPhase.OBSERVING and self._skipped < SKIPPED:
            self._skipped += 1
            return
        steps = self.observed if self.phase is WatchPhase.OBSERVING else self.replayed
        steps.waits.append(wait_s)
        steps.thinks.append(think_s)

    def _advance(self, now: float) -> None:
        if self.phase is WatchPhase.OBSERVING:
            if self._is_enough(self.observed, self._wanted, OBSERVE_S, now):
                self.phase, self._began = WatchPhase.REPLAYING, now
        elif self.phase is WatchPhase.REPLAYING and self._is_enough(self.replayed, REPLAYED, REPLAY_S, now):
            self.phase = WatchPhase.DONE

    def _is_enough(self, steps: Steps, wanted: int, most_s: float, now: float) -> bool:
        return steps.count >= wanted or (steps.count >= LEAST and now - self._began > most_s)
