"""A simulated job in virtual time: what its sidecars and feeders report each second, for any number of feeders."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from dataloaderjob.core.measures import Measures, MeasuresWindow


@dataclass(kw_only=True)
class SimJob:
    """Batches cost `cost_s` each; `ranks` trainers take `step_s(now)` for each. The slowest resource sets the rate."""

    cost_s: float = 0.5
    step_s: Callable[[float], float] = lambda now: 0.1
    ranks: int = 1
    spread: float = 0.0
    idle: float = 0.0
    """Share of a batch's cost that waits for storage."""
    nbytes: int = 1_000_000
    link: float = float("inf")
    receive_s: float = 0.0
    receive_queued_s: float = 0.0
    """Time of a batch for which its receiver has no CPU."""
    slots: int = 0
    launch_s: float | None = None
    """CUDA: the step as it looks while the trainer waits."""
    start_s: Callable[[int], float] = lambda number: 5.0
    """Time until feeder `number` of all those started serves."""
    paused: Callable[[float], bool] = lambda now: False
    evaluates: Callable[[float], bool] = lambda now: False
    has_ended: Callable[[float], bool] = lambda now: False
    report_s: int = 1
    """Interval between reports of feeders."""
    noise: float = 0.0
    seed: int = 0
    now: float = 0.0
    desired: int = 1
    taken: float = 0.0
    cost: float = 0.0
    """Feeder-seconds so far."""
    _starts: list[float] = field(default_factory=list)
    """Times at which the wanted feeders serve."""
    _begun: int = 0
    _sums: dict[str, float] = field(default_factory=dict)
    _costs: dict[str, float] = field(default_factory=dict)
    _reported: dict[str, int] = field(default_factory=dict)
    _paused_s: float = 0.0
    _owed: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.window = MeasuresWindow()
        self.scale(self.desired)

    def scale(self, desired: int) -> None:
        del self._starts[desired:]
        while len(self._starts) < desired:
            self._starts.append(self.now + self.start_s(self._begun))
            self._begun += 1
        self.desired = desired

    @property
    def ready(self) -> int:
        return sum(start <= self.now for start in self._starts)

    def rate_of(self, feeders: float) -> float:
        """Batches per second of all ranks with this number of feeders, now."""
        return min(
            feeders / self.cost_s,
            self.ranks / self.step_s(self.now),
            self.link / self.nbytes,
            self.ranks / receive_s if (receive_s := self.receive_s + self.receive_queued_s) else float("inf"),
            self.slots / self.cost_s if self.slots else float("inf"),
        )

    def second(self) -> None:
        """Lets a second pass, and adds a reading."""
        self.now += 1.0
        self.cost += self.desired
        ready = self.ready
        if self.paused(self.now):
            self._paused_s += 1.0
        elif ready and not self.has_ended(self.now):
            self._work(ready)
        sums = {name: int(value) for name, value in self._sums.items()}
        iterators = 0 if self.has_ended(self.now) else self.ranks * (2 if self.evaluates(self.now) else 1)
        metrics = {**sums, "streams": iterators, "queues_kernels": int(self.launch_s is not None)}
        reports = {"sidecar": {"receivers": self.ranks, "metrics": metrics}}
        if int(self.now) % self.report_s == 0:
            self._reported = {name: int(value) for name, value in self._costs.items()}
        self.window.add(self.now, reports, {"feeders": {**self._reported, "slots": self.slots}}, ready)

    def run(self, seconds: float) -> Measures | None:
        for _ in range(int(seconds)):
            self.second()
        return self.window.measures()

    def _work(self, ready: int) -> None:
        step_s = self.step_s(self.now)
        rate = self.rate_of(ready) * (1 + self.noise * self._random.uniform(-1, 1))
        rate = min(rate, self.ranks / step_s)
        each_s = self.ranks / rate
        waited_s = each_s - step_s
        shown_s = step_s if self.launch_s is None or waited_s < 1e-9 else min(step_s, self.launch_s)
        limited = rate > 0.95 * self.link / self.nbytes
        self._owed += rate
        rate = int(self._owed)  # batches that were finished in this second
        self._owed -= rate
        more = {
            "next_calls": rate, "step_ns": rate * shown_s * 1e9, "nbytes": rate * self.nbytes,
            "wait_ns": rate * (each_s - shown_s) * 1e9, "receiver_cpu_ns": rate * self.receive_s * 1e9,
            "receiver_queued_ns": rate * self.receive_queued_s * 1e9,
        }  # fmt: skip
        more["step_ns"] += self._paused_s * self.ranks * 1e9
        self._paused_s = 0.0
        cost_ns = self.cost_s * 1e9
        made = {
            "built": rate, "wall_ns": rate * cost_ns, "samples_ns": rate * cost_ns * (1 - self.idle),
            "looks": 2 * ready,
            "wall_us2": rate * (self.cost_s * 1e6) ** 2 * (1 + self.spread**2), "collate_ns": 0, "encode_ns": 0,
            "queued_ns": 0, "sending": 2 * ready * limited,
        }  # fmt: skip
        for name, value in more.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        for name, value in made.items():
            self._costs[name] = self._costs.get(name, 0.0) + value
        self.taken += rate
