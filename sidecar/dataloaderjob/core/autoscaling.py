"""The policy that scales a job's feeders. It derives each step from measurements. Pure: callers pass the time.

The wanted number N* is computed by the model (`core.input_bound`): enough feeders to meet the trainers' demand, with
some headroom. It does not depend on the current number, so the policy goes straight to N* instead of adding feeders one
at a time.

    up      N* exceeds the current number by a tenth, and training waits. Training must wait in two consecutive
            measurements, or for at least the share SURE in one
    down    the highest N* of the last DOWN_AFTER_S is at most 0.85 of the current number. At most half of the feeders
            are removed per minute
    hold    otherwise; while anything is unusual (`Situation.frozen`, `Measures.is_steady`); while feeders start

A step up multiplies the number by at most four. On CUDA, it at most doubles the number. A waiting trainer there has
already queued its kernels, and appears able to take more batches than it actually can (`core.measures`).

After each step up, the gain in the rate is compared with the predicted gain. If two comparisons find less than half of
the predicted gain, the job is saturated. Its bottleneck is then one that the model does not include, such as shared
storage. The policy then returns to the number of feeders that the attained rate needs, and keeps it for SATURATED_S.
After that, it tries to add at most a quarter. Each failed attempt doubles the time until the next one.

A step up soon after a step down shows that the step down was wrong. So for a while, no other step down follows.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from dataloaderjob.core.input_bound import InputVerdict, LiveLimit, demand, judge, pipeline_of
from dataloaderjob.core.measures import Measures
from dataloaderjob.core.sizing import HEADROOM, needed

EVERY_S = 10.0
"""Seconds between two steps of the policy."""
UP, DOWN = 1.1, 0.85
"""Multiples of the current number of feeders. While N* is between them, nothing changes."""
WAITS, SURE = 0.02, 0.2
"""Shares of the time that training waits. Above WAITS, training counts as waiting. At SURE or more, one measurement is
enough for a step up."""
FASTEST, CAREFUL = 4, 2
"""Maximum factors of one step up. CAREFUL applies while the demand may be overestimated."""
DOWN_AFTER_S = 300.0
DOWN_EVERY_S = 60.0
DOWN_MOST = 0.5
"""Largest share of feeders removed by one step."""
PENDING_S = 60.0
"""Seconds after which feeders that have not started are no longer expected to start soon."""
SETTLE_S = 15.0
"""Seconds that must pass after a change before rates count. `Measures.rate` covers this time span."""
GAINED = 0.5
"""Share of the predicted gain below which a step up has failed."""
DEARER = 1.1
"""Maximum rise in a batch's cost, as a multiple of the growth in feeders. Above it, the work itself has changed, so the
rates before and after a step up are not comparable."""
SATURATED_S, MOST_SATURATED_S = 600.0, 4800.0
RETRY = 1.25
"""Maximum factor of a step up after a job was saturated."""
REGRET_S = 900.0
"""Seconds after a step down within which a step up shows that the step down was wrong. The next step down then waits
for REGRET_S. Each further mistake doubles this wait."""
HELPED = frozenset({LiveLimit.FEEDERS, LiveLimit.STORAGE, LiveLimit.TRAINER})
"""Bottlenecks that more feeders may relieve."""


class Reason(StrEnum):
    """The reason for a proposal, for conditions and logs."""

    UP = "MoreFeeders"
    DOWN = "FewerFeeders"
    STEADY = "Steady"
    UNKNOWN = "TooFewBatches"
    FROZEN = "Frozen"
    STARTING = "FeedersStart"
    PENDING = "FeedersPending"
    SATURATED = "Saturated"
    AT_LIMIT = "AtLimit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The allowed range for the number of feeders."""

    least: int = 1
    most: int = 32

    def clamp(self, feeders: int) -> int:
        return max(self.least, min(self.most, feeders))


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The state of a job at one time."""

    desired: int
    """Number of feeders that the job should have now."""
    ready: int
    measures: Measures | None
    frozen: str = ""
    """The reason not to change anything now, such as a restart of the trainers. Empty if there is none."""
    step: int = 1
    """Number of feeders in one pod. Feeders are added and removed in multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The number of feeders that the policy proposes, with its reason."""

    feeders: int
    """Number of feeders that the job should have from now on."""
    reason: Reason
    text: str

    def changes(self, situation: Situation) -> bool:
        return self.feeders != situation.desired


@dataclass(slots=True)
class _Expectation:
    """A step up whose gain has yet to be measured."""

    rate: float
    """Rate before the step."""
    feeders: int
    """Number of feeders before the step."""
    gain: float
    """Predicted rate, as a multiple of `rate`."""
    cost_s: float
    """Wall time to make a batch before the step."""
    failures: int = 0


@dataclass(slots=True)
class Autoscaler:
    """The policy for one job, and its memory of that job."""

    bounds: Bounds = field(default_factory=Bounds)
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, N*) for each measurement of the last DOWN_AFTER_S seconds."""
    _looked: int = 0
    """N* of the last measurement, or 0 if there is none."""
    _since: float | None = None
    """Time since which N* has been known without a gap."""
    _stepped_at: float = -math.inf
    _waited: int = 0
    """Number of consecutive measurements in which training waited."""
    _changed_at: float = -math.inf
    _down_at: float = -math.inf
    _pending_since: float | None = None
    _expected: _Expectation | None = None
    _served_at: float | None = None
    """Time since which all feeders have served, or None while some are missing."""
    _saturated_until: float = -math.inf
    _saturated_s: float = SATURATED_S
    _cut: int | None = None
    """Number of feeders to return to at once, because more feeders did not help. None if there is nothing to undo."""
    _is_retry: bool = False
    """True after a job was saturated, until its training no longer waits."""
    _no_down_until: float = -math.inf
    _regret_s: float = REGRET_S
    _last: Proposal | None = None

    def step(self, now: float, situation: Situation) -> Proposal:
        """Returns the next proposal. Further calls within EVERY_S return the same proposal, unless the number of
        feeders has changed."""
        last = self._last
        if last is not None and last.feeders == situation.desired and now - self._stepped_at < 0.8 * EVERY_S:
            return last
        self._stepped_at = now
        self._last = made = self._step(now, situation)
        if made.changes(situation):
            self._changed_at, self._waited, self._served_at = now, 0, None
        return made

    def _step(self, now: float, situation: Situation) -> Proposal:
        desired, measures = situation.desired, situation.measures
        missing = situation.ready < desired
        self._pending_since = (self._pending_since or now) if missing else None
        self._served_at = None if missing else (self._served_at or now)
        if (inside := self.bounds.clamp(desired)) != desired:
            return _proposal(
                inside, Reason.AT_LIMIT, f"{inside} feeders, because {desired} is outside the bounds"
            )
        if situation.frozen:
            self._forget()
            return _proposal(desired, Reason.FROZEN, situation.frozen)
        verdict = judge(measures)
        if measures is None or verdict is None:
            self._forget()
            return _proposal(desired, Reason.UNKNOWN, "too few batches so far to tell")
        if not measures.is_steady:
            self._expected, self._waited = None, 0
            return _proposal(desired, Reason.FROZEN, "an epoch or an evaluation is beginning or ending")
        self._compare(now, measures, verdict.limit)
        wanted = self._wanted_now(measures, verdict, situation.step)
        self._note(now, wanted)
        self._waited = self._waited + 1 if measures.waiting > WAITS else 0
        if self._cut is not None:
            cut, self._cut = self.bounds.clamp(-(-self._cut // situation.step) * situation.step), None
            if cut < desired:
                return _proposal(cut, Reason.SATURATED, f"more than {cut} feeders would gain nothing")
        if now < self._saturated_until:
            return self._down(now, situation, min(wanted, desired), Reason.SATURATED)
        up = self._up(now, situation, measures, wanted) if verdict.limit in HELPED else None
        return up or self._down(now, situation, wanted, Reason.STEADY)

    def _forget(self) -> None:
        """Drops observations that no longer describe the job."""
        self._wanted.clear()
        self._since = self._expected = None
        self._waited = self._looked = 0

    def _wanted_now(self, measures: Measures, verdict: InputVerdict, step: int) -> int:
        """Returns N*, rounded up to whole pods and clamped to the bounds."""
        pipeline = pipeline_of(measures)
        rate, is_slots = demand(measures, pipeline, verdict.limit)
        feeders = needed(pipeline, rate, is_slots=is_slots)
        feeders = max(feeders, min(measures.slots, measures.feeders))  # with fewer, a slot would be reread
        return self.bounds.clamp(-(-feeders // step) * step)

    def _note(self, now: float, wanted: int) -> None:
        if self._since is None:
            self._since = now
        before, self._looked = self._looked, wanted
        self._wanted.append((now, min(wanted, before or wanted)))  # a single measurement may be an outlier
        while self._wanted[0][0] < now - DOWN_AFTER_S + EVERY_S / 2:  # steps are not exactly EVERY_S apart
            self._wanted.popleft()

    def _up(self, now: float, situation: Situation, measures: Measures, wanted: int) -> Proposal | None:
        desired = situation.desired
        if wanted <= UP * desired or not (self._waited >= 2 or measures.waiting >= SURE):
            return None
        if self._pending_since is not None:
            if now - self._pending_since >= PENDING_S:
                text = f"{desired - situation.ready} feeders have not started for {now - self._pending_since:.0f} s"
                return _proposal(desired, Reason.PENDING, f"training needs {wanted} feeders, but {text}")
            return _proposal(desired, Reason.STARTING, f"{situation.ready} of {desired} feeders are serving")
        settled_at = (
            max(self._changed_at, self._served_at or now) if self._changed_at > -math.inf else -math.inf
        )
        if self._expected is not None or now - settled_at < SETTLE_S:
            return _proposal(desired, Reason.STARTING, "the effect of the last change is being measured")
        is_sure = not measures.queues_kernels or measures.calm_step_s >= measures.step_s
        most = (FASTEST if is_sure else CAREFUL) * max(desired, situation.step)
        if self._is_retry:
            most = max(desired + situation.step, int(RETRY * desired) // situation.step * situation.step)
        target = self.bounds.clamp(min(wanted, most))
        if target <= desired:
            return _proposal(
                desired,
                Reason.AT_LIMIT,
                f"training needs {wanted} feeders, but at most {desired} are allowed",
            )
        if now - self._down_at < REGRET_S:
            self._no_down_until = now + self._regret_s
            self._regret_s *= 2
        pipeline = pipeline_of(measures)
        gain = min(target / max(1, situation.ready), pipeline.period_s / max(pipeline.step_s, 1e-9))
        self._expected = _Expectation(
            rate=measures.rate, feeders=situation.ready, gain=gain, cost_s=measures.wall_s
        )
        return _proposal(
            target, Reason.UP,
            f"training waits for {measures.waiting:.0%} of the time, and needs {wanted} feeders instead of {desired}",
        )  # fmt: skip

    def _down(self, now: float, situation: Situation, wanted: int, otherwise: Reason) -> Proposal:
        desired, highest = situation.desired, max(number for _, number in self._wanted)
        held = self._since is not None and now - self._since >= DOWN_AFTER_S - EVERY_S
        waits = now < max(self._no_down_until, self._down_at + DOWN_EVERY_S)
        if highest > DOWN * desired or not held or waits:
            more = ", and more would not help" if otherwise is Reason.SATURATED else ""
            return _proposal(desired, otherwise, f"training needs {wanted} feeders{more}")
        smallest = math.ceil(desired * (1 - DOWN_MOST) / situation.step) * situation.step
        target = self.bounds.clamp(max(highest, smallest))
        if target < desired:
            self._down_at = now
        text = f"{highest} feeders instead of {desired} have sufficed for {DOWN_AFTER_S / 60:.0f} minutes"
        return _proposal(target, Reason.DOWN, text)

    def _compare(self, now: float, measures: Measures, limit: LiveLimit) -> None:
        """Compares the rate after a step up with the predicted one."""
        expected = self._expected
        if self._pending_since is not None and now - self._pending_since >= PENDING_S:
            self._expected = None
        if expected is None or self._served_at is None or now - self._served_at < SETTLE_S:
            return
        if measures.wall_s > DEARER * expected.cost_s * measures.feeders / max(1, expected.feeders):
            self._expected = None  # crowding cannot raise a batch's cost by this much: the work has changed
            return
        reached = measures.rate / max(expected.rate, 1e-9)
        if limit is LiveLimit.TRAINER or reached - 1 >= GAINED * (expected.gain - 1):
            self._expected = None
            if limit is LiveLimit.TRAINER:
                self._is_retry, self._saturated_s = False, SATURATED_S
            return
        expected.failures += 1
        if expected.failures < 2:
            return
        self._expected, self._is_retry = None, True
        before = expected.feeders
        self._cut = math.ceil(before * reached / HEADROOM) if reached > UP else before
        self._saturated_until = now + self._saturated_s
        self._saturated_s = min(MOST_SATURATED_S, 2 * self._saturated_s)
        self._wanted.clear()
        self._since = None  # the model's earlier numbers were wrong


def _proposal(feeders: int, reason: Reason, text: str) -> Proposal:
    return Proposal(feeders=feeders, reason=reason, text=text)
